"""Which GPU of which node each rank has. Pure, and without numpy: pods and submitters need no more of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from orchestrator.plan.document import Cluster, Coord, Plan, Rank


def seat_ranks(cluster: Cluster, all_coords: Sequence[Mapping[str, int]]) -> list[Rank]:
    """Ranks with their node, GPU and the NIC that serves that GPU."""
    gpus, nics = cluster.gpus_per_node, cluster.nics_per_node
    return [
        Rank(
            rank=rank,
            node=cluster.node_names[rank // gpus],
            gpu=rank % gpus,
            nic=rank % gpus * nics // gpus,
            coord=Coord(**coord),
        )
        for rank, coord in enumerate(all_coords)
    ]


def used_nodes(plan: Plan) -> list[str]:
    """Nodes that hold ranks, in the plan's node order."""
    busy = {rank.node for rank in plan.ranks}
    return [node for node in plan.cluster.node_names if node in busy]


def used_node_count(plan: Plan) -> int:
    return len(used_nodes(plan))


def leaf_switches(plan: Plan) -> int:
    """How many switches of the innermost level the plan's nodes stand under."""
    if not plan.cluster.levels:
        return 1
    index = {name: i for i, name in enumerate(plan.cluster.node_names)}
    used = {index[rank.node] for rank in plan.ranks}
    return sum(1 for switch in plan.cluster.levels[0].switches if used.intersection(switch))


def block_size(plan: Plan) -> int:
    """Nodes of one block: the NVLink domain where it spans nodes, else the innermost switch.

    The largest counts: where some nodes of a block were taken, the plan shows it smaller than the scheduler does.
    """
    domain = max(len(nodes) for nodes in plan.cluster.nvlink_domains)
    if domain > 1 or not plan.cluster.levels:
        return domain
    return max(len(nodes) for nodes in plan.cluster.levels[0].switches)


def whole_unit(plan: Plan, block: int) -> int:
    """Nodes of the largest part of the job that fits into a block and that the job is a multiple of.

    Axes nest innermost first, so the first k of them make parts that should stay together: the tensor-parallel group,
    then with its context, expert and pipeline neighbours, and so on. Slurm's --segment and Kueue's slices keep such a
    part inside one block.
    """
    nodes, gpus, best = used_node_count(plan), plan.cluster.gpus_per_node, 1
    order = plan.parallel.order
    for count in range(1, len(order) + 1):
        ranks = prod(getattr(plan.parallel, axis) for axis in order[:count])
        size, rest = divmod(ranks, gpus)
        if not rest and size and size <= block and nodes % size == 0:
            best = size
    return best


def save_seconds(plan: Plan, gb_per_s_per_node: float) -> float:
    """First-order time of a save after a notice: the step under way ends, then each node writes its ranks' states.

    Parameters and optimizer states of the worst rank stand for all ranks; what data-parallel replicas share is written
    once, so this is an upper bound.
    """
    ranks = min(plan.cluster.gpus_per_node, plan.parallel.world_size)
    stored = (plan.memory.params + plan.memory.optimizer) * ranks
    return plan.time.step_s + stored / (gb_per_s_per_node * 1e9)
