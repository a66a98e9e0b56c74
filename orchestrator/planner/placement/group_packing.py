"""Orders of nodes worth costing: all up to symmetry when they are few, whole groups under switches when many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from orchestrator.plan.document import Axis
from orchestrator.planner.cost.fabric import Fabric


def symmetric(fabric: Fabric, places: int) -> Iterator[tuple[int, ...]]:
    """Every choice and order of `places` nodes, one for each class that swapping like nodes and switches joins.

    Two nodes are alike when the paths above them part only in switches that hold nobody yet and have the same shape.
    """
    block, total = fabric.block, fabric.block.shape[1]
    tiers = range(block.shape[0] - 1, -1, -1)
    shapes = _shapes(fabric)
    path = [[(tier, int(block[tier][node])) for tier in tiers] for node in range(total)]
    used: dict[tuple[int, int], int] = {}
    chosen: list[int] = []

    def key(node: int) -> tuple:
        """Where a node is, by name as far as switches are in use, by shape below."""
        result = []
        for position, at in enumerate(path[node]):
            if not used.get(at):
                return (*result, *(shapes[here] for here in path[node][position:]))
            result.append(at)
        return tuple(result)

    def fill() -> Iterator[tuple[int, ...]]:
        if len(chosen) == places:
            yield tuple(chosen)
            return
        alike: dict[tuple, int] = {}
        for node in range(total):
            if node not in chosen:
                alike.setdefault(key(node), node)
        for node in alike.values():
            chosen.append(node)
            for at in path[node]:
                used[at] = used.get(at, 0) + 1
            yield from fill()
            for at in path[node]:
                used[at] -= 1
            chosen.pop()

    return fill()


def _shapes(fabric: Fabric) -> dict[tuple[int, int], int]:
    """(tier, block) -> a number that is equal for blocks of equal form: size, capacity and what is below.

    Numbers follow the forms' own order, so they do not depend on names.
    """
    shapes: dict[tuple[int, int], int] = {}
    for tier, blocks in enumerate(fabric.block):
        names, sizes = np.unique(blocks, return_counts=True)
        below: dict[int, list[int]] = {int(name): [] for name in names}
        if tier:
            inner, where = np.unique(fabric.block[tier - 1], return_index=True)
            for child, node in zip(inner, where, strict=True):
                below[int(blocks[node])].append(shapes[tier - 1, int(child)])
        forms = {
            int(name): (int(size), int(fabric.gpus[tier][name]), tuple(sorted(below[int(name)])))
            for name, size in zip(names, sizes, strict=True)
        }
        rank = {form: index for index, form in enumerate(sorted(set(forms.values())))}
        shapes.update({(tier, name): rank[form] for name, form in forms.items()})
    return shapes


def packings(
    fabric: Fabric, orders: Sequence[Sequence[Axis]], sizes: Mapping[str, int], places: int
) -> Iterator[tuple[int, ...]]:
    """Seatings in which whole groups stand under whole switches, for the nesting of every order.

    A group is a run of consecutive places: the inner axes of an order. Each switch gives as many whole groups as it
    holds; what is left over in switches makes groups one tier further up.
    """
    shapes = _shapes(fabric)
    seen: set[tuple[int, ...]] = set()
    for order in orders:
        groups, reach = [], 1
        for axis in order:
            reach *= sizes[axis]
            count = reach // fabric.gpus_per_node
            if reach % fabric.gpus_per_node == 0 and 1 < count < places and count not in groups:
                groups.append(count)
        for depth in range(len(groups) + 1):
            wanted = tuple(groups[:depth])
            if wanted not in seen:
                seen.add(wanted)
                yield _packed(fabric, shapes, wanted, places)


def _packed(
    fabric: Fabric, shapes: Mapping[tuple[int, int], int], groups: Sequence[int], places: int
) -> tuple[int, ...]:
    """Runs of nodes: of the largest group size first, each made of runs of the next smaller one."""
    block = fabric.block
    total = block.shape[1]
    # outermost tier last in lexsort's keys = first in importance; fuller switches first, so that few are touched
    keys: list[np.ndarray] = [np.arange(total)]
    for tier in range(block.shape[0]):
        count = np.bincount(block[tier])[block[tier]]
        form = np.array([shapes[tier, int(name)] for name in block[tier]])
        keys += [block[tier], form, -count]
    order = np.lexsort(keys)
    runs = [(int(node),) for node in order]
    for size in groups:
        runs = _joined(block, runs, size // len(runs[0]) if runs else 1)
    if len(runs) and len(runs[0]) * len(runs) < places:  # leftovers that fill no group
        inside = {node for run in runs for node in run}
        runs += [(int(node),) for node in order if int(node) not in inside]
    chosen = _tightest(block, runs, places)
    return tuple(chosen[:places])


def _joined(block: np.ndarray, runs: Sequence[tuple[int, ...]], width: int) -> list[tuple[int, ...]]:
    """Runs of `width` runs each: first those of one domain, then of one switch, tier by tier."""
    result: list[tuple[int, ...]] = []
    rest = list(runs)
    for tier in range(block.shape[0]):
        waiting: dict[int, list[tuple[int, ...]]] = {}
        for run in rest:
            waiting.setdefault(int(block[tier][run[0]]), []).append(run)
        rest = []
        for members in waiting.values():
            whole = len(members) // width * width
            for start in range(0, whole, width):
                result.append(tuple(node for run in members[start : start + width] for node in run))
            rest += members[whole:]
    first = {node: place for place, node in enumerate(n for run in runs for n in run)}
    return sorted(result, key=lambda run: first[run[0]])


def _tightest(block: np.ndarray, runs: Sequence[tuple[int, ...]], places: int) -> list[int]:
    """Of more runs than needed those under the smallest switch that has enough, fullest switches first."""
    have = sum(map(len, runs))
    if have > places:
        for tier in range(block.shape[0]):
            under: dict[int, list[tuple[int, ...]]] = {}
            for run in runs:
                under.setdefault(int(block[tier][run[0]]), []).append(run)
            enough = [members for members in under.values() if sum(map(len, members)) >= places]
            if enough:
                runs = min(enough, key=lambda members: sum(map(len, members)))
                break
    return [node for run in runs for node in run]
