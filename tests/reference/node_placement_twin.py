"""Naive twin of `node_placement`: every ordered choice of nodes and every nesting order."""

from __future__ import annotations

from itertools import permutations

from orchestrator.cost.nesting import candidates, orders
from orchestrator.plan.ranks import degrees


def best_step(path_cache, parallel, traffic, work, slots: int) -> tuple[bool, bool, float]:
    """(tp outside NVLink, ep outside NVLink, step seconds), the smallest of all."""
    total = path_cache.fabric.block.shape[1]
    best = (True, True, float("inf"))
    seen = set()
    for nodes in permutations(range(total), slots):
        moved = path_cache.reordered(nodes)
        switch_numbers: dict[tuple[int, int], int] = {}
        pattern = []
        for tier, blocks in enumerate(moved.fabric.block):
            for name in blocks.tolist():
                pattern.append(
                    (
                        switch_numbers.setdefault((tier, name), len(switch_numbers)),
                        int(moved.fabric.gpus[tier][name]),
                    )
                )
        if (key := tuple(pattern)) in seen:  # the same switches by other names
            continue
        seen.add(key)
        for order in orders(degrees(parallel)):
            placement = candidates(moved, parallel, traffic, work, order)[0]
            best = min(
                best,
                (placement.outside_nvlink("tp"), placement.outside_nvlink("ep"), placement.step_s),
            )
    return best
