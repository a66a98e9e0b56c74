"""Submitting a job, from its configuration to a backend's handle: `prepare`, `choose` one size,
`check`, `send`.

Nothing here prints or reads the shell: what a submission depends on is in `SubmitOptions`.
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
from orchestrator.run.folder import RunFolder, new_run_id, private_umask

from .cluster import ClusterResolver, at_home

if TYPE_CHECKING:
    from orchestrator.config.schema import Config
    from orchestrator.plan import Plan
    from orchestrator.run.request import Code, LaunchRequest, SubmissionBundle


#: `backend.options` that name another host, which takes the job and knows the rest of the options.
HOST_OPTIONS = ("ssh", "ssh_python")
_SHOWN = 8  # names of variables
WAYS: dict[str, Literal["ok", "any", "notok"]] = {"ok": "ok", "any": "any", "notok": "notok"}


class SubmitOptions(Struct, frozen=True, kw_only=True):
    """How a job is submitted, and the environment of the shell that submits it. Paths are
    absolute."""

    home: Path  # of orch: runs, measured clusters, bad nodes
    cwd: Path
    python: str
    environ: Mapping[str, str]
    command: tuple[str, ...] = ()  # the user's program; empty: the bundled trainer
    env: tuple[str, ...] = ()  # names of further variables to pass on
    in_place: bool | None = (
        None  # the program runs in `cwd`, not in a copy; None: in `cwd` where nodes share folders
    )
    program: bool = False  # `command` is planned without a model, because none was named for it
    run_id: str | None = None
    after: tuple[str, ...] = ()  # `RUN` or `HOW:RUN`: runs to wait for
    dry_run: bool = False  # nothing will be sent, so the cluster is not asked ahead
    code: Code | None = None  # what another machine has shipped to this one, which submits for it


class SizeCandidate(NamedTuple):
    """What may be sent: the job at one size. All candidates carry the plans of all sizes."""

    config: Config  # with exactly the nodes of this size
    plan: Plan
    bundle: SubmissionBundle


class Submission(NamedTuple):
    backend: Backend
    candidates: list[SizeCandidate]  # largest first, at least one


def prepare(config: Config, options: SubmitOptions) -> Submission:
    """The job planned, at every legal size where it is elastic, and rendered into requests; nothing
    is written.

    OrchError: 64 for options that make no sense, 65 when no size can be planned, 76 and 78 from
    resolving the cluster.
    """
    if config.backend.options.get("ssh") and options.code is None:  # with code this is the host
        raise OrchError(
            "over ssh jobs are submitted one by one, with orch submit or orch run", Exit.USAGE
        )
    config = without_host(config)
    given = config
    resolve = ClusterResolver(options.home)
    config = at_home(config, options.home)
    backend = get_backend(config.backend.name)
    if options.after:
        wishes = parse_after(options.after, options.home)
        if not isinstance(backend, Queueing):
            raise OrchError(
                f"--after: the backend {backend.name} has no queue in which a run could wait",
                Exit.USAGE,
            )
        waiting = backend.after(config.backend.options, wishes)
        config = structs.replace(config, backend=structs.replace(config.backend, options=waiting))
    config = resolve.leave_out(config, backend)
    if isinstance(backend, Prefetching) and not options.dry_run:
        backend.look_ahead(config)
    from orchestrator.planner.elastic.sizes import plan_sizes  # while the cluster answers

    if options.program:
        config = structs.replace(
            config, run=structs.replace(config.run, name=program_name(config, options.command))
        )
    options = structs.replace(options, run_id=new_id(config, options))
    own = bool(options.command)
    profile = None if options.program else resolve.profile(config)
    sizes = plan_sizes(config, resolve, own, own, profile, options.program).legal
    plans = {size.nodes: size.plan for size in sizes} if config.nodes else {}
    candidates = []
    for size in sizes:
        at = structs.replace(
            size.config, data=given.data
        )  # the run folder keeps the configuration that was given
        candidates.append(
            SizeCandidate(at, size.plan, make_bundle(at, size.plan, backend, options, plans))
        )
    return Submission(backend, candidates)


def without_host(config: Config) -> Config:
    options = {
        name: value for name, value in config.backend.options.items() if name not in HOST_OPTIONS
    }
    return structs.replace(config, backend=structs.replace(config.backend, options=options))


def parse_after(words: Sequence[str], home: Path) -> list[After]:
    """`RUN` or `HOW:RUN` of --after. OrchError (64) for an unknown run or way."""
    found = []
    for word in words:
        how, colon, run = word.partition(":")
        if not colon or run.startswith("//"):  # slurm://<id> is a handle
            how = "ok"
            run = word
        way = WAYS.get(how)
        if way is None:
            raise OrchError(f"--after {word}: {how!r} is not ok, any or notok", Exit.USAGE)
        found.append(After(way, registry.find_run(home, run)))
    return found


def new_id(config: Config, options: SubmitOptions) -> str:
    """The id that was asked for, or one of the job's name."""
    return (
        options.run_id if options.run_id is not None else new_run_id(job_name(config), time.time())
    )


#: Groups that describe a model and its training.
_OF_A_MODEL = frozenset({"model", "experiment", "data", "optim", "train", "cost"})


def names_model(words: Sequence[str]) -> bool:
    """Whether words of a command line name a model or its training: then a program is planned by
    it."""
    return any(
        re.split(r"[=.@/]", word.lstrip("+~"), maxsplit=1)[0] in _OF_A_MODEL for word in words
    )


def program_name(config: Config, command: Sequence[str]) -> str:
    """The run's name: as configured, else that of the script, module or program that is run."""
    if config.run.name and config.run.name != default_name(config):
        return config.run.name
    words = list(command)
    if len(words) > 1 and Path(words[0]).name.startswith("python"):
        words = _after_python(words[1:])
    name = Path(words[0] if words else command[0]).name.removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", name)[:40].strip("-") or "program"


def _after_python(words: Sequence[str]) -> list[str]:
    """What Python runs, and its arguments: none for a text of `-c`, or from standard input. Its
    flags may stand together, as in `-um MODULE`; those after the script are the script's own."""
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "-":
        flag = left.pop(0)
        if flag.startswith("--"):
            del left[: flag == "--check-hash-based-pycs"]
            continue
        found = re.fullmatch(r"-[^cmWX]*(?:([cmWX])(.*))?", flag, re.DOTALL)
        taking, value = found.groups() if found else (None, "")
        if taking == "c":
            return []
        if taking == "m":
            return [value, *left] if value else left
        if taking and not value:
            del left[:1]
    return [] if left[:1] == ["-"] else left


def job_name(config: Config) -> str:
    return config.run.name or "-".join(
        filter(None, (config.model.name, config.choices.get("parallel")))
    )


def make_bundle(
    config: Config,
    plan: Plan,
    backend: Backend,
    options: SubmitOptions,
    sizes: Mapping[int, Plan] = MappingProxyType({}),
) -> SubmissionBundle:
    """The request of one plan with the files of its run folder. `sizes`: the plans of an elastic
    job by node count."""
    from orchestrator.run.code_snapshot import find_code
    from orchestrator.run.left_out import with_left_out
    from orchestrator.run.request import Code, Site, make_request

    in_place = options.in_place
    if in_place is None:
        in_place = bool(options.command) and backend.shares_folders
    if options.code is not None:
        code = options.code
    else:
        code = (
            Code(kind="none")
            if in_place
            else find_code(options.cwd, runs_user_program=bool(options.command))
        )
        code = with_left_out(code) if options.command and code.kind != "none" else code
    runs = (
        Path(config.run.dir).expanduser().absolute()
        if config.run.dir
        else registry.runs_folder(options.home)
    )
    site = Site(
        run_id=new_id(config, options),
        home=str(options.home),
        runs_dir=str(runs),
        python=options.python,
        environment_names=sorted(options.environ),
        cwd=str(options.cwd),
        code=code,
        agent_flags=list(backend.agent_flags),
        passes_all=backend.on_this_machine,
    )
    return make_request(config, plan, site, options.command, options.env, sizes)


def choose(submission: Submission, options: SubmitOptions) -> tuple[SizeCandidate, list[str]]:
    """The candidate to send, and what to tell the user. A backend without a queue takes the
    largest.

    OrchError from a scheduler that takes no size; in a dry run that is told, too.
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
        return candidates[0], (
            [f"the largest size is shown: {error.message}"] if len(candidates) > 1 else []
        )
    return candidates[index], lines


def simulated_nodes(request: LaunchRequest, backend: Backend) -> list[str]:
    """One line where the nodes of a program are parts of this machine; torchrun would wait for
    other machines."""
    if (
        not backend.on_this_machine
        or request.worker.bundled
        or max([request.nodes, *request.sizes]) == 1
    ):
        return []
    shape = f"{request.nodes} nodes of {request.gpus_per_node} workers"
    return [f"{shape} are simulated on this machine (one: cluster.nodes=1)"]


def not_passed(request: LaunchRequest, options: SubmitOptions) -> list[str]:
    """One line on the variables of this shell that a program does not get; none where it gets
    all."""
    from orchestrator.run.variables import dropped_names

    kept = {*request.environment.names, *request.environment.values}
    lost = dropped_names(options.environ, kept) if options.command else []
    if not lost:
        return []
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    return [
        f"variables not passed on: {', '.join(lost[:_SHOWN])}{more} (--env NAME,"
        " backend.pass_env=[PATTERN])"
    ]


def rate_breaks(plan: Plan, request: LaunchRequest, backend: Backend) -> list[str]:
    """One line where the bundled trainer would go on from a checkpoint at another learning rate
    than it was made with, if its folder can be read on this machine."""
    from .saved_rate import rate_jump

    return (
        rate_jump(plan, request.run_dir)
        if request.worker.bundled and backend.shares_folders
        else []
    )


def check(submission: Submission, options: SubmitOptions) -> None:
    """OrchError (65) for a job of the bundled trainer that cannot run: a layout that it does not
    run, and, except in a dry run, a plan that needs more memory than there is."""
    if options.command:
        return
    from orchestrator.plan.trained import refusal

    if submission.candidates[0].config.metrics.pattern:
        raise OrchError(
            "metrics.pattern is for programs: the bundled trainer reports its steps", Exit.CONFIG
        )
    for _, plan, _ in submission.candidates:
        if problem := refusal(plan):
            raise OrchError(problem, Exit.CONFIG)
    config, plan, _ = submission.candidates[0]
    memory = plan.memory
    if options.dry_run or memory.total <= memory.capacity or config.run.allow_oom:
        return
    need = (
        f"rank {memory.worst_rank} needs {memory.total / 2**30:.1f} GiB of"
        f" {memory.capacity / 2**30:.1f} GiB"
    )
    raise OrchError(
        f"the plan does not fit: {need}; `orch plan` shows what takes it, run.allow_oom=true"
        " submits it anyway",
        Exit.CONFIG,
    )


def send(bundle: SubmissionBundle, backend: Backend, options: SubmitOptions) -> str:
    """Start the run; its handle. From now on `orch list` finds it."""
    with private_umask(), listed([backend.folder_of(bundle.request, options.home)], options.home):
        return backend.submit(bundle, options.environ)


def render(bundle: SubmissionBundle, backend: Rendering, options: SubmitOptions) -> str:
    """Write the run's folder; the document that its scheduler takes."""
    with private_umask(), listed([RunFolder(Path(bundle.request.run_dir))], options.home):
        return backend.render(bundle)


@contextlib.contextmanager
def listed(folders: Sequence[RunFolder], home: Path) -> Iterator[None]:
    """Runs are found by their ids, wherever their folders lie, once the body has made those."""
    try:
        for folder in folders:
            registry.register(home, folder)
        yield
    finally:
        for folder in folders:
            registry.forget(home, folder)
