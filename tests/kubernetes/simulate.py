"""`python -m tests.kubernetes.simulate COUNT`, inside a bed: simulated nodes by the thousand, made in seconds."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from orchestrator.kubernetes.client import PATHS, Cluster

NODES_PER_LEAF, LEAVES_PER_SPINE = 4, 16
POOL = 24  # of the last nodes are a pool of their own: room for three runs of eight


def node(index: int, count: int) -> dict[str, Any]:
    leaf = index // NODES_PER_LEAF
    name = f"sim-{index}"
    amounts = {"cpu": "128", "memory": "2Ti", "ephemeral-storage": "4Ti", "pods": "110", "nvidia.com/gpu": "8"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": "amd64",
                "orch.test/kind": "simulated",
                "orch.test/pool": "small" if index >= count - POOL else "large",
                "orch.test/leaf": f"leaf-{leaf}",
                "orch.test/spine": f"spine-{leaf // LEAVES_PER_SPINE}",
                "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            },
        },
        "status": {"capacity": amounts, "allocatable": amounts},
    }


def main(count: int) -> None:
    assert PATHS["Node"]
    cluster = Cluster()
    cluster.version()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: cluster.create(node(index, count)), range(count)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
