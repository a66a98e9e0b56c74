"""The one reader of what agents write while a run goes on: `metrics/<node>.jsonl` and
`events/<node>.jsonl`.

Lines that are torn or damaged (a full disk, a killed agent) are left out; a file that is not there
has no lines.
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
    """A step report as the agent keeps it."""

    at: float = 0.0


class Event(msgspec.Struct, frozen=True):
    """One line of `events/`, written by an agent, by the coordinator, or (`kind` "event") for a
    worker."""

    name: str
    at: float = 0.0
    epoch: int = -1
    kind: str = ""
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


class Step(NamedTuple):
    """One step as the lead rank reports it; `at`: Unix seconds when it was reported."""

    epoch: int
    step: int
    at: float
    step_s: float
    stall_s: float = 0.0  # of it, or of the pause before it: training waited for a save
    samples: int = 0  # consumed by the run so far
    fingerprint: str = ""  # of what it was trained on


class _LeadLine(msgspec.Struct, tag_field="kind", tag="step"):
    """The part of a `StepLine` that `Step` needs: half the time to decode."""

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
    """All nodes that may have left files: the plan's, and those that came later."""
    return list(dict.fromkeys([*plan.cluster.node_names, *state.nodes]))


def read_steps(folder: RunFolder, nodes: Iterable[str]) -> list[StepLine]:
    """Every step report of the run, in the order of each node's file."""
    return [step for node in nodes for step in _decoded(_step_line, _lines(folder.metrics(node)))]


def read_events(folder: RunFolder, nodes: Iterable[str]) -> list[Event]:
    """Every event of the run, by time."""
    events = [event for node in nodes for event in _decoded(_event, _lines(folder.events(node)))]
    return sorted(events, key=lambda event: event.at)


def last_steps(path: Path) -> list[StepLine]:
    """The step reports at the end of one node's file."""
    return _decoded(_step_line, tail_lines(path))


def last_events(path: Path, size: int = _TAIL_BYTES) -> list[Event]:
    """The events in the last `size` bytes of one node's file, in its order."""
    return _decoded(_event, tail_lines(path, size))


def tail_lines(path: Path, size: int = _TAIL_BYTES) -> list[bytes]:
    """Whole lines from the last `size` bytes."""
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
    """Each step of each epoch once, as the lowest rank that was heard reports it; in order.

    That is rank 0, which every epoch has, but for the last steps before its agent died with reports
    that it had not read; others have reported those.
    """
    lead: dict[tuple[int, int], _AnyStepLine] = {}
    for line in lines:
        lead_line = lead.get((line.epoch, line.step))
        if lead_line is None or (line.rank, line.at) < (lead_line.rank, lead_line.at):
            lead[line.epoch, line.step] = line
    return [
        Step(
            epoch,
            step,
            report.at,
            report.step_s,
            report.phase_s.get("checkpoint", 0.0),
            report.samples,
            report.fingerprint,
        )
        for (epoch, step), report in sorted(lead.items())
    ]


class StepFollower:
    """The lead steps of a run that goes on: each `read` reads what has been added to each node's
    file.

    Of the first nodes all lines are decoded, of the others rank 0's alone.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._read: dict[str, tuple[int, int]] = {}  # node -> inode of its file, bytes read of it
        self._found: dict[tuple[int, int], _LeadLine] = {}

    def read(self, nodes: Iterable[str]) -> list[Step]:
        for index, node in enumerate(sorted(nodes)):
            path = self._folder.metrics(node)
            try:
                with open_regular(path) as file:
                    inode = os.fstat(file.fileno()).st_ino
                    before, done = self._read.get(node, (inode, 0))
                    done = (
                        done if before == inode else 0
                    )  # on Kubernetes it is replaced by what was heard last
                    file.seek(done)
                    chunk = file.read()
            except OSError:
                continue
            whole_lines = chunk[: chunk.rfind(b"\n") + 1]
            self._read[node] = inode, done + len(whole_lines)
            lines = [
                line
                for line in whole_lines.splitlines()
                if index < _READ_WHOLE or _RANK_0.search(line)
            ]
            for step in _decoded(_lead_line, lines):
                lead_line = self._found.get((step.epoch, step.step))
                if lead_line is None or step.rank < lead_line.rank:
                    self._found[step.epoch, step.step] = step
        return lead_steps(self._found.values())
