"""The Python API: `plan_job`, `submit_job` and `Run`, importable from `orchestrator`. The command
line uses the same.

    import orchestrator

    plan = orchestrator.plan_job("cluster=h100x64", "parallel=tp8_pp4_zero1")
    run = orchestrator.submit_job("nproc=2", command=["python", "train.py"])
    print(run.wait().state, run.report()["steps"])

Overrides (`key=value`) are those of the command line. Refusals raise OrchError with `message` and
`exit`. The functions are not thread-safe, as `orchestrator.config.compose.load` is not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.observe.goodput.account import Account
    from orchestrator.observe.live import Live
    from orchestrator.observe.timeline import StepFollower, StepLine
    from orchestrator.plan import Plan
    from orchestrator.planner.elastic.sizes import Sizes
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.request import LaunchRequest
    from orchestrator.run.state import RunState
    from orchestrator.submit.cluster import ClusterResolver
    from orchestrator.submit.submission import SizeCandidate, SubmitOptions

_POLL_S = 0.1
#: Seconds for agents, pods or a job to end, beyond the grace period of the workers.
_CANCEL_S = 120.0
#: Seconds for the last processes of an ended run to exit.
_END_S = 10.0


def home() -> Path:
    """Returns the folder of this user's runs, measured clusters and bad nodes (`ORCH_HOME`)."""
    from orchestrator.run.folder import home_folder

    return home_folder(os.environ)


# ---------------------------------------------------------------------------- planning, submitting


def plan_job(
    *overrides: str,
    config_dir: str | Path | None = None,
    any_layout: bool = False,
) -> Plan:
    """Returns the plan of a job of the bundled trainer, as `orch plan` shows it; for `nodes=A..B`
    the plan of the largest size.

    any_layout: for a program of one's own, so that `parallel=auto` may also choose layouts that the
    trainer does not run. Raises OrchError: 64 for a wrong override, 65 when nothing can be planned,
    76 and 78 for errors of the cluster.
    """
    sizes, _ = plan_all_sizes(list(overrides), config_dir, any_layout)
    return sizes.legal[0].plan


def plan_all_sizes(
    overrides: list[str],
    config_dir: str | Path | None,
    any_layout: bool,
    settle: bool = False,
) -> tuple[Sizes, ClusterResolver]:
    """Returns the plans of all sizes, the largest first. settle: replaces `parallel=auto` by the
    layout that it chooses, so that the layout can be explained."""
    from orchestrator.config.compose import load
    from orchestrator.planner.elastic.sizes import plan_sizes
    from orchestrator.submit.cluster import ClusterResolver, with_token_folder

    resolve = ClusterResolver(home())
    config = with_token_folder(load(overrides, config_dir, ranges=True), home())
    profile = resolve.profile(config)
    if settle and config.parallel.auto and config.nodes is None:
        from orchestrator.planner.search.auto import settled

        config = settled(config, resolve(config.cluster), any_layout, profile)
    sizes = plan_sizes(
        config,
        resolve,
        any_memory=True,
        any_layout=any_layout,
        profile=profile,
    )
    return sizes, resolve


class PreparedJob(NamedTuple):
    """A job that is ready to be sent: nothing has been started or written."""

    backend: Backend
    candidate: SizeCandidate
    messages: list[str]  # what the user should know about the job

    def send(self, options: SubmitOptions) -> Run:
        """Starts the job."""
        from orchestrator.submit.submission import send

        bundle = self.candidate.bundle
        send(bundle, self.backend, options)
        return Run(self.backend.folder_of(bundle.request, options.home), self.backend)


def prepare_job(
    overrides: list[str],
    options: SubmitOptions,
    config_dir: str | Path | None = None,
) -> PreparedJob:
    """Plans and checks a job, at the size that its scheduler would start. Raises OrchError as
    `submit_job` does."""
    from orchestrator.submit.submission import (
        check,
        choose,
        dropped_variable_messages,
        prepare,
        rate_messages,
        simulation_messages,
    )
    from orchestrator.submit.this_machine import interpreter, load_job

    config = load_job(overrides, options, config_dir)
    if config.backend.options.get("ssh") and options.code is None:
        from orchestrator.submit.over_ssh import prepare_on_host

        return PreparedJob(*prepare_on_host(config, overrides, options, config_dir))
    submission = prepare(config, options)
    check(submission, options)
    candidate, scheduler_messages = choose(submission, options)
    request = candidate.bundle.request
    backend = submission.backend
    messages = [*scheduler_messages]
    messages += simulation_messages(request, backend)
    messages += dropped_variable_messages(request, options)
    messages += rate_messages(candidate.plan, request, backend)
    if backend.shares_folders and options.code is None:
        messages += interpreter(request, options)
    return PreparedJob(backend, candidate, messages)


def submit_job(
    *overrides: str,
    command: Sequence[str] = (),
    config_dir: str | Path | None = None,
    env: Sequence[str] = (),
    in_place: bool | None = None,
    run_id: str | None = None,
    after: Sequence[str] = (),
) -> Run:
    """Plans a job and starts it, as `orch submit` does. `command`: a program of one's own; empty:
    the bundled trainer.

    env: names of further variables to pass to the program. in_place: run the program in the current
    folder and not in a copy (None: in the folder if nodes share folders). after: ids of runs to
    wait for, if the backend has a queue. The messages of the command line, for example about
    variables that are not passed on, become UserWarnings. Raises OrchError: 64 for wrong overrides
    and options, 65 for a job that cannot run, 76 and 78 for errors of the cluster.
    """
    import warnings

    from orchestrator.run.left_out import describe_copy
    from orchestrator.submit.submission import names_model

    settings: dict[str, Any] = {
        "command": tuple(command),
        "env": tuple(env),
        "in_place": in_place,
        "run_id": run_id,
    }
    program = bool(command) and not names_model(overrides)
    options = options_from_here(
        **settings,
        after=tuple(after),
        program=program,
    )
    job = prepare_job(list(overrides), options, config_dir)
    run = job.send(options)
    for line in [*describe_copy(job.candidate.bundle.request.code), *job.messages]:
        warnings.warn(line, stacklevel=2)
    return run


def options_from_here(**settings: Any) -> SubmitOptions:
    """Returns the options of a submission from this process, with its folder and environment.
    `settings`: the other fields."""
    from orchestrator.submit.submission import SubmitOptions

    return SubmitOptions(
        home=home(),
        cwd=Path.cwd(),
        python=sys.executable,
        environ=os.environ,
        **settings,
    )


# ------------------------------------------------------------------------------------------- runs


def plan_of_run(folder: RunFolder) -> Plan:
    """Reads the plan of a run. Raises OrchError (65) if it is missing or damaged."""
    from orchestrator.plan import PlanError, load_plan

    try:
        return load_plan(folder.plan)
    except PlanError as error:
        raise OrchError(f"run {folder.run_id}: {error}", Exit.CONFIG) from None


def request_of_run(folder: RunFolder) -> LaunchRequest:
    """Reads the launch request of a run. Raises OrchError (65) if it is missing, or if the bundled
    trainer does not run its plan."""
    from orchestrator.run.request import read_request

    request = read_request(folder)
    if request.worker.bundled:
        from orchestrator.plan.trained import refusal

        if problem := refusal(plan_of_run(folder)):
            raise OrchError(f"run {folder.run_id}: {problem}", Exit.CONFIG)
    return request


class Status(NamedTuple):
    state: RunState  # the state according to the backend and the coordinator
    live: Live  # the last reported step
    spent: Account  # how the run spent its time


class Run:
    """A run that was submitted from this machine, or from another one with the same home folder."""

    def __init__(self, folder: RunFolder, backend: Backend):
        self.folder = folder
        self.backend = backend
        self._steps: StepFollower | None = None  # reads only new lines each time

    @classmethod
    def find(cls, name: str | None = None) -> Run:
        """Finds a run by its handle, its id or the beginning of its id; the newest run for None.
        Runs from other machines are searched in the clusters that this machine is set up for.
        Raises OrchError: 64 when there is none, 65 for an unreadable one."""
        from orchestrator.backends.base import adopted, get_backend
        from orchestrator.run import registry
        from orchestrator.run.state import read_state

        try:
            folder = registry.find_run(home(), name)
        except OrchError:
            if not name:
                raise
            run_id = name.partition("://")[2] if "://" in name else name
            adopted_folder = adopted(run_id, home())
            if adopted_folder is None:
                raise
            folder = adopted_folder
        return cls(folder, get_backend(read_state(folder).backend))

    def __repr__(self) -> str:
        return f"Run({self.handle!r})"

    @property
    def id(self) -> str:
        return self.folder.run_id

    @property
    def handle(self) -> str:
        return f"{self.backend.name}://{self.id}"

    @property
    def state(self) -> RunState:
        """The current state, read from the backend."""
        return self.backend.state(self.folder)

    def plan(self) -> Plan:
        """Returns the current plan. Raises OrchError (65) if it is missing or damaged."""
        return plan_of_run(self.folder)

    def status(self) -> Status:
        """Returns the state, the last step and how the run spent its time, as `orch status` shows
        them."""
        from orchestrator.observe.goodput.account import account
        from orchestrator.observe.goodput.run_timeline import run_timeline
        from orchestrator.observe.live import read_live
        from orchestrator.observe.timeline import StepFollower, read_events

        state = self.state
        now = time.time()
        self._steps = self._steps or StepFollower(self.folder)
        steps = self._steps.read(state.nodes)
        events = read_events(self.folder, state.nodes)
        spent = account(run_timeline(state, events, steps), now)
        return Status(state, read_live(self.folder, state, now), spent)

    def wait(self, timeout_s: float | None = None) -> RunState:
        """Waits for the run to end and all its processes to exit, and returns its final state.
        Raises TimeoutError after `timeout_s`.

        Waiting continues while the state is unreadable for a moment. Raises OrchError (65) after a
        minute of that.
        """
        from orchestrator.run.folder import insist

        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Before the state: a process that exits in between has written its final state.
            alive = self.backend.is_alive(self.folder)
            state = insist(lambda: self.state)
            if state.is_final and not alive:
                return state
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} is {state.state} after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def logs(
        self,
        rank: int,
        last: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yields the log lines of a rank. last: only this many of the existing lines. follow: also
        new lines, until the run has ended."""
        log = self.folder.rank_log(rank)
        for _, line in self.lines(lambda: {"": log}, last, follow):
            yield line

    def lines(
        self,
        logs: Callable[[], Mapping[str, Path]],
        last: int | None = None,
        follow: bool = False,
    ) -> Iterator[tuple[str, str]]:
        """Yields (name, line) of several logs, as `Run.logs` does. `logs` returns the files; it is
        called once the folder of the run has them."""
        from orchestrator.backends.base import LogMirroring
        from orchestrator.observe.logs import LogTail

        backend = self.backend
        if isinstance(backend, LogMirroring):
            mirror = backend.mirror(self.folder, follow)
        else:
            mirror = nullcontext()
        with mirror:
            tails = {name: LogTail(path, last) for name, path in logs().items()}
            while True:
                # Before reading: a process that exits in between has written its last lines.
                alive = follow and self.backend.is_alive(self.folder)
                for name, tail in tails.items():
                    for line in tail.read(last=not alive):
                        yield name, line
                if not alive:
                    return
                time.sleep(_POLL_S)

    def cancel(self, force: bool = False, wait: bool = True) -> RunState:
        """Ends the run; its workers save first, unless forced.

        Raises OrchError: 64 when the run has already ended, 76 when it still runs long after its
        grace period. The request stays in force then.
        """
        from orchestrator.run.request import read_request

        state = self.state
        if state.is_final:
            raise OrchError(f"run {self.id} has ended: {state.state}")
        self.backend.cancel(self.folder, force)
        timeout_s = _CANCEL_S
        with suppress(OrchError):  # a damaged run can be ended, too
            timeout_s += 2 * read_request(self.folder).policy.grace_s
        deadline = time.monotonic() + timeout_s
        while wait and self.backend.is_alive(self.folder):
            if time.monotonic() > deadline:
                message = (
                    f"run {self.id} still runs {timeout_s:.0f} s after the request to end, which"
                    " stays in force"
                )
                raise OrchError(f"{message}; to kill: orch cancel --force {self.id}", Exit.CAPACITY)
            time.sleep(_POLL_S)
        return self.state

    def resume(self, allow: Sequence[str] = ()) -> str:
        """Starts the ended run again from its last checkpoint, and returns its handle. allow: as
        for `orch resume --allow`.

        A refused resume changes nothing. Raises OrchError: 64 while the run is running or when it
        is done, 65 when it cannot run.
        """
        from orchestrator.backends.base import Elsewhere
        from orchestrator.run.create import disk_refusals
        from orchestrator.run.folder import private_umask
        from orchestrator.run.put_back import check_allowed, without_pins

        check_allowed(allow)
        deadline = time.monotonic() + _END_S
        while True:
            alive = self.backend.is_alive(self.folder)
            state = self.state
            if state.state == "done":
                raise OrchError(f"run {self.id} is done: there are no steps left")
            if not alive or not state.is_final or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)  # its end is recorded, and its last processes are exiting
        if alive:
            raise OrchError(f"run {self.id} is {state.state}: cancel it first, or wait for its end")
        request = request_of_run(self.folder)
        if isinstance(self.backend, Elsewhere):
            return self.backend.resume_there(self.folder, allow)
        with private_umask(), disk_refusals(self.folder), without_pins(self.folder, allow):
            return self.backend.resume(self.folder, request, os.environ)

    def rate_breaks(self) -> list[str]:
        """Returns a message if a `resume` would continue at another learning rate than that of the
        last checkpoint."""
        from orchestrator.run.request import read_request
        from orchestrator.submit.submission import rate_messages

        return rate_messages(self.plan(), read_request(self.folder), self.backend)

    def steps(self) -> list[StepLine]:
        """Returns every step that the ranks have reported."""
        from orchestrator.observe.timeline import nodes_of, read_steps

        return read_steps(self.folder, nodes_of(self.plan(), self.state))

    def report(self, steps: list[StepLine] | None = None) -> dict[str, Any]:
        """Compares the measurements so far with the plan (docs/report.md). steps: the result of
        `steps()`, if it was read before."""
        from orchestrator.observe.report import make_report
        from orchestrator.observe.timeline import nodes_of, read_events

        plan = self.plan()
        state = self.state
        lines = self.steps() if steps is None else steps
        events = read_events(self.folder, nodes_of(plan, state))
        return make_report(plan, state, lines, events)
