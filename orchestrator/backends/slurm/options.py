"""`backend.options` of the slurm backend: what differs from site to site. Pure.

A site writes these once, in a profile (`slurm/backend/*.yaml`, chosen with `--config-dir slurm backend=<profile>`), and
a user overrides single ones: `backend.options.partition=urgent`.
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

from .script import duration

#: A word that Slurm takes as a name. Anything outside is refused, not quoted: no site has names like that.
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:@+=-]{0,126}\Z")]
Flag = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9-]{1,40}\Z")]
Module = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./:@+=-]{0,126}\Z")]
Line = Annotated[str, Meta(min_length=1, max_length=1000)]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,254}\Z")]


class Container(Frozen):
    """How the agents (and so the workers) are put into a container."""

    runtime: Literal["none", "pyxis", "apptainer"] = "none"
    image: Annotated[str, Meta(max_length=1000)] = ""  # pyxis: registry URI or .sqsh; apptainer: .sif or URI
    mounts: list[Annotated[str, Meta(min_length=1, max_length=1000)]] = []  # SRC or SRC:DST[:FLAGS]
    python: Annotated[str, Meta(max_length=1000)] = "python3"  # the interpreter inside, which has orch installed


class SlurmOptions(Frozen):
    """Every option with its default. Times are Slurm's (`D-HH:MM:SS`), sizes in their names."""

    # where
    partition: Word | None = None  # None: the site's default
    account: Word | None = None
    qos: Word | None = None
    reservation: Word | None = None
    constraint: Annotated[str, Meta(max_length=500)] | None = None  # features: a&b, [rack1|rack2]
    nodelist: list[str] = []  # host lists; only on tree or flat topologies
    exclude: list[str] = []  # host lists of nodes known to be bad
    # how much
    time: str | None = None  # limit of one life of the job; None: the partition's default
    gpu_request: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"  # how the site counts GPUs
    gpu_type: Word | None = None  # h100 in --gpus-per-node=h100:8
    cpus_per_node: Annotated[int, Meta(ge=1)] | None = None  # None: all of an exclusive node, else Slurm's default
    memory: Annotated[str, Meta(pattern=r"^[0-9]+[KMGT]?\Z")] = "0"  # of a node; 0: all
    exclusive: bool = True
    # on which switches
    topology: Literal["auto", "tree", "block", "none"] = "none"  # auto: ask the cluster when submitting
    switches_wait: str = "00:05:00"  # how long to wait for the fewest switches; the site caps it (max_switch_wait)
    segment: Annotated[int, Meta(ge=1)] | None = None  # block topology; None: from the plan
    spread_segments: bool = False
    # life
    notice_s: Annotated[int, Meta(ge=0, le=65535)] = 180  # --signal: this long before the time limit, save and stop
    checkpoint_gb_per_s: Annotated[float, Meta(gt=0)] = 1.0  # what one node writes to the shared file system; to warn
    requeue: bool = True
    max_requeues: Annotated[int, Meta(ge=0)] = 50  # of all kinds together: preemption, time limit, lost nodes
    max_node_faults: Annotated[int, Meta(ge=0)] = 3  # of them, after a lost or sick node (exit 74, 76)
    no_kill: bool = False  # keep the other nodes when one is lost; without it Slurm requeues the whole job
    dependency: Annotated[str, Meta(max_length=500)] | None = None  # afterok:123, singleton
    begin: Annotated[str, Meta(max_length=64)] | None = None
    start_within_s: Annotated[int, Meta(ge=0)] = 900  # nodes=A..B: a size that would start later gives way to a smaller
    # who and why
    comment: Annotated[str, Meta(max_length=500)] | None = None
    wckey: Word | None = None
    mail_user: Annotated[str, Meta(max_length=254)] | None = None
    mail_type: Annotated[str, Meta(pattern=r"^[A-Z0-9_,]+\Z")] | None = None
    # with what
    modules: list[Module] = []  # environment modules, loaded in this order
    setup: list[Line] = []  # lines of shell that the site needs before srun; trusted as the profile is
    unset: list[Variable] = []  # variables that must not reach the job
    container: Container = Container()
    shell: Annotated[str, Meta(max_length=255)] = "/bin/bash"
    sbatch: dict[Flag, str | int | bool] = {}  # further sbatch flags, e.g. {gres-flags: enforce-binding}
    srun: dict[Flag, str | int | bool] = {}  # further srun flags, e.g. {cpu-bind: none, mpi: none}

    def __post_init__(self) -> None:
        for name in ("time", "switches_wait"):
            value = getattr(self, name)
            if value is not None:
                duration.parse(value)
        for text in (*self.exclude, *self.nodelist):
            expand(text)
        if (self.container.runtime == "none") != (not self.container.image):
            raise OrchError("backend.options.container: runtime and image go together", Exit.CONFIG)
        if self.dependency is not None and not re.fullmatch(r"[A-Za-z0-9_:+,?]+", self.dependency):
            raise OrchError(f"backend.options.dependency {self.dependency!r} is not a Slurm dependency", Exit.CONFIG)


def read_options(options: Mapping[str, Any]) -> SlurmOptions:
    """Strict: an unknown key is refused with the nearest legal one, a wrong type with its place (exit 65)."""
    return decode_options(options, SlurmOptions, "slurm")
