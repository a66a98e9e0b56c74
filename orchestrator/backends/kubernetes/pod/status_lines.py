"""Status lines: a pod's standard output carries its workers' lines and, in regular intervals, the
state of the run.

Pods' logs are the one thing that every user of a namespace may read, so `orch status` and `orch
logs` need no further permission and no open port. A line is `[rank 3] text`, or `@orch {json}`; the
agent's own lines are as they are.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import TextIO

import msgspec
from msgspec import structs

from orchestrator.agent.node.connection import read_address
from orchestrator.errors import OrchError
from orchestrator.observe.goodput.account import account
from orchestrator.observe.goodput.run_timeline import run_timeline
from orchestrator.observe.logs import LogTail
from orchestrator.observe.timeline import StepFollower, read_events, tail_lines
from orchestrator.plan.codec import UNREADABLE
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import RunState, read_state

MARK = "@orch "
_POLL_S = 0.25
# the state is written again this often, so that the last lines of a long log hold it
_STATE_S = 10.0
_STEP_S = 2.0
_EPOCHS = 8
_ETTR_S = 30.0
_ETTR_NODES = 8  # how often it is worked out, from the records of so many nodes


NOTHING = msgspec.Raw(b"null")


class StatusLine(msgspec.Struct, frozen=True):
    """What follows MARK."""

    state: msgspec.Raw = NOTHING  # state.json
    node: str = ""  # whose report `step` is
    step: msgspec.Raw = NOTHING  # one line of metrics/<node>.jsonl
    ettr: float | None = None  # effective training time ratio since the run's first start


class StatusLineWriter:
    """A thread that copies what is new in the run folder to standard output, until `close`.
    `is_leader`: pod 0's."""

    def __init__(
        self,
        folder: RunFolder,
        node: str,
        ranks: Sequence[int],
        is_leader: bool,
        out: TextIO | None = None,
    ):
        self._folder = folder
        self._node = node
        self._is_leader = is_leader
        self._out = out or sys.stdout
        self.led = is_leader  # at some time
        self._spent = _Spent(folder)
        self._tails = {rank: LogTail(folder.rank_log(rank), last_lines=0) for rank in ranks}
        self._state = b""
        self._state_at = 0.0
        self._step = b""
        self._step_at = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status-lines", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left."""
        self._end.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            self._pass(last=False)
        self._pass(last=True)

    def _pass(self, last: bool) -> None:
        lines = [
            f"[rank {rank}] {line}"
            for rank, tail in self._tails.items()
            for line in tail.read(last=last)
        ]
        now = time.monotonic()
        if self._is_leader and (last or now - self._step_at >= _STEP_S):
            node, step = self._last_step()
            if step and step != self._step:
                self._step = step
                self._step_at = now
                lines.append(_line(StatusLine(node=node, step=msgspec.Raw(step))))
        if (
            self._is_leader
            and (state := self._read_state())
            and (last or state != self._state or now - self._state_at > _STATE_S)
        ):
            self._state = state
            self._state_at = now
            lines.append(
                _line(StatusLine(state=msgspec.Raw(state), ettr=self._spent.ettr(anew=last)))
            )
        if lines:
            self._out.write("\n".join(lines) + "\n")
            self._out.flush()

    def _last_step(self) -> tuple[str, bytes]:
        """The last step's report, of a node that knows the loss (the last stage's) where its
        records are seen."""
        known = [self._node]
        with contextlib.suppress(OrchError):
            ranked = {
                name: max(one.ranks)
                for name, one in read_state(self._folder).nodes.items()
                if one.ranks
            }
            known = [*sorted(ranked, key=lambda name: -ranked[name])[:1], *known]
        for node in known:
            if lines := tail_lines(self._folder.metrics(node), size=1 << 14):
                return node, next(
                    (line for line in reversed(lines) if b'"loss":' in line), lines[-1]
                )
        return self._node, b""

    def _read_state(self) -> bytes:
        try:
            return msgspec.json.encode(
                compact(msgspec.json.decode(self._folder.state.read_bytes(), type=RunState))
            )
        except (OSError, *UNREADABLE):
            return b""


class ElasticStatusLineWriter(StatusLineWriter):
    """Of a pod of an elastic run: its ranks change, and it leads while its node has the
    coordinator."""

    def __init__(self, folder: RunFolder, node: str, out: TextIO | None = None):
        super().__init__(folder, node, (), False, out)

    def _pass(self, last: bool) -> None:
        seen = read_address(self._folder)
        self._is_leader = seen is not None and seen.node == self._node
        self.led = self.led or self._is_leader
        with contextlib.suppress(OrchError):
            nodes = read_state(self._folder).nodes
            own = nodes[self._node].ranks if self._node in nodes else []
            for rank in own:
                if rank not in self._tails:
                    self._tails[rank] = LogTail(self._folder.rank_log(rank), last_lines=0)
            for rank in self._tails.keys() - set(own):
                del self._tails[rank]
        super()._pass(last)


class _Spent:
    """The run's effective training time ratio, from what its nodes have recorded; worked out now
    and then."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._steps = StepFollower(folder)
        self._at = float("-inf")
        self._found: float | None = None

    def ettr(self, anew: bool = False) -> float | None:
        """`anew`: of now, as the last word of a life that may have been short."""
        if not anew and time.monotonic() - self._at < _ETTR_S:
            return self._found
        self._at = time.monotonic()
        try:
            state = read_state(self._folder)
            nodes = [node for node, one in state.nodes.items() if one.ranks][:_ETTR_NODES] or list(
                state.nodes
            )[:1]
            steps = self._steps.read(nodes)
            events = read_events(self._folder, nodes)
            found = account(run_timeline(state, events, steps), time.time()).ettr
            self._found = None if found is None else round(found, 4)
        except (OrchError, ValueError, ZeroDivisionError):
            self._found = None
        return self._found


def compact(state: RunState) -> RunState:
    """The state with its last epochs alone, without their tracebacks, which the workers' own lines
    hold."""
    epochs = [
        structs.replace(epoch, cause=structs.replace(epoch.cause, tail=[]))
        if epoch.cause
        else epoch
        for epoch in state.epochs[-_EPOCHS:]
    ]
    return structs.replace(state, epochs=epochs)


def _line(status: StatusLine) -> str:
    return MARK + msgspec.json.encode(status).decode(errors="replace")


def parse_status_line(line: str) -> StatusLine | None:
    """The content of a status line; None for any other line, whatever a worker may print."""
    if not line.startswith(MARK):
        return None
    try:
        return msgspec.json.decode(line[len(MARK) :].encode(), type=StatusLine)
    except UNREADABLE:
        return None


def parse_rank_line(line: str) -> tuple[int, str] | None:
    """(rank, text) of a worker's line."""
    if line.startswith("[rank ") and (end := line.find("] ")) > 0 and line[6:end].isdigit():
        return int(line[6:end]), line[end + 2 :]
    return None
