"""Which GPU of which node each rank has. Pure, and without numpy: pods and submitters need no more of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.plan.document import Cluster, Coord, Rank


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
