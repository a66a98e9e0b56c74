"""What an elastic run goes on with when its nodes change: which of the healthy ones, under which plan. Pure.

The sizes are those that `sizes.plan_sizes` found legal at submission, with a plan each: same global batch, same tensor
and context parallelism; other data parallelism, accumulation, shares of replicas, and for the fewest nodes another
pipeline depth. Order of choices, by the least change (reliability.md 4): a spare takes the seat of a lost node and
every other rank stays; else the largest size that the healthy nodes can hold, the rest of them being spares; below
the smallest, none. Which of two layouts a number of nodes gets was decided there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import structs

from orchestrator.plan import Plan
from orchestrator.plan.document import Cluster, SwitchLevel
from orchestrator.planner.placement.rank_assignment import used_nodes


def legal_size(sizes: Collection[int], nodes: int) -> int | None:
    """The largest of `sizes` that `nodes` nodes can hold."""
    return max((size for size in sizes if size <= nodes), default=None)


def next_plan(current: Plan, sizes: Mapping[int, Plan], healthy: Collection[str]) -> Plan | None:
    """The plan of the next epoch on some of the `healthy` nodes: `current` where nothing changes, None for no capacity.

    `sizes`: node count -> plan as submitted. `healthy` may hold nodes that no plan knows: spares. Every size has the
    tensor-parallel degree of the job, so no choice takes a tensor-parallel group across nodes that had not been.
    """
    from .replan import exchange, replan  # here, because agents ask this module for sizes without needing numpy

    size = legal_size(sizes, len(healthy))
    if size is None:
        return None
    held = used_nodes(current)
    kept = [node for node in held if node in healthy]
    whole = sizes[max(sizes)].cluster
    if size != len(held):
        return replan(sizes[size], within(whole, sorted_in(whole, _chosen(whole, kept, healthy, size))))
    if len(kept) == len(held):
        return current
    spares = sorted_in(whole, set(healthy) - set(kept))
    nodes = []
    for node in held:
        if node not in healthy:
            node = min(spares, key=lambda spare, lost=node: (_distance(whole, lost, spare), spares.index(spare)))
            spares.remove(node)
        nodes.append(node)
    return exchange(current, within(whole, nodes))


def larger_plan(current: Plan, sizes: Mapping[int, Plan], nodes: int) -> Plan | None:
    """What the run could grow to on `nodes` nodes, as it was submitted; None when no larger size is legal."""
    size = legal_size(sizes, nodes)
    return sizes[size] if size is not None and size > len(used_nodes(current)) else None


def pays(current: Plan, larger: Plan, *, stable_s: float, dwell_s: float, cost_s: float, horizon_s: float) -> bool:
    """Whether a healthy run should stop at a step boundary to go on larger.

    Hysteresis against nodes that come and go: the run has been as it is for `dwell_s`, and what the faster steps save
    in `horizon_s` (until the run's end or the next fault, whichever is expected first) is more than the `cost_s` of
    saving, stopping and starting again. Seconds.
    """
    saved = horizon_s * (1 - larger.time.step_s / current.time.step_s)
    return stable_s >= dwell_s and saved > cost_s


def horizon_s(left_s: float, watched_s: float, faults: int, stable_s: float) -> float:
    """Seconds until the run's end or the next fault, whichever is expected first: the usual time between faults, or,
    where nodes have held for longer than that, as long again.
    """
    return min(left_s, max(watched_s / faults, stable_s)) if faults else left_s


# ---------------------------------------------------------------------------------------------- nodes


def within(whole: Cluster, nodes: Sequence[str]) -> Cluster:
    """`whole` with exactly these nodes, in this order. Those that it does not know are under a switch of their own."""
    at = {node: index for index, node in enumerate(nodes)}
    old = {index: at[node] for index, node in enumerate(whole.node_names) if node in at}
    strange = [at[node] for node in nodes if node not in whole.node_names]

    def cut(blocks: Sequence[Sequence[int]]) -> list[list[int]]:
        found = [sorted(old[node] for node in block if node in old) for block in blocks]
        return [block for block in found if block]

    levels: list[SwitchLevel] = []
    for level in whole.levels:
        switches = cut(level.switches) + ([strange] if strange else [])
        levels.append(structs.replace(level, switches=sorted(switches)))
    levels[-1] = structs.replace(levels[-1], switches=[list(range(len(nodes)))])
    domains = sorted(cut(whole.nvlink_domains) + [[node] for node in strange])
    return structs.replace(whole, node_names=list(nodes), nvlink_domains=domains, levels=levels)


def sorted_in(whole: Cluster, nodes: Collection[str]) -> list[str]:
    """In the cluster's order, nodes that it does not know last and by name."""
    known = [node for node in whole.node_names if node in nodes]
    return known + sorted(set(nodes) - set(known))


def _chosen(whole: Cluster, kept: Sequence[str], healthy: Collection[str], size: int) -> list[str]:
    """`size` of the healthy nodes: those that hold ranks now first, and of equals those that lie closest together."""
    rest = sorted_in(whole, set(healthy) - set(kept))
    chosen = list(kept)
    while len(chosen) > size:  # park the one that is farthest from the others
        chosen.remove(max(reversed(chosen), key=lambda node: _apart(whole, node, chosen)))
    while len(chosen) < size:
        chosen.append(min(rest, key=lambda node: _apart(whole, node, chosen)))
        rest.remove(chosen[-1])
    return chosen


def _apart(whole: Cluster, node: str, others: Sequence[str]) -> int:
    return sum(_distance(whole, node, other) for other in others if other != node)


def _distance(whole: Cluster, a: str, b: str) -> int:
    """Height of the lowest tier on which two nodes meet: 0 is an NVLink domain. A stranger is farther than all."""
    tiers = [whole.nvlink_domains, *(level.switches for level in whole.levels)]
    index = {node: i for i, node in enumerate(whole.node_names)}
    if a in index and b in index:
        for height, blocks in enumerate(tiers):
            if any(index[a] in block and index[b] in block for block in blocks):
                return height
    return len(tiers)
