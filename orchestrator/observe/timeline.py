"""Reads the files that agents write during a run: `metrics/<node>.jsonl` and
`events/<node>.jsonl`.

Truncated or damaged lines (a full disk, a killed agent) are skipped; a missing file has no lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from orchestrator.plan import Plan
from orchestrator.plan.codec import UNREADABLE, open_regular, read_file
from orchestrator.plan.worker import StepReport
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import RunState

T = TypeVar("T")
_TAIL_BYTES = 1 << 18
_READ_WHOLE = 16  # nodes
_RANK_0 = re.compile(rb'"rank": ?0[,}]')


class StepLine(StepReport, kw_only=True, tag_field="kind", tag="step"):
    """A step report with the time at which the agent received it."""

    at: float = 0.0


class Event(msgspec.Struct, frozen=True):
    """One line of `events/`, which an agent or the coordinator writes; lines of `kind` "event" are
    reports of a worker."""

    name: str
    at: float = 0.0
    epoch: int = -1
    kind: str = ""
    node: str = ""
    on: str | None = None  # the node that the event concerns
    rank: int | None = None
    code: int | None = None
    step: int | None = None
    reason: str = ""
    fault: str | None = None  # kind of the first cause
    again: bool | None = None
    counted: bool = False
    asked: bool = False
    fields: dict[str, str | int | float | bool | None] = {}


class Step(NamedTuple):
    """One step, as the lead rank reports it; `at`: Unix seconds of the report."""

    epoch: int
    step: int
    at: float
    step_s: float
    stall_s: float = 0.0  # seconds in the step or the pause before it in which a save stalled it
    samples: int = 0  # consumed by the run so far
    fingerprint: str = ""  # of the step's samples


class _LeadLine(msgspec.Struct, tag_field="kind", tag="step"):
    """The fields of a `StepLine` that `Step` needs, which decode in half the time."""

    rank: int
    epoch: int
    step: int
    step_s: float
    at: float = 0.0
    samples: int = 0
    fingerprint: str = ""
    phase_s: dict[str, float] = {}


_step_line = msgspec.json.Decoder(StepLine)
_lead_line = msgspec.json.Decoder(_LeadLine)
_event = msgspec.json.Decoder(Event)


def _decoded(decoder: msgspec.json.Decoder[T], lines: Iterable[bytes]) -> list[T]:
    records = []
    for line in lines:
        try:
            records.append(decoder.decode(line))
        except UNREADABLE:
            continue
    return records


def nodes_of(plan: Plan, state: RunState) -> list[str]:
    """All nodes that may have left files: the plan's, and nodes that joined later."""
    return list(dict.fromkeys([*plan.cluster.node_names, *state.nodes]))


def read_steps(folder: RunFolder, nodes: Iterable[str]) -> list[StepLine]:
    """Reads every step report of the run, in the order of each node's file."""
    return [step for node in nodes for step in _decoded(_step_line, _lines(folder.metrics(node)))]


def read_events(folder: RunFolder, nodes: Iterable[str]) -> list[Event]:
    """Reads every event of the run, sorted by time."""
    events = [event for node in nodes for event in _decoded(_event, _lines(folder.events(node)))]
    return sorted(events, key=lambda event: event.at)


def last_steps(path: Path) -> list[StepLine]:
    """Reads the step reports at the end of one node's file."""
    return _decoded(_step_line, tail_lines(path))


def last_events(path: Path, size: int = _TAIL_BYTES) -> list[Event]:
    """Reads the events in the last `size` bytes of one node's file, in the file's order."""
    return _decoded(_event, tail_lines(path, size))


def tail_lines(path: Path, size: int = _TAIL_BYTES) -> list[bytes]:
    """Reads the complete lines in the last `size` bytes."""
    try:
        with open_regular(path) as file:
            end = file.seek(0, 2)
            start = max(0, end - size)
            file.seek(start)
            lines = file.read(size).split(b"\n")
    except OSError:
        return []
    return lines[1 if start else 0 : -1]


def _lines(path: Path) -> list[bytes]:
    try:
        return read_file(path).splitlines()
    except OSError:
        return []


class _AnyStepLine(Protocol):
    rank: int
    epoch: int
    step: int
    step_s: float
    at: float
    samples: int
    fingerprint: str
    phase_s: dict[str, float]


def lead_steps(lines: Iterable[_AnyStepLine]) -> list[Step]:
    """Picks one report per step and epoch, from the lowest rank that reported it, in order.

    That rank is rank 0, which every epoch has. Only when its agent died with unread reports do the
    last steps come from another rank.
    """
    lead: dict[tuple[int, int], _AnyStepLine] = {}
    for line in lines:
        lead_line = lead.get((line.epoch, line.step))
        if lead_line is None or (line.rank, line.at) < (lead_line.rank, lead_line.at):
            lead[line.epoch, line.step] = line
    return [
        Step(
            epoch=epoch,
            step=step,
            at=report.at,
            step_s=report.step_s,
            stall_s=report.phase_s.get("checkpoint", 0.0),
            samples=report.samples,
            fingerprint=report.fingerprint,
        )
        for (epoch, step), report in sorted(lead.items())
    ]


class _NewLines:
    """The lines that were added to each node's metrics file since the last `read`."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._offsets: dict[str, tuple[int, int]] = {}  # node -> inode of its file, bytes read

    def read(self, node: str) -> list[bytes]:
        path = self._folder.metrics(node)
        try:
            with open_regular(path) as file:
                inode = os.fstat(file.fileno()).st_ino
                last_inode, offset = self._offsets.get(node, (inode, 0))
                if last_inode != inode:  # on Kubernetes a newer copy replaces the file
                    offset = 0
                file.seek(offset)
                chunk = file.read()
        except OSError:
            return []
        whole_lines = chunk[: chunk.rfind(b"\n") + 1]
        self._offsets[node] = inode, offset + len(whole_lines)
        return whole_lines.splitlines()


class StepLines:
    """Follows the step reports of an active run: each `read` returns the new ones of all nodes."""

    def __init__(self, folder: RunFolder):
        self._new_lines = _NewLines(folder)

    def read(self, nodes: Iterable[str]) -> list[StepLine]:
        return [
            step
            for node in sorted(nodes)
            for step in _decoded(_step_line, self._new_lines.read(node))
        ]


class StepFollower:
    """Follows the lead steps of an active run: each `read` reads the new lines of each node's file.

    All lines of the first nodes are decoded, but only rank 0's lines of the others.
    """

    def __init__(self, folder: RunFolder):
        self._new_lines = _NewLines(folder)
        self._lead_lines: dict[tuple[int, int], _LeadLine] = {}

    def read(self, nodes: Iterable[str]) -> list[Step]:
        for index, node in enumerate(sorted(nodes)):
            lines = [
                line
                for line in self._new_lines.read(node)
                if index < _READ_WHOLE or _RANK_0.search(line)
            ]
            for step in _decoded(_lead_line, lines):
                lead_line = self._lead_lines.get((step.epoch, step.step))
                if lead_line is None or step.rank < lead_line.rank:
                    self._lead_lines[step.epoch, step.step] = step
        return lead_steps(self._lead_lines.values())
