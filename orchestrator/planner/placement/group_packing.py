"""Node orders that are worth costing.

Few nodes are tried in all orders up to symmetry. Many nodes are packed so that whole groups share a
switch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.cost.numpy_import import np
from orchestrator.cost.time.fabric import Fabric, Ints
from orchestrator.plan.document import Axis


def distinct_node_orders(fabric: Fabric, slots: int) -> Iterator[tuple[int, ...]]:
    """Yields every ordered choice of `slots` nodes, one per class of equivalent choices.

    Two nodes are equivalent if the paths above them differ only in unused switches of the same
    shape.
    """
    block = fabric.block
    total = fabric.block.shape[1]
    tiers = range(block.shape[0] - 1, -1, -1)
    shapes = _shapes(fabric)
    path = [[(tier, int(block[tier][node])) for tier in tiers] for node in range(total)]
    used: dict[tuple[int, int], int] = {}
    chosen: list[int] = []

    def key(node: int) -> tuple[object, ...]:
        """Returns the path above a node: used switches by name, unused ones by shape."""
        signature: list[tuple[int, int]] = []
        for position, switch in enumerate(path[node]):
            if not used.get(switch):
                return (
                    *signature,
                    *(shapes[unused_switch] for unused_switch in path[node][position:]),
                )
            signature.append(switch)
        return tuple(signature)

    def fill() -> Iterator[tuple[int, ...]]:
        """Yields the chosen nodes once all slots are filled, else fills the next one in every
        way."""
        if len(chosen) == slots:
            yield tuple(chosen)
            return
        node_by_key: dict[tuple[object, ...], int] = {}
        for node in range(total):
            if node not in chosen:
                node_by_key.setdefault(key(node), node)
        for node in node_by_key.values():
            chosen.append(node)
            for switch in path[node]:
                used[switch] = used.get(switch, 0) + 1
            yield from fill()
            for switch in path[node]:
                used[switch] -= 1
            chosen.pop()

    return fill()


def _shapes(fabric: Fabric) -> dict[tuple[int, int], int]:
    """Maps (tier, block) to a number that is equal for blocks of equal shape.

    The shape of a block is its size, its capacity and the shapes of the blocks below it. The
    numbers follow the order of the shapes, so they do not depend on names.
    """
    shapes: dict[tuple[int, int], int] = {}
    for tier, blocks in enumerate(fabric.block):
        names, sizes = np.unique(blocks, return_counts=True)
        below: dict[int, list[int]] = {int(name): [] for name in names}
        if tier:
            inner, first_nodes = np.unique(fabric.block[tier - 1], return_index=True)
            for child, node in zip(inner, first_nodes, strict=True):
                below[int(blocks[node])].append(shapes[tier - 1, int(child)])
        described = {
            int(name): (
                int(size),
                int(fabric.gpus[tier][name]),
                tuple(sorted(below[int(name)])),
            )
            for name, size in zip(names, sizes, strict=True)
        }
        rank = {shape: index for index, shape in enumerate(sorted(set(described.values())))}
        shapes.update({(tier, name): rank[shape] for name, shape in described.items()})
    return shapes


def packed_node_orders(
    fabric: Fabric,
    orders: Sequence[Sequence[Axis]],
    sizes: Mapping[str, int],
    slots: int,
) -> Iterator[tuple[int, ...]]:
    """Yields node orders that keep whole groups of every nesting order under one switch.

    A group is a run of consecutive slots: the inner axes of an order. Each switch gets as many
    whole groups as fit; the remaining nodes form groups one tier higher.
    """
    shapes = _shapes(fabric)
    seen: set[tuple[int, ...]] = set()
    for order in orders:
        groups = []
        reach = 1
        for axis in order:
            reach *= sizes[axis]
            count = reach // fabric.gpus_per_node
            if reach % fabric.gpus_per_node == 0 and 1 < count < slots and count not in groups:
                groups.append(count)
        for depth in range(len(groups) + 1):
            group_sizes = tuple(groups[:depth])
            if group_sizes not in seen:
                seen.add(group_sizes)
                yield _packed(fabric, shapes, group_sizes, slots)


def domain_node_orders(fabric: Fabric, group: int, slots: int) -> list[tuple[int, ...]]:
    """Returns node orders of a job that leaves nodes idle.

    Each NVLink domain contributes as many nodes as whole groups of some size fill. There is one
    order per size that is a multiple of `group` ranks and leaves `slots` nodes; the fullest domains
    come first. If no size does, the first `slots` nodes are returned.
    """
    domain_of_node = fabric.block[0]
    domains = [
        np.flatnonzero(domain_of_node == domain_of_node[first]).tolist()
        for first in np.sort(np.unique(domain_of_node, return_index=True)[1])
    ]
    largest = max(map(len, domains))
    step = math.lcm(group, fabric.gpus_per_node) // fabric.gpus_per_node
    distinct_orders: dict[tuple[int, ...], None] = {}
    for unit in range(step, largest + 1, step):
        filled_domains = sorted(
            (nodes[: len(nodes) // unit * unit] for nodes in domains),
            key=len,
            reverse=True,
        )
        chosen = [node for nodes in filled_domains for node in nodes][:slots]
        if len(chosen) == slots:
            distinct_orders[tuple(chosen)] = None
    return list(distinct_orders) or [tuple(range(slots))]


def _packed(
    fabric: Fabric,
    shapes: Mapping[tuple[int, int], int],
    groups: Sequence[int],
    slots: int,
) -> tuple[int, ...]:
    """Returns nodes in an order that keeps groups of all sizes in `groups` together.

    Each group is made of groups of the preceding size.
    """
    block = fabric.block
    total = block.shape[1]
    # In lexsort the last key is the most important one. Fuller switches come first, so that few are
    # used.
    keys: list[Ints] = [np.arange(total)]
    for tier in range(block.shape[0]):
        count = np.bincount(block[tier])[block[tier]]
        shape = np.array([shapes[tier, int(name)] for name in block[tier]])
        keys += [block[tier], shape, -count]
    order = np.lexsort(keys)
    runs: list[tuple[int, ...]] = [(int(node),) for node in order]
    for size in groups:
        runs = _joined(block, runs, size // len(runs[0]) if runs else 1)
    if len(runs) and len(runs[0]) * len(runs) < slots:  # remaining nodes that fill no group
        inside = {node for run in runs for node in run}
        runs += [(int(node),) for node in order if int(node) not in inside]
    chosen = _tightest(block, runs, slots)
    return tuple(chosen[:slots])


def _joined(
    block: Ints,
    runs: Sequence[tuple[int, ...]],
    width: int,
) -> list[tuple[int, ...]]:
    """Joins runs in sets of `width`: first inside a domain, then under a switch, tier by tier."""
    joined: list[tuple[int, ...]] = []
    rest = list(runs)
    for tier in range(block.shape[0]):
        by_block: dict[int, list[tuple[int, ...]]] = {}
        for run in rest:
            by_block.setdefault(int(block[tier][run[0]]), []).append(run)
        rest = []
        for members in by_block.values():
            joined_count = len(members) // width * width
            for start in range(0, joined_count, width):
                joined.append(tuple(node for run in members[start : start + width] for node in run))
            rest += members[joined_count:]
    first = {node: position for position, node in enumerate(n for run in runs for n in run)}
    return sorted(joined, key=lambda run: first[run[0]])


def _tightest(block: Ints, runs: Sequence[tuple[int, ...]], slots: int) -> list[int]:
    """Returns the nodes of the runs.

    If there are more than needed, only those under the smallest sufficient switch are returned.
    """
    node_count = sum(map(len, runs))
    if node_count > slots:
        for tier in range(block.shape[0]):
            runs_by_switch: dict[int, list[tuple[int, ...]]] = {}
            for run in runs:
                runs_by_switch.setdefault(int(block[tier][run[0]]), []).append(run)
            sufficient = [
                members for members in runs_by_switch.values() if sum(map(len, members)) >= slots
            ]
            if sufficient:
                runs = min(sufficient, key=lambda members: sum(map(len, members)))
                break
    return [node for run in runs for node in run]
