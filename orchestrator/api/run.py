"""A run that was submitted: watches, ends, resumes and reports it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.backends.base import Backend
    from orchestrator.observe.goodput.account import Account
    from orchestrator.observe.live import Live
    from orchestrator.observe.timeline import StepFollower, StepLine
    from orchestrator.observe.updates import Update
    from orchestrator.plan import Plan
    from orchestrator.run.folder import RunFolder
    from orchestrator.run.request import LaunchRequest
    from orchestrator.run.state import RunState

_POLL_S = 0.1
#: Seconds for agents, pods or a job to end, beyond the grace period of the workers.
_CANCEL_S = 120.0
#: Seconds for the last processes of an ended run to exit.
_END_S = 10.0


def home() -> Path:
    """Returns the folder of this user's runs, measured clusters and bad nodes (`ORCH_HOME`)."""
    from orchestrator.run.folder import home_folder

    return home_folder(os.environ)


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


def nodes_of_ranks(folder: RunFolder) -> dict[int, str]:
    """Maps ranks to nodes: those of the running workers, and of the plan before workers have
    started."""
    from orchestrator.run.state import read_state

    nodes = read_state(folder).nodes
    actual = {rank: name for name, node in nodes.items() for rank in node.ranks}
    if actual:
        return dict(sorted(actual.items()))
    return {rank.rank: rank.node for rank in plan_of_run(folder).ranks}


def rank_logs(folder: RunFolder, ranks: Sequence[int] = (), node: str = "") -> dict[str, Path]:
    """Returns the logs of these ranks, of this node; of all if empty. The names are `rank N`, all
    of the same width. Raises OrchError (64) for a rank that the run does not have."""
    nodes = nodes_of_ranks(folder)
    for rank in ranks:
        if not 0 <= rank < len(nodes):
            raise OrchError(f"run {folder.run_id} has no rank {rank}: 0 to {len(nodes) - 1}")
    width = len(str(len(nodes) - 1))
    return {
        f"rank {rank:>{width}}": folder.rank_log(rank)
        for rank, rank_node in nodes.items()
        if node in ("", rank_node) and (not ranks or rank in ranks)
    }


class Status(NamedTuple):
    state: RunState  # the state according to the backend and the coordinator
    live: Live  # the last reported step
    spent: Account  # how the run spent its time


class Run:
    """A run that was submitted from this machine, or from another one with the same home folder.

    As a context manager it does not outlive its block: a run that has not ended when the block is
    left, for whatever reason, is cancelled (its workers save first), and the end is waited for. A
    run that is to go on alone needs no `with`.
    """

    def __init__(self, folder: RunFolder, backend: Backend):
        self.folder = folder
        self.backend = backend
        self._steps: StepFollower | None = None  # reads only new lines each time
        self._steps_lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.cancel()
        except OrchError:
            if not self.state.is_final:
                raise
        self.wait(timeout_s=_CANCEL_S)

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
        with self._steps_lock:
            self._steps = self._steps or StepFollower(self.folder)
            steps = self._steps.read(state.nodes)
        events = read_events(self.folder, state.nodes)
        spent = account(run_timeline(state, events, steps), now)
        return Status(state, read_live(self.folder, state, now), spent)

    def wait(self, timeout_s: float | None = None, step: int | None = None) -> RunState:
        """Waits for the run to end and all its processes to exit, and returns its state. With
        `step`, it also returns once the run has done that step; after a restart the steps of the
        new epoch count. Raises TimeoutError after `timeout_s`.

        Waiting continues while the state is unreadable for a moment. Raises OrchError (65) after a
        minute of that.
        """
        from orchestrator.observe.timeline import StepLines
        from orchestrator.run.folder import insist

        lines = StepLines(self.folder)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Before the state: a process that exits in between has written its final state.
            alive = self.backend.is_alive(self.folder)
            state = insist(lambda: self.state)
            if state.is_final and not alive:
                return state
            if step is not None:
                epoch = max(state.epoch, state.first_epoch)
                new_lines = lines.read(state.nodes)
                if any(line.epoch >= epoch and line.step >= step for line in new_lines):
                    return state
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} is {state.state} after {timeout_s:g} s")
            time.sleep(_POLL_S)

    def follow(self) -> Iterator[Update]:
        """Yields what happens, from the start of the present attempt until the run has ended:
        `StateUpdate`, `StepUpdate`, `FaultUpdate` with the cause, and last `EndUpdate`
        (`orch.StepUpdate` and so on). Of a run that has ended, it yields what has happened.

        Leaving the loop does not end the run. Raises OrchError (65) when the state is unreadable
        for a minute.
        """
        from orchestrator.observe.updates import EndUpdate, Updates
        from orchestrator.run.folder import insist

        updates = Updates(self.folder)
        while True:
            # Before the state: a process that exits in between has written its final state.
            alive = self.backend.is_alive(self.folder)
            state = insist(lambda: self.state)
            is_over = state.is_final and not alive
            if is_over or not state.is_final:
                yield from updates.read(state)
            if is_over:
                yield EndUpdate(state=state)
                return
            time.sleep(_POLL_S)

    def logs(
        self,
        rank: int | None = None,
        last: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yields the log lines of a rank; without a rank those of all, each after `[rank N] `.
        last: only this many of the existing lines of each rank. follow: also new lines, until the
        run has ended. Raises OrchError (64) for a rank that the run does not have."""
        ranks = [] if rank is None else [rank]
        for name, line in self.lines(lambda: rank_logs(self.folder, ranks), last, follow):
            yield f"[{name}] {line}" if rank is None else line

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

    def resume(
        self,
        allow: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """Starts the ended run again from its last checkpoint, and returns its handle. allow: as
        for `orch resume --allow`. environ: the variables of the shell (None: of this
        process).

        A refused resume changes nothing. Raises OrchError: 64 while the run is running or when it
        is done, 65 when it cannot run.
        """
        from orchestrator.backends.base import Elsewhere
        from orchestrator.run.create import disk_refusals
        from orchestrator.run.put_back import check_allowed, without_pins

        check_allowed(allow)
        environ = os.environ if environ is None else environ
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
            return self.backend.resume_there(self.folder, allow, environ)
        with disk_refusals(self.folder), without_pins(self.folder, allow):
            return self.backend.resume(self.folder, request, environ)

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
