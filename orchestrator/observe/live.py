"""The current step and status of a run, from the ends of the files that its agents write."""

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
    memory_bytes: dict[str, int] = {}  # of the worker of this node that uses most
    seen_s: float | None = None  # seconds since its last report


class Live(Frozen):
    """Numbers of the last step that was reported; None or empty before the first."""

    step: int | None = None
    steps: int | None = None  # of the whole run
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    step_s: float | None = None  # median of the last steps, as mfu and hfu are
    phase_s: dict[str, float] = {}
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    left_s: float | None = None  # until the last step, at this speed
    saved: Saved | None = None  # last durable checkpoint
    doing: str | None = None  # before the first step: the last thing a worker said
    nodes: dict[str, NodeLive] = {}


def read_live(folder: RunFolder, state: RunState, now: float) -> Live:
    nodes = {
        node: [x for x in last_steps(folder.metrics(node)) if x.epoch == state.epoch]
        for node in state.nodes
    }
    events = [
        event
        for node in state.nodes
        for event in last_events(folder.events(node))
        if event.kind == "event"
    ]
    lines = [line for found in nodes.values() for line in found]
    world = state.summary.get("world_size")
    steps = state.summary.get("steps")
    last = max((line.step for line in lines), default=None)
    recent = {line.step: line for line in lines if line.rank == min(x.rank for x in lines)}
    window = [recent[step] for step in sorted(recent)[-_SMOOTH_STEPS:]]
    step_s = _median(window, "step_s")
    speed = window[-1].tokens / step_s if step_s else None
    say = [event for event in events if event.epoch == state.epoch]
    return Live(
        step=last,
        steps=steps if isinstance(steps, int) else None,
        loss=_last(lines, "loss"),
        grad_norm=_last(lines, "grad_norm"),
        lr=_last(lines, "lr"),
        step_s=step_s,
        phase_s=window[-1].phase_s if window else {},
        tokens_per_s=speed,
        tokens_per_s_per_gpu=speed / world if speed and isinstance(world, int) else None,
        mfu=_median(window, "mfu"),
        hfu=_median(window, "hfu"),
        left_s=step_s * max(0, steps - last)
        if step_s and last is not None and isinstance(steps, int)
        else None,
        saved=_saved(events, now),
        doing=_doing(max(say, key=lambda event: event.at)) if say and last is None else None,
        nodes={node: _node(found, now) for node, found in nodes.items()},
    )


def _median(window: list[StepLine], name: str) -> float | None:
    """Of the steps that tell it: one alone may be twice as fast, since a GPU's steps run ahead of
    those that wait."""
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
    return Saved(step=last.step, at=last.at, age_s=max(0.0, now - last.at)) if last else None


def _doing(event: Event) -> str:
    done = event.fields.get("done")
    total = event.fields.get("total")
    share = (
        f" {done / total:.0%}"
        if isinstance(done, int | float) and isinstance(total, int | float) and total
        else ""
    )
    phase = event.fields.get("phase")
    return event.name.replace("_", " ") + (f" ({phase}{share})" if phase or share else "")


def _node(lines: list[StepLine], now: float) -> NodeLive:
    memory: dict[str, int] = {}
    for line in {line.rank: line for line in lines if line.memory_bytes}.values():
        for category, size in line.memory_bytes.items():
            memory[category] = max(memory.get(category, 0), size)
    if not lines:
        return NodeLive()
    seen = max(line.at for line in lines)
    return NodeLive(
        step=max(line.step for line in lines), memory_bytes=memory, seen_s=max(0.0, now - seen)
    )
