"""The launch request: everything that submitting will do, as one value.

`make_request` is pure, so what `--dry-run` prints is what `submit` sends, byte for byte. The same
value is what a backend renders into its own form (local processes here; an sbatch script or a
JobSet elsewhere). Commands are argument lists, never shell text; of the environment it holds names,
not values.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
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

from .folder import RunFolder, check_run_id
from .variables import all_names, is_name, is_secret_name, matching, passed_names

AGENT = "orchestrator.agent"  # the module that backends start on every node
SCHEMA = "orch.request/1"

_IN_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")  # user:password
HIDDEN = "(redacted)"


class AgentCommand(Frozen):
    """One agent, one node."""

    node: str
    argv: list[str]


class Worker(Frozen, omit_defaults=True):
    """What an agent starts once a rank."""

    argv: list[str]
    cwd: str
    bundled: bool  # the trainer of this wheel, not the user's program
    pattern: str = ""  # a regular expression that reads steps from what it prints
    numa_binding: bool = True  # to the cores of its GPU's NUMA domain


class LeftOut(Frozen):
    """A file or folder of the user's that the copy does not have."""

    name: str  # relative to the root; folders end with a slash
    bytes: int


class Code(Frozen):
    """Which code runs. `root` is copied to the run's `code` folder unless `kind` says that nothing
    is copied."""

    kind: Literal["git", "folder", "none"]
    root: str = ""  # absolute
    subfolder: str = "."  # where in it the user stood
    commit: str | None = None
    holds_orch: bool = (
        False  # root is a checkout of orch: the run uses the copy, not what is installed
    )
    left_out: list[LeftOut] | UnsetType = (
        UNSET  # the largest first; UNSET: nothing that a program would miss
    )
    held_at: str | UnsetType = (
        UNSET  # where this machine has what another one, whose folder `root` is, has shipped
    )


class File(Frozen):
    """A file of the run folder. Its content is sent with the request and is tied to it by the
    hash."""

    path: str
    mode: Annotated[str, msgspec.Meta(pattern="^0[0-7]{3}$")]
    size: int
    sha256: str  # "" for a secret, which the backend draws when it sends


class Environment(Frozen, omit_defaults=True, kw_only=True):
    names: list[str]  # taken from the environment of whoever submits or resumes, when set there
    values: dict[str, str]
    path_first: list[str]  # put in front of PATH, so that `python` is the one orch runs in
    python_path_first: list[str]
    defaults: dict[
        str, str
    ] = {}  # where the shell does not set them: what torchrun gives its workers
    required: list[
        str
    ] = []  # of `names`: asked for by name and set at submission, so a later start needs them too


class Policy(Frozen):
    max_restarts: int
    grace_s: float
    heartbeat_timeout_s: float
    join_timeout_s: float
    # as in `orchestrator.config.schema.BackendSpec`
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
    sizes: list[
        int
        # node counts at which an elastic run may start, largest first; each has a plan of its own
    ] = []


class Site(Frozen):
    """Where and by whom a run is submitted, read once at the edge."""

    run_id: str
    home: str  # absolute
    runs_dir: str  # absolute
    python: str
    environment_names: list[str]
    cwd: str
    code: Code
    agent_flags: list[str] = []  # the backend's
    join_timeout_s: float = 60.0
    passes_all: bool = False  # a program gets every variable of the shell


class SubmissionBundle(Frozen):
    """A request with the contents of its files."""

    request: LaunchRequest
    contents: dict[str, bytes]


def make_request(
    config: Config,
    plan: Plan,
    site: Site,
    command: Sequence[str] = (),
    keep: Iterable[str] = (),
    sizes: Mapping[int, Plan] = MappingProxyType({}),
) -> SubmissionBundle:
    """The whole launch as a value. `command`: the user's program, not the trainer; `keep`: more
    variables to pass on; `sizes`: the plans of an elastic run by node count, `plan` being one of
    them.

    OrchError: 64 for a bad variable name or argument, 78 for a secret written into the
    configuration.
    """
    run = RunFolder(Path(site.runs_dir) / check_run_id(site.run_id))
    copied = site.code.kind != "none"
    python_path = [str(run.code)] if copied and site.code.holds_orch else []
    agents = [
        AgentCommand(
            node=node,
            argv=[
                site.python,
                "-P",
                "-m",
                AGENT,
                "--run-dir",
                str(run.path),
                "--node",
                node,
                *site.agent_flags,
            ],
        )
        for node in used_nodes(plan)
    ]
    if command:
        cwd = Path(run.code, site.code.subfolder) if copied else Path(site.cwd)
        pattern = config.metrics.pattern or ""
        worker = Worker(argv=_checked(command), cwd=str(cwd), bundled=False, pattern=pattern)
    else:
        argv = [site.python, "-P", "-m", "trainer", "--plan", str(run.plan)]
        worker = Worker(argv=argv, cwd=str(run.code if copied else run.path), bundled=True)
    contents = {
        run.plan.name: to_json(plan, indent=1) + b"\n",
        run.config.name: frozen_config(config, plan.program),
        **{
            run.sized_plan(nodes).name: to_json(sized, indent=1) + b"\n"
            for nodes, sized in sizes.items()
        },
    }
    files = [
        File(path=name, mode="0600", size=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in sorted(contents.items())
    ]
    files.append(File(path=run.key.name, mode="0600", size=65, sha256=""))
    parallel = config.choices.get("parallel", "")
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
        summary={
            "cluster": plan.cluster.name,
            **({} if plan.program else {"model": plan.model.name}),
            "parallel": "" if plan.program and parallel == "default" else parallel,
            **({} if plan.program else {"steps": plan.job.train.steps}),
            "world_size": plan.parallel.world_size,
            "program": "trainer" if worker.bundled else " ".join(worker.argv)[:200],
            **({"progress": "as printed"} if worker.pattern else {}),
        },
        agents=agents,
        worker=structs.replace(worker, numa_binding=config.backend.numa_binding),
        environment=_environment(config, plan, site, keep, python_path),
        policy=Policy(
            join_timeout_s=site.join_timeout_s,
            **{
                name: getattr(config.backend, name)
                for name in Policy.__struct_fields__
                if name != "join_timeout_s"
            },
        ),
        code=site.code,
        files=files,
        sizes=sorted(sizes, reverse=True),
    )
    return SubmissionBundle(request=request, contents=contents)


def at_size(request: LaunchRequest, plan: Plan) -> LaunchRequest:
    """The same run under another plan: an agent on each node that has ranks there."""
    agents = on_nodes(request, used_nodes(plan))
    return structs.replace(request, plan_hash=plan.hash, agents=agents, nodes=len(agents))


def on_nodes(request: LaunchRequest, nodes: Iterable[str]) -> list[AgentCommand]:
    """The agents for these nodes, each with the command of the first but for its name."""
    first = request.agents[0]
    return [structs.replace(first, node=node, argv=_with_node(first.argv, node)) for node in nodes]


def _with_node(argv: list[str], node: str) -> list[str]:
    """Some backends fill the command in on the node itself: theirs is empty here."""
    if not argv:
        return []
    at = argv.index("--node") + 1
    return [*argv[:at], node, *argv[at + 1 :]]


def used_nodes(plan: Plan) -> list[str]:
    """Nodes that hold ranks, in the plan's node order. The agent of the first hosts the
    coordinator."""
    busy = {rank.node for rank in plan.ranks}
    return [node for node in plan.cluster.node_names if node in busy]


def _checked(command: Sequence[str]) -> list[str]:
    for index, word in enumerate(command):
        if "\0" in word:
            raise OrchError(f"argument {index} of the program holds a NUL byte", Exit.USAGE)
    return list(command)


def _environment(
    config: Config, plan: Plan, site: Site, keep: Iterable[str], python_path: list[str]
) -> Environment:
    for name in keep:
        if not is_name(name):
            raise OrchError(
                f"--env {name!r} is not the name of a variable (A-Z a-z 0-9 _): its value is never"
                " written down"
            )
    for name in config.backend.env:
        if not is_name(name):
            raise OrchError(
                f"backend.env.{name} is not the name of a variable (A-Z a-z 0-9 _)", Exit.CONFIG
            )
        if is_secret_name(name):
            how = f"export it and pass it by name, --env {name}"
            raise OrchError(
                f"backend.env.{name} looks like a secret, which would be written down: {how}",
                Exit.SECURITY,
            )
    given = site.environment_names
    asked = [*passed_names(given), *matching(given, config.backend.pass_env)]
    if plan.program and site.passes_all:
        asked = all_names(given)
    values = {"PYTHONUNBUFFERED": "1"}
    defaults = {}
    if plan.program:
        defaults = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
        }
        if min(plan.parallel.world_size, plan.cluster.gpus_per_node) > 1:
            defaults["OMP_NUM_THREADS"] = "1"
    elif plan.cluster.device == "cpu":
        values["OMP_NUM_THREADS"] = "1"  # all ranks share this machine's cores
    by_name = {*keep, *config.backend.pass_env} & {*given}
    return Environment(
        required=sorted(by_name & {*asked, *keep}),
        names=sorted({*asked, *keep}),
        values=values | dict(config.backend.env),
        path_first=[str(Path(site.python).parent)],
        python_path_first=python_path,
        defaults=defaults,
    )


def compose_environment(environment: Environment, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of agents, and of workers but for their ranks: allowed names of `environ`,
    then fixed values."""
    result = environment.defaults | {
        name: environ[name] for name in environment.names if name in environ
    }
    result |= environment.values
    for variable, first in (
        ("PATH", environment.path_first),
        ("PYTHONPATH", environment.python_path_first),
    ):
        parts = [*first, *filter(None, result.get(variable, "").split(":"))]
        if parts:
            result[variable] = ":".join(dict.fromkeys(parts))
    return result


def check_variables(request: LaunchRequest, environ: Mapping[str, str]) -> None:
    """OrchError (65) where a run that is to start again was given a variable by name that `environ`
    does not set: its value is written down nowhere, and without it the run would silently be
    another one."""
    lost = [name for name in request.environment.required if name not in environ]
    if lost:
        raise OrchError(
            f"run {request.run_id} was submitted with --env {' --env '.join(lost)}, not set in this"
            f" shell: export {'it' if len(lost) == 1 else 'them'} as then ({lost[0]}= for an empty"
            " value); values are never kept",
            Exit.CONFIG,
        )


def to_bytes(request: LaunchRequest) -> bytes:
    """The bytes that `--dry-run --json` prints and that a backend sends and keeps as
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
    """The request of a run. OrchError (65) with one line when it is missing, damaged or of another
    version."""
    try:
        return from_bytes(read_file(folder.request))
    except OSError as error:
        raise OrchError(
            f"run {folder.run_id} has no readable request: {error.strerror}", Exit.CONFIG
        ) from error


def check_contents(bundle: SubmissionBundle) -> None:
    """Raise ValueError when a file's content is not the one that the request names."""
    for file in bundle.request.files:
        if file.sha256 and hashlib.sha256(bundle.contents[file.path]).hexdigest() != file.sha256:
            raise ValueError(f"content of {file.path} does not match the request")
        if stat.S_IMODE(int(file.mode, 8)) & 0o077:
            raise ValueError(f"{file.path} would be readable by others (mode {file.mode})")


# ------------------------------------------------------------------------------------------ secrets


def redacted(value: object, name: str = "") -> object:
    """`value` (dicts, lists, scalars) with every text or number under a secret-looking key
    replaced, and what stands for user and password in a URL."""
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
    """The configuration as plain values, without `nproc` where nobody gave it: only programs know
    that key."""
    found: dict[str, Any] = msgspec.to_builtins(config)
    if found.get("nproc", 0) is None:
        del found["nproc"]
    return found


def frozen_config(config: msgspec.Struct, program: bool = False) -> bytes:
    """The resolved configuration as YAML, redacted: what config.yaml of a run holds. `program`:
    without what describes a model and its training."""
    found = config_tree(config)
    if program:
        for of_model in ("model", "data", "optim", "train", "cost", "experiment"):
            found.pop(of_model, None)
            found["choices"].pop(of_model, None)
    return msgspec.yaml.encode(redacted(found), order="deterministic")
