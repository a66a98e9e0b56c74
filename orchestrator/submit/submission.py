"""Submitting a job, from its configuration to a backend's handle: `prepare`, `choose` one size,
`check`, `send`.

Nothing here prints, or reads the environment of the process: `SubmitOptions` has everything that a
submission depends on.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct, structs

from orchestrator.backends.base import After, Backend, Prefetching, Queueing, Rendering, get_backend
from orchestrator.config.validate import default_name
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run import registry
from orchestrator.run.folder import RunFolder, new_run_id
from orchestrator.run.python_line import is_python, started_by_python

from .cluster import ClusterResolver, expanded, with_backend_options, with_token_folder

if TYPE_CHECKING:
    from orchestrator.config.schema import Config
    from orchestrator.plan import Plan
    from orchestrator.run.request import Code, LaunchRequest, SubmissionBundle

    from .program_code import ProgramCode


#: `backend.options` that name another host, which takes the job with the other options.
HOST_OPTIONS = ("ssh", "ssh_python")
CONDITIONS: dict[str, Literal["ok", "any", "notok"]] = {"ok": "ok", "any": "any", "notok": "notok"}


class SubmitOptions(Struct, frozen=True, kw_only=True):
    """The options of a submission, and the environment of the submitting shell. Paths are
    absolute."""

    home: Path  # orch's home folder: runs, measured clusters, bad nodes
    cwd: Path
    python: str
    environ: Mapping[str, str]
    command: tuple[str, ...] = ()  # the user's program; empty: the bundled trainer
    env: tuple[str, ...] = ()  # names of further variables to pass to the program
    #: Run the program in `cwd`, not in a copy; None: in `cwd` if nodes share folders.
    in_place: bool | None = None
    program: bool = False  # plan `command` without a model, because no override names one
    run_id: str | None = None
    after: tuple[str, ...] = ()  # `RUN` or `CONDITION:RUN`: runs to wait for
    dry_run: bool = False  # nothing will be sent, so the cluster is not queried in advance
    code: Code | None = None  # code from another machine, for which this one submits


class SizeCandidate(NamedTuple):
    """The job at one size, ready to be sent. Each candidate has the plans of all sizes."""

    config: Config  # with exactly the nodes of this size
    plan: Plan
    bundle: SubmissionBundle


class Submission(NamedTuple):
    backend: Backend
    candidates: list[SizeCandidate]  # largest first, at least one


def prepare(config: Config, options: SubmitOptions) -> Submission:
    """Plans the job, at every legal size if it is elastic, and renders the requests; writes
    nothing.

    Raises OrchError: 64 for contradictory options, 65 when no size can be planned, 76 and 78 for
    errors of the cluster.
    """
    # With code, another machine has sent the job and this machine is the host itself.
    if config.backend.options.get("ssh") and options.code is None:
        raise OrchError(
            "over ssh, submit one job at a time with orch submit or orch run", Exit.USAGE
        )
    config = without_host(config)
    given_data = config.data
    resolve = ClusterResolver(options.home)
    config = with_token_folder(config, options.home)
    backend = get_backend(config.backend.name)
    if options.after:
        config = _with_dependencies(config, backend, options)
    config = resolve.without_bad_nodes(config, backend)
    if isinstance(backend, Prefetching) and not options.dry_run:
        backend.look_ahead(config)
    from orchestrator.planner.elastic.sizes import plan_sizes  # while the cluster answers

    if options.program:
        name = program_name(config, options.command)
        config = structs.replace(config, run=structs.replace(config.run, name=name))
    options = structs.replace(options, run_id=new_id(config, options))
    is_program = bool(options.command)
    sizes = plan_sizes(
        config,
        resolve,
        any_memory=is_program,
        any_layout=is_program,
        profile=None if options.program else resolve.profile(config),
        program=options.program,
    ).legal
    plans = {size.nodes: size.plan for size in sizes} if config.nodes else {}
    from .program_code import program_code

    code = program_code(backend, options)
    candidates = []
    for size in sizes:
        # The run folder records the data entry as given, without the folder of this user.
        size_config = structs.replace(size.config, data=given_data)
        bundle = make_bundle(
            size_config,
            size.plan,
            backend,
            options,
            code,
            sizes=plans,
        )
        candidates.append(SizeCandidate(size_config, size.plan, bundle))
    return Submission(backend, candidates)


def _with_dependencies(config: Config, backend: Backend, options: SubmitOptions) -> Config:
    """Adds the backend options for the runs of --after. Raises OrchError (64) for a backend without
    a queue."""
    dependencies = parse_after(options.after, options.home)
    if not isinstance(backend, Queueing):
        raise OrchError(
            f"--after: backend {backend.name} has no queue in which a run could wait", Exit.USAGE
        )
    return with_backend_options(config, backend.after(config.backend.options, dependencies))


def without_host(config: Config) -> Config:
    """Returns the configuration without the options that name another host."""
    options = config.backend.options
    others = {name: options[name] for name in options if name not in HOST_OPTIONS}
    return with_backend_options(config, others)


def parse_after(dependencies: Sequence[str], home: Path) -> list[After]:
    """Parses `RUN` or `CONDITION:RUN` of --after. Raises OrchError (64) for an unknown run or
    condition."""
    parsed = []
    for dependency in dependencies:
        condition, colon, run = dependency.partition(":")
        if not colon or run.startswith("//"):  # slurm://<id> is a handle
            condition = "ok"
            run = dependency
        known_condition = CONDITIONS.get(condition)
        if known_condition is None:
            raise OrchError(
                f"--after {dependency}: {condition!r} is not ok, any or notok", Exit.USAGE
            )
        parsed.append(After(known_condition, registry.find_run(home, run)))
    return parsed


def new_id(config: Config, options: SubmitOptions) -> str:
    """Returns the requested run id, or a new one with the name of the job."""
    if options.run_id is not None:
        return options.run_id
    return new_run_id(job_name(config), time.time())


#: Groups of the configuration that describe a model and its training.
_MODEL_GROUPS = frozenset({"model", "experiment", "data", "optim", "train", "cost"})


def names_model(overrides: Sequence[str]) -> bool:
    """Whether the overrides name a model or its training, by which a program is planned then."""
    for override in overrides:
        group, *_ = re.split(r"[=.@/]", override.lstrip("+~"), maxsplit=1)
        if group in _MODEL_GROUPS:
            return True
    return False


def program_name(config: Config, command: Sequence[str]) -> str:
    """Returns the name of a run: as configured, or else that of its script, module or program."""
    if config.run.name and config.run.name != default_name(config):
        return config.run.name
    arguments = list(command)
    if len(arguments) > 1 and is_python(arguments[0]):
        arguments = started_by_python(arguments[1:]).arguments
    program = Path(arguments[0] if arguments else command[0])
    name = program.name.removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", name)[:40].strip("-") or "program"


def job_name(config: Config) -> str:
    if config.run.name:
        return config.run.name
    names = (config.model.name, config.choices.get("parallel"))
    return "-".join(filter(None, names))


def make_bundle(
    config: Config,
    plan: Plan,
    backend: Backend,
    options: SubmitOptions,
    code: ProgramCode,
    sizes: Mapping[int, Plan] = MappingProxyType({}),
) -> SubmissionBundle:
    """Returns the request of a plan with the files of its run folder. `sizes`: the plans of an
    elastic job by number of nodes."""
    from orchestrator.run.interpreter import Files, started_command
    from orchestrator.run.request import Site, make_request
    from orchestrator.run.variables import machine_names

    from .program_python import program_interpreter

    if config.run.dir:
        runs_dir = expanded(config.run.dir, "run.dir").absolute()
    else:
        runs_dir = registry.runs_folder(options.home)
    command = options.command
    program_python = ""
    interpreter = program_interpreter(config, backend, options)
    if interpreter is not None:
        command = started_command(command, interpreter, Files())
        program_python = interpreter.path
    names_of_here = machine_names(options.environ)
    site = Site(
        run_id=new_id(config, options),
        home=str(options.home),
        runs_dir=str(runs_dir),
        python=options.python,
        program_python=program_python,
        environment_names=sorted(options.environ),
        cwd=str(options.cwd),
        code=code.code,
        agent_flags=list(backend.agent_flags),
        passes_all=backend.on_this_machine,
        machine_names=[] if backend.shares_folders else sorted(names_of_here),
        packed_code=code.archive,
    )
    return make_request(
        config,
        plan,
        site,
        command,
        options.env,
        sizes=sizes,
    )


def choose(submission: Submission, options: SubmitOptions) -> tuple[SizeCandidate, list[str]]:
    """Returns the candidate to send, and messages for the user. A backend without a queue takes the
    largest.

    Raises the OrchError of a scheduler that takes no size; a dry run returns it as a message.
    """
    backend, candidates = submission
    if not isinstance(backend, Queueing):
        return candidates[0], []
    try:
        index, lines = backend.choose(
            [candidate.bundle for candidate in candidates], options.environ
        )
    except OrchError as error:
        if not options.dry_run:
            raise
        message = f"the largest size is shown: {error.message}"
        return candidates[0], [message] if len(candidates) > 1 else []
    return candidates[index], lines


def simulation_messages(request: LaunchRequest, backend: Backend) -> list[str]:
    """Returns a message if the nodes of a program are simulated on this machine, where torchrun
    would wait for other machines."""
    most_nodes = max([request.nodes, *request.sizes])
    if not backend.on_this_machine or request.worker.bundled or most_nodes == 1:
        return []
    shape = f"{request.nodes} nodes of {request.gpus_per_node} workers"
    return [f"{shape} are simulated on this machine (cluster=local takes it as one node)"]


def rate_messages(plan: Plan, request: LaunchRequest, backend: Backend) -> list[str]:
    """Returns a message if the bundled trainer would continue from a checkpoint at another learning
    rate than that of the checkpoint, and if this machine can read the folder of the checkpoint."""
    from .saved_rate import rate_jump

    if not request.worker.bundled or not backend.shares_folders:
        return []
    return rate_jump(plan, request.run_dir)


def check(submission: Submission, options: SubmitOptions) -> None:
    """Raises OrchError (65) for a job that the bundled trainer cannot run: an unsupported layout
    and, except in a dry run, a plan that needs more memory than a GPU has."""
    if options.command:
        return
    from orchestrator.plan.trained import refusal

    if submission.candidates[0].config.metrics.pattern:
        raise OrchError(
            "metrics.pattern is for programs: the bundled trainer reports its own steps",
            Exit.CONFIG,
        )
    for _, plan, _ in submission.candidates:
        if problem := refusal(plan):
            raise OrchError(problem, Exit.CONFIG)
    config, plan, _ = submission.candidates[0]
    memory = plan.memory
    if options.dry_run or memory.total <= memory.capacity or config.run.allow_oom:
        return
    requirement = (
        f"rank {memory.worst_rank} needs {memory.total / 2**30:.1f} GiB of"
        f" {memory.capacity / 2**30:.1f} GiB"
    )
    raise OrchError(
        f"the plan does not fit: {requirement}; `orch plan` shows what needs the memory,"
        " run.allow_oom=true submits it anyway",
        Exit.CONFIG,
    )


def send(bundle: SubmissionBundle, backend: Backend, options: SubmitOptions) -> str:
    """Starts the run and returns its handle. From now on `orch list` finds it."""
    folder = backend.folder_of(bundle.request, options.home)
    with registered([folder], options.home):
        return backend.submit(bundle, options.environ)


def render(bundle: SubmissionBundle, backend: Rendering, options: SubmitOptions) -> str:
    """Writes the folder of the run, and returns the document for its scheduler."""
    folder = RunFolder(Path(bundle.request.run_dir))
    with registered([folder], options.home):
        return backend.render(bundle)


@contextlib.contextmanager
def registered(folders: Sequence[RunFolder], home: Path) -> Iterator[None]:
    """Registers the folders, which the body creates, so that runs are found by their ids wherever
    their folders are."""
    try:
        for folder in folders:
            registry.register(home, folder)
        yield
    finally:
        for folder in folders:
            registry.forget(home, folder)
