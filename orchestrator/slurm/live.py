"""Which of Slurm's nodes a plan can use. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from .nodes import Node


def uniform(nodes: Sequence[Node], gpus_per_node: int, gpu_type: str = "") -> list[Node]:
    """The nodes that have at least the GPUs that a plan's node has (of that type, where both say one)."""
    return [
        node
        for node in nodes
        if node.gpus >= gpus_per_node
        and (not gpu_type or not node.gpu_type or node.gpu_type.lower() == gpu_type.lower())
    ]
