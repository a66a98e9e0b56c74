"""The launch request: everything that submitting will do, as one value.

`make_request` is pure, so what `--dry-run` prints is what `submit` sends, byte for byte. Each
backend renders the same value into its own form (local processes here; an sbatch script or a
JobSet elsewhere). Commands are argument lists, never shell text; of the environment it holds
names, not values.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType, structs

from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, to_json
from orchestrator.plan.codec import UNREADABLE, read_file
from orchestrator.plan.document import Frozen

from .environment import Environment
from .folder import RunFolder, check_run_id
from .run_variables import run_environment
from .variables import (
    Dropped,
    is_secret_name,
    is_utf8,
)

AGENT = "orchestrator.agent"  # the module that backends start on every node
SCHEMA = "orch.request/1"

_IN_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")  # user:password
HIDDEN = "(redacted)"


class AgentCommand(Frozen):
    """The command of the agent on one node."""

    node: str
    argv: list[str]


class Worker(Frozen, omit_defaults=True):
    """The command that an agent starts for each rank."""

    argv: list[str]
    cwd: str
    bundled: bool  # the trainer of this wheel, not the user's program
    pattern: str = ""  # a regular expression that reads steps from what it prints
    numa_binding: bool = True  # run on the cores of its GPU's NUMA domain


class LeftOut(Frozen):
    """A file or folder of the user's that the copy lacks."""

    name: str  # relative to the root; folders end with a slash
    bytes: int


class PackedCode(Frozen):
    """The code as one compressed archive, which travels where nodes do not share folders."""

    sha256: str
    bytes: int
    outside_links: list[str] = []  # links that lead out of the folder, which it lacks


class Code(Frozen):
    """The code that runs. `root` is copied to the run's `code` folder, unless `kind` is "none"."""

    kind: Literal["git", "folder", "none"]
    root: str = ""  # absolute
    subfolder: str = "."  # the user's working folder, relative to `root`
    commit: str | None = None
    #: root is a checkout of orch: the run uses the copy, not the installed package
    holds_orch: bool = False
    #: the largest first; UNSET: nothing that a program would miss
    left_out: list[LeftOut] | UnsetType = UNSET
    #: folder on this machine with the files that another machine, whose folder `root` is, shipped
    held_at: str | UnsetType = UNSET
    #: root holds an `.orchignore`, which alone decides what is copied
    has_rules: bool | UnsetType = UNSET
    #: number and size of the files that are copied, if they were counted
    files: int | UnsetType = UNSET
    bytes: int | UnsetType = UNSET
    packed: PackedCode | UnsetType = UNSET


class File(Frozen):
    """A file of the run folder. Its content is sent with the request, which contains its hash."""

    path: str
    mode: Annotated[str, msgspec.Meta(pattern="^0[0-7]{3}$")]
    size: int
    sha256: str  # "" for a secret, which the backend draws when it submits


class Policy(Frozen):
    """The limits under which a run is restarted and ended."""

    max_restarts: int
    grace_s: float
    heartbeat_timeout_s: float
    join_timeout_s: float
    #: the meanings and defaults of `orchestrator.config.schema.BackendSpec`
    max_restarts_by_cause: dict[str, int] = {}
    hang_after_s: float = 30.0
    hang_after_steps: float = 10.0
    start_hang_after_s: float = 1800.0
    straggler_ratio: float = 1.5
    on_straggler: Literal["name", "exclude"] = "name"
    bad_node_after: int = 3
    remember_bad_nodes_h: float = 24.0
    min_nodes_grace_s: float = 0.0
    allow_drills: bool | None = None
    store_filter: bool = True


class LaunchRequest(Frozen):
    """Everything that a backend needs to start a run."""

    schema: str
    run_id: str
    handle: str  # <backend>://<run id>
    backend: str
    backend_options: dict[str, str | int | float | bool | list[Any] | dict[str, Any] | None]
    run_dir: str
    discovery_dir: str  # where Prometheus looks for the runs of this user: one <run id>.json each
    plan_hash: str
    cluster: str
    device: Literal["cpu", "cuda"]
    nodes: int
    gpus_per_node: int
    summary: dict[str, str | int]
    agents: list[AgentCommand]
    worker: Worker
    environment: Environment
    policy: Policy
    code: Code
    files: list[File]
    #: node counts at which an elastic run may start, largest first; each has a plan of its own
    sizes: list[int] = []


class Site(Frozen):
    """Who submits a run, and from which machine and folder; read once by the verb."""

    run_id: str
    home: str  # absolute
    runs_dir: str  # absolute
    python: str
    environment_names: list[str]
    cwd: str
    code: Code
    agent_flags: list[str] = []  # options of the agent, chosen by the backend
    join_timeout_s: float = 60.0
    passes_all: bool = False  # a user's program gets every variable of the shell
    #: names of variables that mean something on this machine only, if the run is on another one
    #: that shares no folders with it
    machine_names: list[str] = []
    program_python: str = ""  # the interpreter of a user's program; "": that of an image
    packed_code: bytes = b""  # the archive of `code.packed`


class SubmissionBundle(Frozen):
    """A request with the contents of its files."""

    request: LaunchRequest
    contents: dict[str, bytes]
    #: what the user's program does not get of the submitting shell; nothing for the trainer
    dropped: Dropped = Dropped()


def make_request(
    config: Config,
    plan: Plan,
    site: Site,
    command: Sequence[str] = (),
    keep: Collection[str] = (),
    sizes: Mapping[int, Plan] = MappingProxyType({}),
) -> SubmissionBundle:
    """Returns the whole launch as a value. `command`: the user's program, not the trainer; `keep`:
    more variables to pass on; `sizes`: the plans of an elastic run by node count, one of which is
    `plan`.

    OrchError: 64 for a bad variable name, argument or folder, 78 for a secret written into the
    configuration.
    """
    run = _run_folder(site)
    copied = site.code.kind != "none"
    python_path = [str(run.code)] if copied and site.code.holds_orch else []
    agents = [_agent_command(site, run, node) for node in used_nodes(plan)]
    worker = _worker(config, site, run, command)
    contents = _file_contents(config, plan, site, run, sizes)
    environment, dropped = run_environment(
        config,
        plan,
        site,
        keep,
        python_path=python_path,
        is_program=bool(command),
    )
    request = LaunchRequest(
        schema=SCHEMA,
        run_id=site.run_id,
        handle=f"{config.backend.name}://{site.run_id}",
        backend=config.backend.name,
        backend_options=config.backend.options,
        run_dir=str(run.path),
        discovery_dir=str(Path(site.home, "metrics.sd")),
        plan_hash=plan.hash,
        cluster=plan.cluster.name,
        device=plan.cluster.device,
        nodes=len(agents),
        gpus_per_node=plan.cluster.gpus_per_node,
        summary=_summary(config, plan, worker, site),
        agents=agents,
        worker=worker,
        environment=environment,
        policy=_policy(config, site),
        code=site.code,
        files=_files(run, contents),
        sizes=sorted(sizes, reverse=True),
    )
    return SubmissionBundle(request=request, contents=contents, dropped=dropped)


def _agent_command(site: Site, run: RunFolder, node: str) -> AgentCommand:
    start = [site.python, "-P", "-m", AGENT]
    options = ["--run-dir", str(run.path), "--node", node, *site.agent_flags]
    return AgentCommand(node=node, argv=[*start, *options])


def _worker(config: Config, site: Site, run: RunFolder, command: Sequence[str]) -> Worker:
    copied = site.code.kind != "none"
    numa_binding = config.backend.numa_binding
    if not command:
        return Worker(
            argv=[site.python, "-P", "-m", "trainer", "--plan", str(run.plan)],
            cwd=str(run.code if copied else run.path),
            bundled=True,
            numa_binding=numa_binding,
        )
    cwd = Path(run.code, site.code.subfolder) if copied else Path(site.cwd)
    return Worker(
        argv=checked_command(command),
        cwd=str(cwd),
        bundled=False,
        pattern=config.metrics.pattern or "",
        numa_binding=numa_binding,
    )


def _file_contents(
    config: Config, plan: Plan, site: Site, run: RunFolder, sizes: Mapping[int, Plan]
) -> dict[str, bytes]:
    contents = {
        run.plan.name: to_json(plan, indent=1) + b"\n",
        run.config.name: frozen_config(config, plan.program),
    }
    for nodes, sized in sizes.items():
        contents[run.sized_plan(nodes).name] = to_json(sized, indent=1) + b"\n"
    if site.packed_code:
        contents[run.packed_code.name] = site.packed_code
    return contents


def _files(run: RunFolder, contents: Mapping[str, bytes]) -> list[File]:
    files = [
        File(path=name, mode="0600", size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(contents.items())
    ]
    return [*files, File(path=run.key.name, mode="0600", size=65, sha256="")]


def _summary(config: Config, plan: Plan, worker: Worker, site: Site) -> dict[str, str | int]:
    summary: dict[str, str | int] = {"cluster": plan.cluster.name}
    if not plan.program:
        summary["model"] = plan.model.name
    parallel = config.choices.get("parallel", "")
    summary["parallel"] = "" if plan.program and parallel == "default" else parallel
    if not plan.program:
        summary["steps"] = plan.job.train.steps
    summary["world_size"] = plan.parallel.world_size
    summary["program"] = "trainer" if worker.bundled else " ".join(worker.argv)[:200]
    if site.program_python not in ("", site.python):
        summary["python"] = site.program_python
    if worker.pattern:
        summary["progress"] = "as printed"
    return summary


def _policy(config: Config, site: Site) -> Policy:
    limits = {
        name: getattr(config.backend, name)
        for name in Policy.__struct_fields__
        if name != "join_timeout_s"
    }
    return Policy(join_timeout_s=site.join_timeout_s, **limits)


def at_size(request: LaunchRequest, plan: Plan) -> LaunchRequest:
    """Returns the request of the same run under another plan: an agent on each node that has
    ranks in it."""
    agents = on_nodes(request, used_nodes(plan))
    return structs.replace(request, plan_hash=plan.hash, agents=agents, nodes=len(agents))


def on_nodes(request: LaunchRequest, nodes: Iterable[str]) -> list[AgentCommand]:
    """Returns the agents for these nodes, each with the command of the first agent under its own
    name."""
    first = request.agents[0]
    return [structs.replace(first, node=node, argv=_with_node(first.argv, node)) for node in nodes]


def _with_node(argv: list[str], node: str) -> list[str]:
    """Replaces the node in an agent's command. Backends that fill in the command on the node itself
    have an empty one here."""
    if not argv:
        return []
    position = argv.index("--node") + 1
    return [*argv[:position], node, *argv[position + 1 :]]


def used_nodes(plan: Plan) -> list[str]:
    """Returns the nodes that hold ranks, in the plan's node order. The agent of the first hosts
    the coordinator."""
    busy = {rank.node for rank in plan.ranks}
    return [node for node in plan.cluster.node_names if node in busy]


def checked_command(command: Sequence[str]) -> list[str]:
    """Returns the command. OrchError (64) if an argument cannot be passed to a process, or written
    into a request."""
    for index, argument in enumerate(command):
        if "\0" in argument:
            raise OrchError(f"argument {index} of the program holds a NUL byte", Exit.USAGE)
        if not is_utf8(argument):
            raise OrchError(f"argument {index} of the program is not UTF-8", Exit.USAGE)
    return list(command)


def _run_folder(site: Site) -> RunFolder:
    """Returns the folder of the run. OrchError (64) for a bad run id, and for a path of the site
    that cannot be written into a request."""
    for path in (site.cwd, site.runs_dir, site.home, site.python, site.program_python):
        if not is_utf8(path):
            raise OrchError(f"the path {path!a} is not UTF-8", Exit.USAGE)
    return RunFolder(Path(site.runs_dir) / check_run_id(site.run_id))


def check_variables(request: LaunchRequest, environ: Mapping[str, str]) -> None:
    """Raises OrchError (65) if a run that is to start again was given a variable by name that
    `environ` does not set: its value is written down nowhere, and without it the run would
    silently be a different one."""
    missing = [name for name in request.environment.required if name not in environ]
    if missing:
        options = f"--env {' --env '.join(missing)}"
        pronoun = "it" if len(missing) == 1 else "them"
        raise OrchError(
            f"run {request.run_id} was submitted with {options}, not set in this shell: export"
            f" {pronoun} as then ({missing[0]}= for an empty value); values are never stored",
            Exit.CONFIG,
        )


def to_bytes(request: LaunchRequest) -> bytes:
    """Returns the bytes that `--dry-run --json` prints and that a backend sends and stores as
    request.json."""
    return (
        msgspec.json.format(msgspec.json.encode(request, order="deterministic"), indent=2) + b"\n"
    )


def from_bytes(raw: bytes) -> LaunchRequest:
    try:
        request = msgspec.json.decode(raw, type=LaunchRequest)
    except UNREADABLE as error:
        raise OrchError(f"request: {error}", Exit.CONFIG) from None
    if request.schema != SCHEMA:
        raise OrchError(
            f"request is of schema {request.schema!r}, this version reads {SCHEMA!r}", Exit.CONFIG
        )
    return request


def read_request(folder: RunFolder) -> LaunchRequest:
    """Reads the request of a run. OrchError (65) with one line if it is missing, damaged or of
    another version."""
    try:
        return from_bytes(read_file(folder.request))
    except OSError as error:
        raise OrchError(
            f"run {folder.run_id} has no readable request: {error.strerror}", Exit.CONFIG
        ) from error


def check_contents(bundle: SubmissionBundle) -> None:
    """Raises ValueError if a file's content is not the one that the request names."""
    for file in bundle.request.files:
        if file.sha256 and hashlib.sha256(bundle.contents[file.path]).hexdigest() != file.sha256:
            raise ValueError(f"content of {file.path} does not match the request")
        if stat.S_IMODE(int(file.mode, 8)) & 0o077:
            raise ValueError(f"{file.path} would be readable by others (mode {file.mode})")


# ------------------------------------------------------------------------------------------ secrets


def redacted(value: object, name: str = "") -> object:
    """Returns `value` (dicts, lists, scalars) with every text or number under a secret-looking
    key replaced, and also user and password in a URL."""
    if isinstance(value, dict):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [redacted(item, name) for item in value]
    if value in (None, "") or isinstance(value, bool):
        return value
    if is_secret_name(name):
        return HIDDEN
    return _IN_URL.sub(HIDDEN, value) if isinstance(value, str) else value


def config_tree(config: msgspec.Struct) -> dict[str, Any]:
    """Returns the configuration as plain values, without `nproc` if nobody set it: only programs
    have that key."""
    tree: dict[str, Any] = msgspec.to_builtins(config)
    if tree.get("nproc", 0) is None:
        del tree["nproc"]
    return tree


def frozen_config(config: msgspec.Struct, program: bool = False) -> bytes:
    """Returns the resolved configuration as YAML, redacted: the content of a run's config.yaml.
    `program`: leaves out what describes a model and its training."""
    tree = config_tree(config)
    if program:
        for key in ("model", "data", "optim", "train", "cost", "experiment"):
            tree.pop(key, None)
            tree["choices"].pop(key, None)
    return msgspec.yaml.encode(redacted(tree), order="deterministic")
