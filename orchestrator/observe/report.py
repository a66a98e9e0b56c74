"""`report.json`: what was planned against what was measured. Written once, when a run has ended."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from orchestrator.plan import Plan, load_plan
from orchestrator.plan.interval import interval, standard_score
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.registry import Discovery
from orchestrator.run.request import read_request
from orchestrator.run.state import RunState, write_state

from .expert_loads import loads_of, rank_load, summary
from .goodput.account import Account, account
from .goodput.ledger import ledger
from .goodput.run_timeline import run_timeline
from .timeline import Event, StepLine, lead_steps, nodes_of, read_events, read_steps

SCHEMA = "orch.report/1"
_MOST_INTERVALS = 5000
_WARM_UP_STEPS = 2  # of each epoch: first-use costs are not the step time


def make_report(
    plan: Plan,
    state: RunState,
    lines: list[StepLine],
    events: Sequence[Event] = (),
    now: float | None = None,
) -> dict[str, Any]:
    """Planned and measured side by side. Seconds, bytes, ratios; None where nothing was measured.

    `events`: the run's. `now`: Unix seconds, up to which the time of a run that goes on is counted.
    """
    steps = lead_steps(lines)
    spent = account(run_timeline(state, events, steps), time.time() if now is None else now)
    counted = ledger(steps)
    last_epoch_of = {line.step: line.epoch for line in sorted(lines, key=lambda line: line.epoch)}
    kept = [
        line for line in lines if last_epoch_of[line.step] == line.epoch
    ]  # a replayed step counts once
    first_rank = min((line.rank for line in kept), default=0)
    lead = sorted((line for line in kept if line.rank == first_rank), key=lambda line: line.step)
    steady = _steady(lead)
    steps_s = [line.step_s for line in steady]
    step_s = statistics.median(steps_s) if steps_s else None
    tokens = statistics.median(line.tokens for line in steady) if steady else None
    world = plan.parallel.world_size
    losses = {line.step: line.loss for line in kept if line.loss is not None}
    executed = {(line.epoch, line.step) for line in lines if line.rank == first_rank}
    known = None if plan.program else plan  # nothing of this is predicted of a user's program
    return {
        "schema": SCHEMA,
        "run_id": state.run_id,
        "plan_hash": plan.hash,
        "state": state.state,
        "exit_code": state.exit_code,
        "reason": state.reason,
        "cause": msgspec.to_builtins(state.cause),
        "wall_s": _span(state.started_at, state.ended_at),
        "epochs": msgspec.to_builtins(state.epochs),
        "goodput": _goodput(spent, state.created_at),
        "faults": msgspec.to_builtins(spent.faults),
        "samples": {
            "consumed": counted.samples,
            "undone_steps": counted.undone,
            "problems": counted.problems if counted.samples else [],
        },
        "steps": {
            "planned": known and known.job.train.steps,
            "completed": max((line.step for line in kept), default=0),
            "replayed": len(executed) - len({step for _, step in executed}),
            "tokens": sum(line.tokens for line in lead),
        },
        "loss": {
            "first": losses.get(min(losses, default=0)),
            "last": losses.get(max(losses, default=0)),
        },
        "step_s": {
            "planned": known and known.time.step_s,
            "measured": step_s,
            **_against(plan.time.step_s, plan.time.sd, step_s),
            "p95": _quantile(steps_s, 0.95),
            "phases": _medians([line.phase_s for line in steady]),
        },
        "tokens_per_s_per_gpu": {
            "planned": known and known.tokens_per_s_per_gpu,
            "measured": tokens / step_s / world if tokens and step_s else None,
        },
        "bubble_ratio": {
            "planned": known and known.time.bubble_ratio,
            "measured": _median([line.bubble_ratio for line in kept]),
        },
        "mfu": {"planned": known and known.mfu, "measured": _median([line.mfu for line in steady])},
        "hfu": {"measured": _median([line.hfu for line in steady])},
        "memory": _memory(plan, kept),
        "comm_bytes_per_step": _comm(plan, kept),
        "comm_s_per_step": {
            "planned": plan.time.exposed_comm_s,
            "measured": _medians([x.comm_s for x in steady]),
        },
        "experts": summary(plan, loads_of(kept)),
        "expert_rank_load": rank_load(plan, loads_of(kept)),
        "expert_bytes_per_step": _busiest((line.rank, line.expert_bytes) for line in kept),
        "expert_s_per_step": _medians([line.expert_s for line in steady]),
        "warnings": plan.warnings,
    }


def _goodput(spent: Account, created: float) -> dict[str, Any]:
    """Seconds since the submission; the intervals only of runs that have few."""
    intervals = [
        [round(x.start - created, 3), round(x.end - created, 3), x.state] for x in spent.intervals
    ]
    listed = intervals if len(intervals) <= _MOST_INTERVALS else None
    return {
        "wall_s": spent.wall_s,
        "ettr": spent.ettr,
        "seconds": spent.seconds,
        "intervals": listed,
    }


def write_report(folder: RunFolder, plan: Plan, state: RunState) -> None:
    nodes = nodes_of(plan, state)
    report = make_report(plan, state, read_steps(folder, nodes), read_events(folder, nodes))
    write_private(folder.report, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def write_final_state(folder: RunFolder, state: RunState) -> None:
    """Write a final state where no coordinator can. The report comes first, since a reader of the
    end looks for it."""
    with contextlib.suppress(
        Exception
    ):  # only the final state must be written here; metrics and report may fail
        Discovery(folder, read_request(folder).discovery_dir).withdraw()
    with contextlib.suppress(Exception):
        write_report(folder, load_plan(folder.plan), state)
    write_state(folder, state)


def _steady(lead: list[StepLine]) -> list[StepLine]:
    """Without the first steps of each epoch, as long as anything is left."""
    first: dict[int, int] = {}
    for line in lead:
        first.setdefault(line.epoch, line.step)
    return [line for line in lead if line.step >= first[line.epoch] + _WARM_UP_STEPS] or lead


def _memory(plan: Plan, lines: list[StepLine]) -> dict[str, dict[str, Any]]:
    """By category: the planned worst rank against the worst rank that was seen.

    Workers measure what tensors take. What the device's own software takes is planned among the
    buffers: here it has a row of its own, without a measurement, and is no part of the total.
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
        rows["total"] |= _against(planned["total"], plan.memory.sd, seen.get("total"))
        context = plan.memory.total - planned["total"]
        if context:
            rows["device context"] = {"planned": context, "measured": None}
    return rows


def _planned_tensors(plan: Plan) -> dict[str, int]:
    """Bytes by category, less the device's context."""
    from orchestrator.planner.memory.rank_memory import (
        context_bytes,
    )  # agents write reports and start without it

    names = ("params", "grads", "optimizer", "activations", "buffers", "total")
    planned = {name: getattr(plan.memory, name) for name in names}
    context = context_bytes(plan.memory, plan.cluster.device)
    planned["buffers"] -= context
    planned["total"] -= context
    return planned


def _against(planned: float, sd: float, measured: float | None) -> dict[str, Any]:
    """The 95 % interval of a prediction, and where its measurement lies; nothing of a plan without
    intervals."""
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


def _comm(plan: Plan, lines: list[StepLine]) -> dict[str, dict[str, float | None]]:
    """Bytes that the busiest rank sends in a step, by axis."""
    planned = {
        axis: sum(placement.bytes_per_step_by_level.values())
        for axis, placement in plan.placement.items()
        if not plan.program
    }
    busiest = _busiest((line.rank, line.comm_bytes) for line in lines)
    return {
        axis: {"planned": planned.get(axis), "measured": busiest.get(axis)}
        for axis in {**planned, **busiest}
    }


def _busiest(sent: Iterable[tuple[int, dict[str, int]]]) -> dict[str, float]:
    """(rank, bytes by name) of each step -> by name, the most of any rank's medians."""
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
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[math.ceil(len(values) * share) - 1] if values else None


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)
