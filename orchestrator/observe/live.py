"""Reads the current step and status of a run from the ends of the files that its agents write."""

from __future__ import annotations

import statistics

from orchestrator.plan.document import Frozen
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import RunState

from .timeline import Event, StepLine, last_events, last_steps

_SMOOTH_STEPS = 10


class Saved(Frozen):
    step: int | None
    at: float
    age_s: float


class NodeLive(Frozen):
    step: int | None = None
    memory_bytes: dict[str, int] = {}  # the largest of this node's workers, by category
    seen_s: float | None = None  # seconds since its last report


class Live(Frozen):
    """Measurements of the last reported step; None or empty before the first step."""

    step: int | None = None
    steps: int | None = None  # of the whole run
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    step_s: float | None = None  # median of the last steps, like mfu and hfu
    phase_s: dict[str, float] = {}
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    left_s: float | None = None  # until the last step of the run, at this speed
    saved: Saved | None = None  # last durable checkpoint
    doing: str | None = None  # before the first step: the last event of a worker
    nodes: dict[str, NodeLive] = {}


def read_live(folder: RunFolder, state: RunState, now: float) -> Live:
    """Reads the measurements of the state's current epoch. `now`: Unix seconds."""
    lines_of = {
        node: [line for line in last_steps(folder.metrics(node)) if line.epoch == state.epoch]
        for node in state.nodes
    }
    events = [
        event
        for node in state.nodes
        for event in last_events(folder.events(node))
        if event.kind == "event"
    ]
    lines = [line for node_lines in lines_of.values() for line in node_lines]
    step = max((line.step for line in lines), default=None)
    window = _window(lines)
    step_s = _median(window, "step_s")
    phase_s = window[-1].phase_s if window else {}
    speed = window[-1].tokens / step_s if step_s else None
    gpu_speed = None
    if speed and (world := _count(state, "world_size")) is not None:
        gpu_speed = speed / world
    steps = _count(state, "steps")
    left_s = None
    if step_s and step is not None and steps is not None:
        left_s = step_s * max(0, steps - step)
    return Live(
        step=step,
        steps=steps,
        loss=_last(lines, "loss"),
        grad_norm=_last(lines, "grad_norm"),
        lr=_last(lines, "lr"),
        step_s=step_s,
        phase_s=phase_s,
        tokens_per_s=speed,
        tokens_per_s_per_gpu=gpu_speed,
        mfu=_median(window, "mfu"),
        hfu=_median(window, "hfu"),
        left_s=left_s,
        saved=_saved(events, now),
        doing=None if step is not None else _doing(events, state.epoch),
        nodes={node: _node(node_lines, now) for node, node_lines in lines_of.items()},
    )


def _count(state: RunState, name: str) -> int | None:
    count = state.summary.get(name)
    return count if isinstance(count, int) else None


def _window(lines: list[StepLine]) -> list[StepLine]:
    """The last steps of the lowest rank, in order."""
    first_rank = min((line.rank for line in lines), default=0)
    recent = {line.step: line for line in lines if line.rank == first_rank}
    return [recent[step] for step in sorted(recent)[-_SMOOTH_STEPS:]]


def _median(window: list[StepLine], name: str) -> float | None:
    """The median over the steps that report `name`. A single step may appear twice as fast: on a
    GPU, steps run ahead of those that wait."""
    values = [value for line in window if (value := getattr(line, name)) is not None]
    return statistics.median(values) if values else None


def _last(lines: list[StepLine], name: str) -> float | None:
    reported_lines = [line for line in lines if getattr(line, name) is not None]
    return (
        getattr(max(reported_lines, key=lambda line: line.step), name) if reported_lines else None
    )


def _saved(events: list[Event], now: float) -> Saved | None:
    saved = [event for event in events if event.name == "checkpoint_saved"]
    last = max(saved, key=lambda event: event.at, default=None)
    if last is None:
        return None
    return Saved(step=last.step, at=last.at, age_s=max(0.0, now - last.at))


def _doing(events: list[Event], epoch: int) -> str | None:
    """The newest event of the epoch in words, with its phase and progress."""
    epoch_events = [event for event in events if event.epoch == epoch]
    if not epoch_events:
        return None
    event = max(epoch_events, key=lambda event: event.at)
    done = event.fields.get("done")
    total = event.fields.get("total")
    share = ""
    if isinstance(done, int | float) and isinstance(total, int | float) and total:
        share = f" {done / total:.0%}"
    phase = event.fields.get("phase")
    detail = f" ({phase}{share})" if phase or share else ""
    return event.name.replace("_", " ") + detail


def _node(lines: list[StepLine], now: float) -> NodeLive:
    memory: dict[str, int] = {}
    for line in {line.rank: line for line in lines if line.memory_bytes}.values():
        for category, size in line.memory_bytes.items():
            memory[category] = max(memory.get(category, 0), size)
    if not lines:
        return NodeLive()
    seen = max(line.at for line in lines)
    return NodeLive(
        step=max(line.step for line in lines),
        memory_bytes=memory,
        seen_s=max(0.0, now - seen),
    )
