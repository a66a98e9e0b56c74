"""Load by expert over the steps of a run, from what its workers have reported."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from orchestrator.plan import Plan
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.plan.expert_mesh import expert_mesh

from .timeline import StepLine

#: Layer -> (step, load) of the sampled steps, ascending.
Loads = dict[int, list[tuple[int, ExpertLoad]]]


def loads_of(lines: Iterable[StepLine]) -> Loads:
    """A step that was run twice counts as its last epoch had it."""
    found: dict[int, dict[int, ExpertLoad]] = {}
    for line in sorted(lines, key=lambda line: line.epoch):
        for layer, load in line.experts.items():
            found.setdefault(int(layer), {})[line.step] = load
    return {layer: sorted(steps.items()) for layer, steps in sorted(found.items())}


def summary(plan: Plan, loads: Loads) -> dict[str, Any]:
    """By layer, as `report.json` has it: balance at first and last, and medians of the sampled steps."""
    if plan.model.moe is None:
        return {}
    top_k, ranks, found = plan.model.moe.top_k, expert_mesh(plan.parallel).ep, {}
    for layer, steps in loads.items():
        every = [load for _, load in steps]
        last = every[-1]
        found[str(layer)] = {
            "balance": {"first": every[0].balance(top_k), "last": last.balance(top_k)},
            "load_ratio": statistics.median(load.ratio for load in every),
            "rank_load_ratio": statistics.median(load.rank_ratio(ranks) for load in every),
            "router_entropy": statistics.median(load.entropy for load in every),
            "dropped": statistics.median(load.dropped for load in every),
            "bias": list(last.bias) if last.bias is not None else None,
        }
    return found
