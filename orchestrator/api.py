"""The Python API: `plan_job`, `submit_job` and `Run`, importable from `orchestrator`. The command
line uses the same.

    import orchestrator

    plan = orchestrator.plan_job("cluster=h100x64", "parallel=tp8_pp4_zero1")
    run = orchestrator.submit_job("nproc=2", command=["python", "train.py"])
    print(run.wait().state, run.report()["steps"])

Words are those of the command line (`key=value`). What is refused is an OrchError with `message`
and `exit`. Not for use from several threads at once, as `orchestrator.config.compose.load` is not.
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

_LOOK_S = 0.1
_CANCEL_S = 120.0  # for agents, pods or a job to go, beyond the grace period of the workers
_END_S = 10.0  # for the last processes of a run that has ended


def home() -> Path:
    """Where runs, measured clusters and bad nodes of this user are kept (`ORCH_HOME`)."""
    from orchestrator.run.folder import home_folder

    return home_folder(os.environ)


# ------------------------------------------------------------------------------------------- plan
#     and submit


def plan_job(*words: str, config_dir: str | Path | None = None, any_layout: bool = False) -> Plan:
    """The plan of a job of the bundled trainer, as `orch plan` shows it; of `nodes=A..B` that of
    the largest size.

    any_layout: for a program of one's own, so that `parallel=auto` also chooses what the trainer
    does not run. OrchError: 64 for a word, 65 when nothing can be planned, 76 and 78 from asking
    the cluster.
    """
    sizes, _ = plan_all_sizes(list(words), config_dir, any_layout)
    return sizes.legal[0].plan


def plan_all_sizes(
    words: list[str], config_dir: str | Path | None, any_layout: bool, settle: bool = False
) -> tuple[Sizes, ClusterResolver]:
    """The plans of all sizes, the largest first. settle: `parallel=auto` is replaced by what it
    chooses, for a layout that can be explained."""
    from orchestrator.config.compose import load
    from orchestrator.planner.elastic.sizes import plan_sizes
    from orchestrator.submit.cluster import ClusterResolver, at_home

    resolve = ClusterResolver(home())
    config = at_home(load(words, config_dir, ranges=True), home())
    profile = resolve.profile(config)
    if settle and config.parallel.auto and config.nodes is None:
        from orchestrator.planner.search.auto import settled

        config = settled(config, resolve(config.cluster), any_layout, profile)
    return (
        plan_sizes(config, resolve, any_memory=True, any_layout=any_layout, profile=profile),
        resolve,
    )


class PreparedJob(NamedTuple):
    """What would be sent: nothing has been started or written."""

    backend: Backend
    candidate: SizeCandidate
    said: list[str]  # what people should know of it

    def send(self, options: SubmitOptions) -> Run:
        """Start it."""
        from orchestrator.submit.submission import send

        send(self.candidate.bundle, self.backend, options)
        return Run(
            self.backend.folder_of(self.candidate.bundle.request, options.home), self.backend
        )


def prepare_job(
    words: list[str], options: SubmitOptions, config_dir: str | Path | None = None
) -> PreparedJob:
    """The job planned, checked, and at the size that its scheduler would start. OrchError as
    `submit_job`."""
    from orchestrator.submit.submission import (
        check,
        choose,
        not_passed,
        prepare,
        rate_breaks,
        simulated_nodes,
    )
    from orchestrator.submit.this_machine import interpreter, load_job

    config = load_job(words, options, config_dir)
    if config.backend.options.get("ssh") and options.code is None:
        from orchestrator.submit.over_ssh import prepare_there

        return PreparedJob(*prepare_there(config, words, options, config_dir))
    submission = prepare(config, options)
    check(submission, options)
    candidate, said = choose(submission, options)
    request = candidate.bundle.request
    more = [*simulated_nodes(request, submission.backend), *not_passed(request, options)]
    more += rate_breaks(candidate.plan, request, submission.backend)
    if submission.backend.shares_folders and options.code is None:
        more += interpreter(request, options)
    return PreparedJob(submission.backend, candidate, [*said, *more])


def submit_job(
    *words: str,
    command: Sequence[str] = (),
    config_dir: str | Path | None = None,
    env: Sequence[str] = (),
    in_place: bool | None = None,
    run_id: str | None = None,
    after: Sequence[str] = (),
) -> Run:
    """Plan a job and start it, as `orch submit` does. `command`: a program of one's own; empty: the
    bundled trainer.

    env: names of further variables to pass on. in_place: run the program in the current folder and
    not in a copy (None: where nodes share folders). after: ids of runs to wait for, where the
    backend has a queue. What the command line would say of the run, such as variables that are not
    passed on, is a UserWarning. OrchError: 64 for words and options, 65 for what cannot run, 76 and
    78 from the cluster.
    """
    import warnings

    from orchestrator.run.left_out import describe_left_out
    from orchestrator.submit.submission import names_model

    wishes: dict[str, Any] = {
        "command": tuple(command),
        "env": tuple(env),
        "in_place": in_place,
        "run_id": run_id,
    }
    program = bool(command) and not names_model(words)
    options = from_here(**wishes, after=tuple(after), program=program)
    job = prepare_job(list(words), options, config_dir)
    run = job.send(options)
    for line in [*describe_left_out(job.candidate.bundle.request.code), *job.said]:
        warnings.warn(line, stacklevel=2)
    return run


def from_here(**wishes: Any) -> SubmitOptions:
    """Options of a submission from this process, its folder and environment. `wishes`: the other
    fields."""
    from orchestrator.submit.submission import SubmitOptions

    return SubmitOptions(
        home=home(), cwd=Path.cwd(), python=sys.executable, environ=os.environ, **wishes
    )


# ------------------------------------------------------------------------------------------- runs


def plan_of_run(folder: RunFolder) -> Plan:
    """OrchError (65) where it is missing or damaged."""
    from orchestrator.plan import PlanError, load_plan

    try:
        return load_plan(folder.plan)
    except PlanError as error:
        raise OrchError(f"run {folder.run_id}: {error}", Exit.CONFIG) from None


def request_of_run(folder: RunFolder) -> LaunchRequest:
    """What a run was started with. OrchError (65): there is none, or the bundled trainer does not
    run its plan."""
    from orchestrator.run.request import read_request

    request = read_request(folder)
    if request.worker.bundled:
        from orchestrator.plan.trained import refusal

        if problem := refusal(plan_of_run(folder)):
            raise OrchError(f"run {folder.run_id}: {problem}", Exit.CONFIG)
    return request


class Status(NamedTuple):
    state: RunState  # what the run is, of its backend and its coordinator
    live: Live  # the last step that was reported
    spent: Account  # where its time went


class Run:
    """A run that has been submitted, here or anywhere with the same home."""

    def __init__(self, folder: RunFolder, backend: Backend):
        self.folder = folder
        self.backend = backend
        self._steps: StepFollower | None = None  # reads only what is new at each look

    @classmethod
    def find(cls, name: str | None = None) -> Run:
        """By handle, id or the beginning of one; None: the newest. One that this machine did not
        submit is asked of the clusters that it is set up for. OrchError: 64 for none, 65 for an
        unreadable one."""
        from orchestrator.backends.base import adopted, get_backend
        from orchestrator.run import registry
        from orchestrator.run.state import read_state

        try:
            folder = registry.find_run(home(), name)
        except OrchError:
            found = (
                adopted(name.partition("://")[2] if "://" in name else name, home())
                if name
                else None
            )
            if found is None:
                raise
            folder = found
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
        """As its backend knows it now."""
        return self.backend.state(self.folder)

    def plan(self) -> Plan:
        """The plan in force. OrchError (65) where it is missing or damaged."""
        return plan_of_run(self.folder)

    def status(self) -> Status:
        """Its state, its last step and where its time went, as `orch status` shows them."""
        from orchestrator.observe.goodput.account import account
        from orchestrator.observe.goodput.run_timeline import run_timeline
        from orchestrator.observe.live import read_live
        from orchestrator.observe.timeline import StepFollower, read_events

        state = self.state
        now = time.time()
        self._steps = self._steps or StepFollower(self.folder)
        steps = self._steps.read(state.nodes)
        spent = account(run_timeline(state, read_events(self.folder, state.nodes), steps), now)
        return Status(state, read_live(self.folder, state, now), spent)

    def wait(self, timeout_s: float | None = None) -> RunState:
        """Its final state, when all its processes have gone. TimeoutError when it has not ended by
        then.

        A state that cannot be read for a moment ends no waiting. OrchError (65) where that lasts
        for a minute.
        """
        from orchestrator.run.folder import insist

        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            alive = self.backend.is_alive(
                self.folder
            )  # before the state: what ends in between has written it
            state = insist(lambda: self.state)
            if state.is_final and not alive:
                return state
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"run {self.id} is {state.state} after {timeout_s:g} s")
            time.sleep(_LOOK_S)

    def logs(self, rank: int, last: int | None = None, follow: bool = False) -> Iterator[str]:
        """The lines of one rank, the last so many or all. follow: also those to come, until the run
        has ended."""
        for _, line in self.lines(lambda: {"": self.folder.rank_log(rank)}, last, follow):
            yield line

    def lines(
        self, logs: Callable[[], Mapping[str, Path]], last: int | None = None, follow: bool = False
    ) -> Iterator[tuple[str, str]]:
        """The lines of several logs with their names, as `logs` does. `logs`: asked once the folder
        has them."""
        from orchestrator.backends.base import LogMirroring
        from orchestrator.observe.logs import LogTail

        with (
            self.backend.mirror(self.folder, follow)
            if isinstance(self.backend, LogMirroring)
            else nullcontext()
        ):
            tails = {name: LogTail(path, last) for name, path in logs().items()}
            while True:
                alive = follow and self.backend.is_alive(
                    self.folder
                )  # before reading: what they write until then
                for name, tail in tails.items():
                    for line in tail.read(last=not alive):
                        yield name, line
                if not alive:
                    return
                time.sleep(_LOOK_S)

    def cancel(self, force: bool = False, wait: bool = True) -> RunState:
        """End it; its workers save first, unless forced.

        OrchError: 64 when it has ended before, 76 when it lives on long after its grace period: the
        request stays.
        """
        from orchestrator.run.request import read_request

        state = self.state
        if state.is_final:
            raise OrchError(f"run {self.id} has ended: {state.state}")
        self.backend.cancel(self.folder, force)
        within_s = _CANCEL_S
        with suppress(OrchError):  # of a damaged run: it is ended all the same
            within_s += 2 * read_request(self.folder).policy.grace_s
        end = time.monotonic() + within_s
        while wait and self.backend.is_alive(self.folder):
            if time.monotonic() > end:
                text = (
                    f"run {self.id} lives on {within_s:.0f} s after it was asked to end; the"
                    " request stays"
                )
                raise OrchError(f"{text}: orch cancel --force {self.id}", Exit.CAPACITY)
            time.sleep(_LOOK_S)
        return self.state

    def resume(self, allow: Sequence[str] = ()) -> str:
        """Start it once more after its end, from its last checkpoint; its handle. allow: as `orch
        resume --allow`.

        One that is refused leaves all as it was. OrchError: 64 while it runs or when it is done, 65
        when it cannot run.
        """
        from orchestrator.backends.base import Elsewhere
        from orchestrator.run.create import disk_refusals
        from orchestrator.run.folder import private_umask
        from orchestrator.run.put_back import check_allowed, without_pins

        check_allowed(allow)
        end = time.monotonic() + _END_S
        while True:
            alive = self.backend.is_alive(self.folder)
            state = self.state
            if state.state == "done":
                raise OrchError(f"run {self.id} is done: there is nothing left to do")
            if not alive or not state.is_final or time.monotonic() > end:
                break
            time.sleep(_LOOK_S)  # it has said how it ended, and its last processes are going
        if alive:
            raise OrchError(f"run {self.id} is {state.state}: cancel it first, or wait for its end")
        request = request_of_run(self.folder)
        if isinstance(self.backend, Elsewhere):
            return self.backend.resume_there(self.folder, allow)
        with private_umask(), disk_refusals(self.folder), without_pins(self.folder, allow):
            return self.backend.resume(self.folder, request, os.environ)

    def rate_breaks(self) -> list[str]:
        """One line where a `resume` goes on at another learning rate than its last checkpoint was
        made with."""
        from orchestrator.run.request import read_request
        from orchestrator.submit.submission import rate_breaks

        return rate_breaks(self.plan(), read_request(self.folder), self.backend)

    def steps(self) -> list[StepLine]:
        """Every step that its ranks have reported."""
        from orchestrator.observe.timeline import nodes_of, read_steps

        return read_steps(self.folder, nodes_of(self.plan(), self.state))

    def report(self, steps: list[StepLine] | None = None) -> dict[str, Any]:
        """What was planned against what was measured (docs/report.md), up to now. steps: where they
        were read."""
        from orchestrator.observe.report import make_report
        from orchestrator.observe.timeline import nodes_of, read_events

        plan = self.plan()
        state = self.state
        lines = self.steps() if steps is None else steps
        return make_report(plan, state, lines, read_events(self.folder, nodes_of(plan, state)))
