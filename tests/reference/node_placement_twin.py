"""Naive twin of `node_placement`: every ordered choice of nodes and every nesting order."""

from __future__ import annotations

from itertools import permutations

from orchestrator.cost.nesting import candidates, orders
from orchestrator.plan.ranks import degrees


def best_step(path_cache, parallel, traffic, work, places: int) -> tuple[bool, bool, float]:
    """(tp outside NVLink, ep outside NVLink, step seconds), the smallest of all."""
    total = path_cache.fabric.block.shape[1]
    best = (True, True, float("inf"))
    seen = set()
    for nodes in permutations(range(total), places):
        moved = path_cache.reordered(nodes)
        same: dict[tuple[int, int], int] = {}
        pattern = []
        for tier, blocks in enumerate(moved.fabric.block):
            for name in blocks.tolist():
                pattern.append(
                    (same.setdefault((tier, name), len(same)), int(moved.fabric.gpus[tier][name]))
                )
        if (key := tuple(pattern)) in seen:  # the same switches by other names
            continue
        seen.add(key)
        for order in orders(degrees(parallel)):
            found = candidates(moved, parallel, traffic, work, order)[0]
            best = min(best, (found.outside_nvlink("tp"), found.outside_nvlink("ep"), found.step_s))
    return best
