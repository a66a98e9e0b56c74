"""What a run has left about its time: lives (epochs), steps, marks. Read from its state, events and metrics lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from orchestrator.run.folder import RunFolder
from orchestrator.run.state import Cause, RunState
from orchestrator.run.untrusted import UNREADABLE

#: Events that say that an epoch is over, whoever saw it first. `epoch_stops` is the coordinator's, for every reason.
NOTICED = ("epoch_stops", "node_lost", "coordinator_lost", "fault_detected", "notice", "growing", "worker_ended")


class Step(NamedTuple):
    """One step as the lead rank tells it; `at`: Unix seconds when it was reported."""

    epoch: int
    step: int
    at: float
    step_s: float
    stall_s: float = 0.0  # of it, or of the pause before it: training waited for a save
    samples: int = 0  # consumed by the run so far


class Mark(msgspec.Struct, frozen=True):
    """One line of `events/`, whoever wrote it."""

    name: str
    at: float = 0.0
    epoch: int = -1
    node: str = ""
    on: str | None = None  # the node that it is about
    rank: int | None = None
    code: int | None = None
    step: int | None = None
    reason: str = ""
    fault: str | None = None  # kind of the first cause
    again: bool | None = None
    counted: bool = False
    asked: bool = False
    fields: dict[str, str | int | float | bool | None] = {}


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch: from its first message to its end. Unix seconds; None: not yet, or nobody could write it down."""

    epoch: int
    began: float
    running: float | None = None
    noticed: float | None = None  # first sign that it is over
    ended: float | None = None
    cause: Cause | None = None
    reason: str = ""
    outcome: str | None = None


class Facts(msgspec.Struct, frozen=True):
    """All of a run's, in order of time."""

    created: float
    ended: float | None
    lives: list[Life]
    steps: list[Step]
    pauses: list[tuple[float, float]] = []  # ended, resumed
    arrivals: list[float] = []  # agents start
    saves: list[tuple[float, float, int]] = []  # durable at, seconds that training waited for it, epoch


_decode_mark = msgspec.json.Decoder(Mark).decode


def read_marks(folder: RunFolder, nodes: Iterable[str]) -> list[Mark]:
    """Every event of the run, by time. Damaged lines are left out."""
    found = []
    for node in nodes:
        for line in _lines(folder.events(node)):
            try:
                found.append(_decode_mark(line))
            except UNREADABLE:
                continue
    return sorted(found, key=lambda mark: mark.at)


class _StepLine(msgspec.Struct, tag_field="kind", tag="step"):
    rank: int
    epoch: int
    step: int
    step_s: float
    at: float = 0.0
    samples: int = 0
    phase_s: dict[str, float] = {}


_decode_step = msgspec.json.Decoder(_StepLine).decode
_READ_WHOLE = 16  # nodes
_RANK_0 = re.compile(rb'"rank": ?0[,}]')


def lead_steps(lines: Iterable) -> list[Step]:
    """Each step of each epoch once, from step lines of any kind, as the lowest rank that was heard tells it; in order.

    That is rank 0, which every epoch has, but for the last steps before its agent died with reports that it had not
    read; others have reported those.
    """
    lead: dict[tuple[int, int], object] = {}
    for line in lines:
        known = lead.get((line.epoch, line.step))
        if known is None or (line.rank, line.at) < (known.rank, known.at):
            lead[line.epoch, line.step] = line
    return [
        Step(epoch, step, x.at, x.step_s, x.phase_s.get("checkpoint", 0.0), x.samples)
        for (epoch, step), x in sorted(lead.items())
    ]


class LeadReader:
    """The steps of a run that goes on: each call reads what has been added, of each node's file. Of many nodes some are
    read whole, and of the others rank 0 alone.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._read: dict[str, tuple[int, int]] = {}  # node -> which file, bytes read of it
        self._found: dict[tuple[int, int], _StepLine] = {}

    def read(self, nodes: Iterable[str]) -> list[Step]:
        for index, node in enumerate(sorted(nodes)):
            path = self._folder.metrics(node)
            try:
                with path.open("rb") as file:
                    which = os.fstat(file.fileno()).st_ino
                    before, done = self._read.get(node, (which, 0))
                    done = done if before == which else 0  # on Kubernetes it is replaced by what was heard last
                    file.seek(done)
                    chunk = file.read()
            except OSError:
                continue
            whole = chunk[: chunk.rfind(b"\n") + 1]
            self._read[node] = which, done + len(whole)
            for line in whole.splitlines():
                if index < _READ_WHOLE or _RANK_0.search(line):
                    self._take(line)
        return lead_steps(self._found.values())

    def _take(self, line: bytes) -> None:
        try:
            step = _decode_step(line)
        except UNREADABLE:
            return
        known = self._found.get((step.epoch, step.step))
        if known is None or step.rank < known.rank:
            self._found[step.epoch, step.step] = step


def gather(state: RunState, marks: Sequence[Mark], steps: list[Step]) -> Facts:
    """Facts of a run from what its files say."""
    by_epoch: dict[int, list[Mark]] = {}
    for mark in marks:
        by_epoch.setdefault(mark.epoch, []).append(mark)
    known = {epoch.epoch: epoch for epoch in state.epochs}
    began = {mark.epoch: mark.at for mark in reversed(marks) if mark.name == "epoch_began"}
    lives = []
    for number in sorted(known.keys() | began.keys()):
        book, said = known.get(number), by_epoch.get(number, [])
        start = book.started_at if book else began[number]
        end = _first(said, "epoch_ended", "run_ended")
        running = _first(said, "epoch_runs")
        lives.append(
            Life(
                epoch=number,
                began=start,
                running=book.running_at if book else running and running.at,
                noticed=min((mark.at for mark in said if _is_sign(mark) and mark.at >= start), default=None),
                ended=book.ended_at if book else end and end.at,
                cause=book.cause if book else _cause_in(end, number),
                reason=(end.reason if end else "") or (book.cause.text if book and book.cause else ""),
                outcome=book.outcome if book else end and ("restart" if end.again else None),
            )
        )
    last_sign = max([mark.at for mark in marks[-1:]] + [step.at for step in steps], default=state.created_at)
    return Facts(
        created=state.created_at,
        ended=last_sign if state.is_final and state.ended_at is None else state.ended_at,  # all were killed
        lives=lives,
        steps=steps,
        pauses=list(state.pauses),
        arrivals=[mark.at for mark in marks if mark.name == "agent_started"],
        saves=[
            (mark.at, float(mark.fields.get("stall_s") or 0.0), mark.epoch)
            for mark in marks
            if mark.name == "checkpoint_saved" and isinstance(mark.fields.get("stall_s"), int | float)
        ],
    )


def _is_sign(mark: Mark) -> bool:
    return mark.name in NOTICED and not (mark.name == "worker_ended" and (mark.asked or not mark.code))


def _first(marks: Sequence[Mark], *names: str) -> Mark | None:
    return next((mark for mark in marks if mark.name in names), None)


def _cause_in(end: Mark | None, epoch: int) -> Cause | None:
    if end is None or end.fault is None:
        return None
    about = {"node": end.on, "rank": end.rank, "code": end.code, "step": end.step}
    return Cause(kind=end.fault, text=end.reason, epoch=epoch, **about)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except OSError:
        return []
