"""How long a save takes after a notice: what grace periods are sized by. Pure."""

from __future__ import annotations

from orchestrator.plan.document import Plan


def save_seconds(plan: Plan, gb_per_s_per_node: float) -> float:
    """First-order time of a save after a notice: the step under way ends, then each node writes its ranks' states.

    Parameters and optimizer states of the worst rank stand for all ranks; what data-parallel replicas share is written
    once, so this is an upper bound.
    """
    ranks = min(plan.cluster.gpus_per_node, plan.parallel.world_size)
    stored = (plan.memory.params + plan.memory.optimizer) * ranks
    return plan.time.step_s + stored / (gb_per_s_per_node * 1e9)
