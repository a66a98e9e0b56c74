"""Status lines: a pod's standard output carries its workers' lines and, at regular intervals, the
state of the run.

Every user of a namespace may read pods' logs, so `orch status` and `orch logs` need no further
permission and no open port. A line is `[rank 3] text`, or `@orch {json}`; the agent's own lines are
unchanged.
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
# how often the state is repeated, so that the last lines of a long log hold it
_STATE_S = 10.0
_STEP_S = 2.0
_EPOCHS = 8
_ETTR_S = 30.0  # how often the effective training time ratio is computed
_ETTR_NODES = 8  # nodes whose records the ratio is computed from


NOTHING = msgspec.Raw(b"null")


class StatusLine(msgspec.Struct, frozen=True):
    """The content of a status line, after MARK."""

    state: msgspec.Raw = NOTHING  # state.json
    node: str = ""  # the node that reported `step`
    step: msgspec.Raw = NOTHING  # one line of metrics/<node>.jsonl
    ettr: float | None = None  # effective training time ratio since the run's first start


class StatusLineWriter:
    """Copies what is new in the run folder to standard output, in a thread, until `close`.
    `is_leader`: this is pod 0."""

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
        self.led = is_leader  # whether it was ever the leader
        self._training_time = _TrainingTime(folder)
        self._tails = {rank: LogTail(folder.rank_log(rank), last_lines=0) for rank in ranks}
        self._state = b""
        self._state_at = 0.0
        self._step = b""
        self._step_at = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            name="status-lines",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Writes the rest, and ends the thread."""
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
        if self._is_leader:
            lines += self._status_lines(last)
        if lines:
            self._out.write("\n".join(lines) + "\n")
            self._out.flush()

    def _status_lines(self, last: bool) -> list[str]:
        """Returns the status lines that are due."""
        lines = []
        now = time.monotonic()
        if last or now - self._step_at >= _STEP_S:
            node, step = self._last_step()
            if step and step != self._step:
                self._step = step
                self._step_at = now
                lines.append(_line(StatusLine(node=node, step=msgspec.Raw(step))))
        state = self._read_state()
        if state and (last or state != self._state or now - self._state_at > _STATE_S):
            self._state = state
            self._state_at = now
            ettr = self._training_time.ettr(recompute=last)
            lines.append(_line(StatusLine(state=msgspec.Raw(state), ettr=ettr)))
        return lines

    def _last_step(self) -> tuple[str, bytes]:
        """Returns the last step's report, of a node that knows the loss (the last stage's) if its
        records can be read."""
        candidates = [self._node]
        with contextlib.suppress(OrchError):
            nodes = read_state(self._folder).nodes.items()
            highest_rank = {name: max(node.ranks) for name, node in nodes if node.ranks}
            if highest_rank:
                candidates.insert(0, max(highest_rank, key=lambda name: highest_rank[name]))
        for name in candidates:
            lines = tail_lines(self._folder.metrics(name), size=1 << 14)
            if lines:
                with_loss = (line for line in reversed(lines) if b'"loss":' in line)
                return name, next(with_loss, lines[-1])
        return self._node, b""

    def _read_state(self) -> bytes:
        try:
            state = msgspec.json.decode(self._folder.state.read_bytes(), type=RunState)
            return msgspec.json.encode(compact(state))
        except (OSError, *UNREADABLE):
            return b""


class ElasticStatusLineWriter(StatusLineWriter):
    """The writer of an elastic run's pod: its ranks change, and it leads while its node has the
    coordinator."""

    def __init__(self, folder: RunFolder, node: str, out: TextIO | None = None):
        super().__init__(folder, node, (), False, out)

    def _pass(self, last: bool) -> None:
        address = read_address(self._folder)
        self._is_leader = address is not None and address.node == self._node
        self.led = self.led or self._is_leader
        with contextlib.suppress(OrchError):
            nodes = read_state(self._folder).nodes
            ranks = nodes[self._node].ranks if self._node in nodes else []
            for rank in ranks:
                if rank not in self._tails:
                    self._tails[rank] = LogTail(self._folder.rank_log(rank), last_lines=0)
            for rank in self._tails.keys() - set(ranks):
                del self._tails[rank]
        super()._pass(last)


class _TrainingTime:
    """The run's effective training time ratio, from the records of its nodes; computed at
    intervals."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._steps = StepFollower(folder)
        self._computed_at = float("-inf")
        self._ettr: float | None = None

    def ettr(self, recompute: bool = False) -> float | None:
        """Returns the ratio. `recompute`: computes it now, for the last line of an attempt that may
        have been short."""
        if not recompute and time.monotonic() - self._computed_at < _ETTR_S:
            return self._ettr
        self._computed_at = time.monotonic()
        try:
            state = read_state(self._folder)
            with_ranks = [name for name, node in state.nodes.items() if node.ranks]
            nodes = with_ranks[:_ETTR_NODES] or list(state.nodes)[:1]
            steps = self._steps.read(nodes)
            events = read_events(self._folder, nodes)
            ettr = account(run_timeline(state, events, steps), time.time()).ettr
            self._ettr = None if ettr is None else round(ettr, 4)
        except (OrchError, ValueError, ZeroDivisionError):
            self._ettr = None
        return self._ettr


def compact(state: RunState) -> RunState:
    """Returns the state with only its last epochs, and without their tracebacks, which the workers'
    own lines hold."""
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
    """Returns the content of a status line; None for any other line, whatever a worker may
    print."""
    if not line.startswith(MARK):
        return None
    try:
        return msgspec.json.decode(line[len(MARK) :].encode(), type=StatusLine)
    except UNREADABLE:
        return None


def parse_rank_line(line: str) -> tuple[int, str] | None:
    """Returns (rank, text) of a worker's line, or None."""
    if line.startswith("[rank ") and (end := line.find("] ")) > 0 and line[6:end].isdigit():
        return int(line[6:end]), line[end + 2 :]
    return None
