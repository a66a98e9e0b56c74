"""Computes the load of each expert over the steps of a run, from the reports of its workers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from orchestrator.plan import Plan
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.plan.expert_mesh import expert_mesh, fullest

from .timeline import StepLine

#: Layer -> (step, load) of the sampled steps, ascending.
Loads = dict[int, list[tuple[int, ExpertLoad]]]


def loads_of(lines: Iterable[StepLine]) -> Loads:
    """Collects the loads of every layer. Of a recomputed step, the last epoch's load counts."""
    loads_by_layer: dict[int, dict[int, ExpertLoad]] = {}
    for line in sorted(lines, key=lambda line: line.epoch):
        for layer, load in line.experts.items():
            loads_by_layer.setdefault(int(layer), {})[line.step] = load
    return {layer: sorted(steps.items()) for layer, steps in sorted(loads_by_layer.items())}


def rank_load(plan: Plan, loads: Loads) -> dict[str, float | None]:
    """The load of the fullest rank over the mean of the ranks that share experts, as planned and as
    measured. Empty if no ranks share experts.

    The measurement is the mean over layers, because each layer waits for its fullest rank, in the
    second half of the sampled steps. It covers whole steps: single micro-batches may be less even.
    """
    ranks = 1 if plan.program or plan.model.moe is None else expert_mesh(plan.parallel).ep
    if ranks == 1:
        return {}
    ratios = [
        statistics.fmean(load.rank_ratio(ranks) for _, load in steps[len(steps) // 2 :])
        for steps in loads.values()
    ]
    return {
        "planned": fullest(plan.parallel),
        "measured": statistics.fmean(ratios) if ratios else None,
    }


def load_spread(loads: Loads) -> float | None:
    """The standard deviation of experts' loads over their mean, over all layers, in the second half
    of the sampled steps."""
    counts = [
        load.tokens
        for steps in loads.values()
        for _, load in steps[len(steps) // 2 :]
        if sum(load.tokens)
    ]
    squares = [statistics.pvariance(tokens) / statistics.fmean(tokens) ** 2 for tokens in counts]
    return statistics.fmean(squares) ** 0.5 if squares else None


def summary(plan: Plan, loads: Loads) -> dict[str, Any]:
    """Summarises each layer for `report.json`: the balance of the first and the last sampled step,
    and medians over all of them."""
    if plan.model.moe is None:
        return {}
    top_k = plan.model.moe.top_k
    ranks = expert_mesh(plan.parallel).ep
    by_layer = {}
    for layer, steps in loads.items():
        layer_loads = [load for _, load in steps]
        last = layer_loads[-1]
        by_layer[str(layer)] = {
            "balance": {"first": layer_loads[0].balance(top_k), "last": last.balance(top_k)},
            "load_ratio": statistics.median(load.ratio for load in layer_loads),
            "rank_load_ratio": statistics.median(load.rank_ratio(ranks) for load in layer_loads),
            "router_entropy": statistics.median(load.entropy for load in layer_loads),
            "dropped": statistics.median(load.dropped for load in layer_loads),
            "bias": list(last.bias) if last.bias is not None else None,
        }
    return by_layer
