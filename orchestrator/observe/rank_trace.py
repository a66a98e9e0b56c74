"""Reads the timeline that a rank recorded of its first steps (`metrics.trace_steps`): memory over
time, and pipeline actions.

The file is Chrome's trace format, written by `trainer.metrics.trace`; Perfetto shows all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from orchestrator.errors import OrchError
from orchestrator.observe.pages.plan_page import CATEGORIES
from orchestrator.plan import Exit

ACTIONS = 0
STEPS = 2  # rows of the file


class Span(NamedTuple):
    name: str
    start: float  # seconds since the first recorded step began
    end: float


class Held(NamedTuple):
    """Memory in use from `at` (seconds) until the next sample."""

    at: float
    bytes: dict[str, int]  # by category


class Timeline(NamedTuple):
    rank: int
    memory: list[Held]
    actions: list[Span]  # of the pipeline: F, B, I, W
    steps: list[Span]

    def peak(self, step: Span) -> dict[str, int]:
        """Bytes by category at the moment of the step's largest total."""
        inside = [held.bytes for held in self.memory if step.start <= held.at <= step.end]
        return max(
            inside,
            key=lambda by_category: sum(by_category.values()),
            default={},
        )


class _Event(msgspec.Struct):
    ph: str
    name: str
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")
    about: dict[str, Any] = msgspec.field(name="otherData", default={})


def read_timeline(path: Path, rank: int) -> Timeline:
    """Reads a rank's timeline. Raises OrchError (64) if there is none, (65) if it cannot be
    read."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        raise OrchError(
            f"rank {rank} recorded no timeline: submit the run with, for example,"
            " metrics.trace_steps=2",
            Exit.USAGE,
        ) from None
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        raise OrchError(f"{path}: {error}", Exit.CONFIG) from None
    held = [event for event in file.events if event.ph == "C" and event.name == "memory"]
    memory = [
        Held(
            counter.ts / 1e6,
            {name: int(counter.args.get(name, 0)) for name in CATEGORIES},
        )
        for counter in held
    ]

    def spans(row: int) -> list[Span]:
        slices = [event for event in file.events if event.ph == "X" and event.tid == row]
        return [
            Span(
                event.name,
                event.ts / 1e6,
                (event.ts + event.dur) / 1e6,
            )
            for event in slices
        ]

    return Timeline(rank, memory, spans(ACTIONS), spans(STEPS))


def recorded_ranks(folder: Path) -> list[int]:
    """The ranks that have a timeline in a run's folder of traces."""
    names = (path.stem.removeprefix("rank-") for path in folder.glob("rank-*.json"))
    return sorted(int(name) for name in names if name.isdigit())
