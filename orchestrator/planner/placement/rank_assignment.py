"""The rank assignment of a plan, and the numbers that schedulers take from it.

Pure and without numpy, because pods and submitters import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from orchestrator.plan.document import Cluster, Coord, Plan, Rank


def assign_ranks(cluster: Cluster, all_coords: Sequence[Mapping[str, int]]) -> list[Rank]:
    """Returns the ranks with their node, GPU and the NIC that serves that GPU.

    `all_coords` holds the coordinates of each rank by axis.
    """
    gpus = cluster.gpus_per_node
    nics = cluster.nics_per_node
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
    """Returns the nodes that hold ranks, in the plan's node order."""
    busy = {rank.node for rank in plan.ranks}
    return [node for node in plan.cluster.node_names if node in busy]


def used_node_count(plan: Plan) -> int:
    """Returns the number of nodes that hold ranks."""
    return len(used_nodes(plan))


def leaf_switches(plan: Plan) -> int:
    """Returns the number of innermost switches above the nodes that hold ranks."""
    if not plan.cluster.levels:
        return 1
    index = {name: i for i, name in enumerate(plan.cluster.node_names)}
    used = {index[rank.node] for rank in plan.ranks}
    return sum(1 for switch in plan.cluster.levels[0].switches if used.intersection(switch))


def block_size(plan: Plan) -> int:
    """Returns the nodes of a block: an NVLink domain that spans nodes, else an innermost switch.

    The largest block counts, because a block that is partly in use looks smaller in the plan than
    to the scheduler.
    """
    domain = max(len(nodes) for nodes in plan.cluster.nvlink_domains)
    if domain > 1 or not plan.cluster.levels:
        return domain
    return max(len(nodes) for nodes in plan.cluster.levels[0].switches)


def whole_unit(plan: Plan, block: int) -> int:
    """Returns the nodes of the largest unit that fits a block of `block` nodes and divides the job.

    A unit spans the innermost k axes, whose ranks should stay together: the tensor-parallel group,
    then with its context, expert and pipeline neighbours, and so on. If the job uses equal parts of
    NVLink domains and leaves the rest of them idle (`plan.domains`), such a part is the unit.
    Slurm's --segment and Kueue's slices keep a unit inside one block.
    """
    nodes = used_node_count(plan)
    gpus = plan.cluster.gpus_per_node
    best = 1
    order = plan.parallel.order
    for count in range(1, len(order) + 1):
        ranks = prod(getattr(plan.parallel, axis) for axis in order[:count])
        size, rest = divmod(ranks, gpus)
        if not rest and size and size <= block and nodes % size == 0:
            best = size
    # Ranks fill the first nodes.
    busy = [sum(node < nodes for node in domain) for domain in plan.cluster.nvlink_domains]
    domain_part = max(busy)
    largest_domain = max(map(len, plan.cluster.nvlink_domains))
    equal = {*busy} <= {0, domain_part} and domain_part < largest_domain
    return domain_part if equal and domain_part <= block and domain_part % best == 0 else best


def save_seconds(plan: Plan, gb_per_s_per_node: float) -> float:
    """Returns an upper bound of the seconds of a save at a termination signal, for grace periods.

    The current step ends, and then each node writes the states of its ranks. Every rank is counted
    like the fullest one, and states that replicas share are counted on each.
    """
    ranks = min(plan.cluster.gpus_per_node, plan.parallel.world_size)
    stored = (plan.memory.params + plan.memory.optimizer) * ranks
    return plan.time.step_s + stored / (gb_per_s_per_node * 1e9)
