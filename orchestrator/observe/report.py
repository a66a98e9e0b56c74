"""Makes `report.json`, which compares a plan with the measurements of its run. It is written once,
when the run has ended."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.plan import Plan, load_plan
from orchestrator.plan.interval import interval, standard_score
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.registry import Discovery
from orchestrator.run.request import read_request
from orchestrator.run.state import RunState, write_state

from .expert_loads import loads_of, rank_load, summary
from .goodput.account import account
from .goodput.ledger import ledger
from .goodput.run_timeline import run_timeline
from .timeline import Event, StepLine, lead_steps, nodes_of, read_events, read_steps

SCHEMA = "orch.report/1"
_MOST_INTERVALS = 5000
_WARM_UP_STEPS = 2  # of each epoch: first-use costs are not the step time


class _StepLines(NamedTuple):
    """The step lines of a run, as its report counts them."""

    final: list[StepLine]  # of the last epoch that ran each step: a replayed step counts once
    lead: list[StepLine]  # those of the first rank, by step
    steady: list[StepLine]  # those without the warm-up of each epoch
    replayed: int  # executions of the first rank beyond one per step


def make_report(
    plan: Plan,
    state: RunState,
    lines: list[StepLine],
    events: Sequence[Event] = (),
    now: float | None = None,
) -> dict[str, Any]:
    """Puts the plan's predictions next to the measurements of a run. Seconds, bytes, ratios; None
    for what was not measured.

    `events`: those of the run. `now`: Unix seconds up to which a run that has not ended is counted.
    """
    step_lines = _count_lines(lines)
    loads = loads_of(step_lines.final)
    return {
        "schema": SCHEMA,
        "run_id": state.run_id,
        "plan_hash": plan.hash,
        **_outcome(state),
        **_goodput(state, lines, events, time.time() if now is None else now),
        **_progress(plan, step_lines),
        **_speed(plan, step_lines),
        "memory": _memory(plan, step_lines.final),
        **_communication(plan, step_lines),
        "experts": summary(plan, loads),
        "expert_rank_load": rank_load(plan, loads),
        "expert_bytes_per_step": _busiest(
            (line.rank, line.expert_bytes) for line in step_lines.final
        ),
        "expert_s_per_step": _medians([line.expert_s for line in step_lines.steady]),
        "warnings": plan.warnings,
    }


def _count_lines(lines: list[StepLine]) -> _StepLines:
    by_epoch = sorted(lines, key=lambda line: line.epoch)
    last_epoch_of = {line.step: line.epoch for line in by_epoch}
    final = [line for line in lines if last_epoch_of[line.step] == line.epoch]
    first_rank = min((line.rank for line in final), default=0)
    lead = [line for line in final if line.rank == first_rank]
    lead.sort(key=lambda line: line.step)
    executed = {(line.epoch, line.step) for line in lines if line.rank == first_rank}
    replayed = len(executed) - len({step for _, step in executed})
    return _StepLines(final, lead, _steady(lead), replayed)


def _outcome(state: RunState) -> dict[str, Any]:
    return {
        "state": state.state,
        "exit_code": state.exit_code,
        "reason": state.reason,
        "cause": msgspec.to_builtins(state.cause),
        "wall_s": _span(state.started_at, state.ended_at),
        "epochs": msgspec.to_builtins(state.epochs),
    }


def _goodput(
    state: RunState,
    lines: list[StepLine],
    events: Sequence[Event],
    now: float,
) -> dict[str, Any]:
    """Time by state, faults and samples. Times count from the submission; a run with many
    intervals does not list them."""
    steps = lead_steps(lines)
    spent = account(run_timeline(state, events, steps), now)
    samples = ledger(steps)
    created = state.created_at
    intervals = [
        [round(start - created, 3), round(end - created, 3), wall_state]
        for start, end, wall_state in spent.intervals
    ]
    listed = intervals if len(intervals) <= _MOST_INTERVALS else None
    return {
        "goodput": {
            "wall_s": spent.wall_s,
            "ettr": spent.ettr,
            "seconds": spent.seconds,
            "intervals": listed,
        },
        "faults": msgspec.to_builtins(spent.faults),
        "samples": {
            "consumed": samples.samples,
            "undone_steps": samples.undone,
            "problems": samples.problems if samples.samples else [],
        },
    }


def _progress(plan: Plan, step_lines: _StepLines) -> dict[str, Any]:
    losses = {line.step: line.loss for line in step_lines.final if line.loss is not None}
    return {
        "steps": {
            "planned": None if plan.program else plan.job.train.steps,
            "completed": max((line.step for line in step_lines.final), default=0),
            "replayed": step_lines.replayed,
            "tokens": sum(line.tokens for line in step_lines.lead),
        },
        "loss": {
            "first": losses.get(min(losses, default=0)),
            "last": losses.get(max(losses, default=0)),
        },
    }


def _speed(plan: Plan, step_lines: _StepLines) -> dict[str, Any]:
    """Rates of the steady steps. A user's program has no predictions."""
    predicted = None if plan.program else plan
    steady = step_lines.steady
    steps_s = [line.step_s for line in steady]
    step_s = statistics.median(steps_s) if steps_s else None
    tokens = statistics.median(line.tokens for line in steady) if steady else None
    world = plan.parallel.world_size
    return {
        "step_s": {
            "planned": predicted and predicted.time.step_s,
            "measured": step_s,
            **_against(plan.time.step_s, plan.time.sd, step_s),
            "p95": _quantile(steps_s, 0.95),
            "phases": _medians([line.phase_s for line in steady]),
        },
        "tokens_per_s_per_gpu": {
            "planned": predicted and predicted.tokens_per_s_per_gpu,
            "measured": tokens / step_s / world if tokens and step_s else None,
        },
        "bubble_ratio": {
            "planned": predicted and predicted.time.bubble_ratio,
            "measured": _median([line.bubble_ratio for line in step_lines.final]),
        },
        "mfu": {
            "planned": predicted and predicted.mfu,
            "measured": _median([line.mfu for line in steady]),
        },
        "hfu": {"measured": _median([line.hfu for line in steady])},
    }


def write_report(folder: RunFolder, plan: Plan, state: RunState) -> None:
    nodes = nodes_of(plan, state)
    report = make_report(
        plan,
        state,
        read_steps(folder, nodes),
        read_events(folder, nodes),
    )
    write_private(
        folder.report,
        msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n",
    )


def write_final_state(folder: RunFolder, state: RunState) -> None:
    """Writes the final state of a run that has no coordinator. The report comes first: whoever sees
    a final state expects to find it."""
    # Only the final state must be written here; metrics and report may fail.
    with contextlib.suppress(Exception):
        Discovery(folder, read_request(folder).discovery_dir).withdraw()
    with contextlib.suppress(Exception):
        write_report(folder, load_plan(folder.plan), state)
    write_state(folder, state)


def _steady(lead: list[StepLine]) -> list[StepLine]:
    """Leaves out the first steps of each epoch, unless no other steps remain."""
    first: dict[int, int] = {}
    for line in lead:
        first.setdefault(line.epoch, line.step)
    return [line for line in lead if line.step >= first[line.epoch] + _WARM_UP_STEPS] or lead


def _memory(plan: Plan, lines: list[StepLine]) -> dict[str, dict[str, Any]]:
    """Planned and measured bytes of the worst rank, by category.

    Workers measure the memory of tensors. The plan counts the device's own context among the
    buffers; here the context has its own row, without a measurement, and is not part of the total.
    """
    planned = {} if plan.program else _planned_tensors(plan)
    seen: dict[str, int] = {}
    for line in lines:
        for category, size in line.memory_bytes.items():
            seen[category] = max(seen.get(category, 0), size)
    rows: dict[str, dict[str, Any]] = {
        name: {"planned": planned.get(name), "measured": seen.get(name)}
        for name in {**planned, **seen}
    }
    if not plan.program:
        rows["total"] |= _against(
            planned["total"],
            plan.memory.sd,
            seen.get("total"),
        )
        context = plan.memory.total - planned["total"]
        if context:
            rows["device context"] = {"planned": context, "measured": None}
    return rows


def _planned_tensors(plan: Plan) -> dict[str, int]:
    """Planned bytes by category, without the device's context."""
    # Imported here because agents write reports and must start without the planner.
    from orchestrator.cost.memory.rank_memory import context_bytes

    names = ("params", "grads", "optimizer", "activations", "buffers", "total")
    planned = {name: getattr(plan.memory, name) for name in names}
    context = context_bytes(plan.memory, plan.cluster.device)
    planned["buffers"] -= context
    planned["total"] -= context
    return planned


def _against(planned: float, sd: float, measured: float | None) -> dict[str, Any]:
    """The 95 % interval of a prediction and the position of its measurement. Empty for a plan
    without intervals."""
    if sd <= 0:
        return {}
    low, high = interval(planned, sd)
    if measured is None:
        return {"low": low, "high": high, "inside": None, "z": None}
    return {
        "low": low,
        "high": high,
        "inside": low <= measured <= high,
        "z": standard_score(measured, planned, sd),
    }


def _communication(plan: Plan, step_lines: _StepLines) -> dict[str, Any]:
    """Bytes that the busiest rank sends in a step, and seconds of exposed communication, by
    axis."""
    planned = {
        axis: sum(placement.bytes_per_step_by_level.values())
        for axis, placement in plan.placement.items()
        if not plan.program
    }
    busiest = _busiest((line.rank, line.comm_bytes) for line in step_lines.final)
    axes = [*planned, *(axis for axis in busiest if axis not in planned)]
    return {
        "comm_bytes_per_step": {
            axis: {"planned": planned.get(axis), "measured": busiest.get(axis)} for axis in axes
        },
        "comm_s_per_step": {
            "planned": plan.time.exposed_comm_s,
            "measured": _medians([line.comm_s for line in step_lines.steady]),
        },
    }


def _busiest(sent: Iterable[tuple[int, dict[str, int]]]) -> dict[str, float]:
    """Reduces (rank, bytes by name) of each step to the largest median of any rank, by name."""
    sums: dict[tuple[int, str], list[int]] = {}
    for rank, sizes in sent:
        for name, size in sizes.items():
            sums.setdefault((rank, name), []).append(size)
    busiest: dict[str, float] = {}
    for (_, name), step_sizes in sums.items():
        busiest[name] = max(busiest.get(name, 0.0), statistics.median(step_sizes))
    return busiest


def _median(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return statistics.median(measured) if measured else None


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    return {
        name: statistics.median(row[name] for row in rows if name in row) for name in sorted(names)
    }


def _quantile(values: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed."""
    return sorted(values)[math.ceil(len(values) * share) - 1] if values else None


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)
