"""`backend.options` of the Slurm backend, which hold what differs from site to site. Pure.

A site writes these once, in a profile (`slurm/backend/*.yaml`, chosen with `--config-dir slurm
backend=<profile>`). Users override single options: `backend.options.partition=urgent`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from orchestrator.backends.base import decode_options
from orchestrator.cluster.hostlist import expand
from orchestrator.errors import OrchError
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit

#: A name in Slurm. Other characters are refused instead of quoted: no site has such names.
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@+=-]{0,126}\Z")]
#: One or several names, of which Slurm takes the first that can start the job.
Words = Annotated[
    str,
    Meta(
        pattern=(
            r"^[A-Za-z0-9][A-Za-z0-9_.:@+=-]{0,126}(,[A-Za-z0-9][A-Za-z0-9_.:@+=-]{0,126}){0,31}\Z"
        )
    ),
]
Flag = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{1,40}\Z")]
Module = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./:@+=-]{0,126}\Z")]
Line = Annotated[str, Meta(min_length=1, max_length=1000)]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}\Z")]


class Container(Frozen):
    """The container in which the agents and their workers run."""

    #: what starts the container; none: agents run on the node itself
    runtime: Literal["none", "pyxis", "apptainer", "charliecloud"] = "none"
    #: pyxis: registry URI or .sqsh; apptainer: .sif or URI; charliecloud: folder or .sqfs, which
    #: has the mount points
    image: Annotated[str, Meta(max_length=1000)] = ""
    mounts: list[Annotated[str, Meta(min_length=1, max_length=1000)]] = []  # SRC or SRC:DST[:FLAGS]
    #: The interpreter inside the image, which has orch installed.
    python: Annotated[str, Meta(max_length=1000)] = "python3"


class SlurmOptions(Frozen):
    """Every option with its default.

    Times are in Slurm's form (`D-HH:MM:SS`); the names of other options carry their units.
    """

    # the machine that submits; `orchestrator.submit` reads these two, for any backend
    ssh: str | None = None  # a login node, as ssh takes it: the job is planned and submitted there
    ssh_python: str | None = None  # the login node's interpreter with orch; None: python3
    # the nodes
    partition: Words | None = None  # a,b: the first that can start it; None: the site's default
    account: Word | None = None  # whom Slurm charges; None: the user's default
    qos: Word | None = None  # quality of service; None: the default of account and partition
    reservation: Word | None = None  # a reservation to run in
    constraint: Annotated[str, Meta(max_length=500)] | None = None  # features: a&b, [rack1|rack2]
    nodelist: list[str] = []  # host lists; only on tree or flat topologies
    exclude: list[str] = []  # host lists of nodes that the job must not get
    bad_nodes: list[str] = []  # nor these, which orch fills in from `orch nodes` at each start
    # the resources
    time: str | None = None  # limit of one attempt of the job; None: the partition's default
    #: How the site counts GPUs.
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gpu_type: Word | None = None  # h100 in --gpus-per-node=h100:8
    #: cores that the job asks for; None: all CPUs of an exclusive node, else Slurm's default
    cpus_per_node: Annotated[int, Meta(ge=1)] | None = None
    memory: Annotated[str, Meta(pattern=r"^[0-9]+[KMGT]?\Z")] = "0"  # of a node; 0: all
    exclusive: bool = True  # whether the job gets whole nodes
    # the switches
    #: the kind of network that --switches or --segment is for; auto: asks the cluster
    topology: Literal["auto", "tree", "block", "none"] = "none"
    #: How long to wait for the fewest switches; the site caps it (max_switch_wait).
    switches_wait: str = "00:05:00"
    segment: Annotated[int, Meta(ge=1)] | None = None  # block topology; None: from the plan
    spread_segments: bool = False  # whether segments must be in different blocks
    # lifecycle
    #: --signal: the run saves and stops this long before the time limit.
    notice_s: Annotated[int, Meta(ge=0, le=65535)] = 180
    #: Write speed of a node to the shared files; for warnings.
    checkpoint_gb_per_s: Annotated[float, Meta(gt=0)] = 1.0
    #: whether the job may start again after a save, a preemption or a lost node
    requeue: bool = True
    #: Requeues for any reason: preemption, time limit, lost nodes.
    max_requeues: Annotated[int, Meta(ge=0)] = 50
    #: Of these, requeues after a lost or unhealthy node (exit 74, 76).
    max_node_faults: Annotated[int, Meta(ge=0)] = 3
    #: Keep the other nodes when one is lost; without it Slurm requeues the whole job.
    no_kill: bool = False
    dependency: Annotated[str, Meta(max_length=500)] | None = None  # afterok:123, singleton
    #: earliest start, as sbatch takes it: 16:00, now+1hour
    begin: Annotated[str, Meta(max_length=64)] | None = None
    #: nodes=A..B: try a smaller size if this one would start later.
    start_within_s: Annotated[int, Meta(ge=0)] = 900
    # labels
    #: free text that squeue and sacct show
    comment: Annotated[str, Meta(max_length=500)] | None = None
    wckey: Word | None = None  # the workload characterization key of sites that account by it
    mail_user: Annotated[str, Meta(max_length=254)] | None = None  # address for Slurm's mails
    #: when Slurm sends one: BEGIN,END,FAIL
    mail_type: Annotated[str, Meta(pattern=r"^[A-Z0-9_,]+\Z")] | None = None
    # environment
    modules: list[Module] = []  # environment modules, loaded in this order
    setup: list[Line] = []  # shell lines run before srun; trusted, as the profile is
    unset: list[Variable] = []  # environment variables to remove from the job
    container: Container = Container()  # an image in which agents and workers run
    shell: Annotated[str, Meta(max_length=255)] = "/bin/bash"  # the interpreter of the job script
    #: Further sbatch flags, e.g. {gres-flags: enforce-binding}.
    sbatch: dict[Flag, str | int | bool] = {}
    #: Further srun flags, e.g. {cpu-bind: none, mpi: none}.
    srun: dict[Flag, str | int | bool] = {}

    @property
    def without(self) -> list[str]:
        """Host lists of all nodes that the job must not get."""
        return [*self.exclude, *(node for node in self.bad_nodes if node not in self.exclude)]

    def __post_init__(self) -> None:
        for name in ("time", "switches_wait"):
            value = getattr(self, name)
            if value is not None:
                parse_time(value)
        for hosts in (*self.without, *self.nodelist):
            expand(hosts)
        if (self.container.runtime == "none") != (not self.container.image):
            raise OrchError("backend.options.container: runtime and image go together", Exit.CONFIG)
        if self.dependency is not None and not re.fullmatch(r"[A-Za-z0-9_:+,?]+", self.dependency):
            raise OrchError(
                f"backend.options.dependency {self.dependency!r} is not a Slurm dependency",
                Exit.CONFIG,
            )


def read_options(options: Mapping[str, Any]) -> SlurmOptions:
    """The checked options.

    OrchError (65) names an unknown key and the nearest legal one, or the path of a wrong value.
    """
    return decode_options(options, SlurmOptions, "slurm")


_CLUSTER_VARIABLES = ("SLURM_CLUSTERS", "SBATCH_CLUSTERS")
#: Variables of sbatch that many users set for all their jobs -> the option that they stand for.
_OPTION_VARIABLES = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_TIMELIMIT": "time",
    "SBATCH_WCKEY": "wckey",
}


def from_environment(options: SlurmOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Values of the user's `SBATCH_*` variables for options that are not set.

    OrchError (65) names a variable whose value its option cannot have.
    """
    values: dict[str, str] = {}
    for name, option in _OPTION_VARIABLES.items():
        value = environ.get(name)
        if not value or getattr(options, option) is not None:
            continue
        try:
            read_options({option: value})
        except OrchError as error:
            raise OrchError(f"{name}={value}: {error.message}", Exit.CONFIG) from None
        values[option] = value
    return values


def check_environment(options: SlurmOptions, environ: Mapping[str, str]) -> None:
    """Refuses (OrchError 65) a variable of sbatch that contradicts the options.

    It differs from an option that is set, sends jobs to another cluster, or has a value that its
    option cannot have.
    """
    from_environment(options, environ)
    for name in _CLUSTER_VARIABLES:
        if value := environ.get(name):
            raise OrchError(
                f"{name}={value}: jobs are sent to the cluster of this login node; unset it",
                Exit.CONFIG,
            )
    for name, option in _OPTION_VARIABLES.items():
        value = environ.get(name)
        option_value = getattr(options, option)
        if value and option_value not in (None, value):
            raise OrchError(
                f"{name}={value} and backend.options.{option}={option_value} differ: unset one",
                Exit.CONFIG,
            )


def check_rendering(environ: Mapping[str, str]) -> None:
    """Refuses (OrchError 65) a variable by which `sbatch` would change a rendered script's job.

    A job that orch itself submits is what its script says: `Slurm` passes sbatch no such variable.
    """
    for name, value in sorted(environ.items()):
        if value and name.startswith("SBATCH_") and name not in _OPTION_VARIABLES:
            raise OrchError(
                f"{name}={value} is set and would change the job: unset it", Exit.CONFIG
            )


# ------------------------------------------------------------------------------------------ lengths
#     of time, sbatch(1)

_FORMS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,"
    " days-hours:minutes:seconds"
)
_FORM = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,9})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?\Z")


def parse_time(time: str) -> int | None:
    """Seconds of a duration as Slurm writes it, None for no limit.

    OrchError (65) names the legal forms.
    """
    stripped = time.strip()
    if stripped.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    match = _FORM.match(stripped)
    if not match:
        raise OrchError(f"{time!r} is not a Slurm time; forms: {_FORMS}, UNLIMITED", Exit.CONFIG)
    days, *rest = match.groups()
    numbers = [int(n) for n in rest if n is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def format_time(seconds: int) -> str:
    """`D-HH:MM:SS`, or `HH:MM:SS` below a day. ValueError below 0."""
    if seconds < 0:
        raise ValueError(f"a length of time cannot be {seconds} s")
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
