"""Parts of a job that should stay together, counted in nodes: what schedulers are asked for. Pure."""

from __future__ import annotations

from math import prod

from orchestrator.plan.document import Plan


def used_node_count(plan: Plan) -> int:
    return len({rank.node for rank in plan.ranks})


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
