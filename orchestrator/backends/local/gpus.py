"""The GPUs of this machine, and the division of them among simulated nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.run.request import LaunchRequest

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_here() -> int:
    """The number of NVIDIA GPUs of this machine, by the driver's device files."""
    return sum(1 for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit())


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Numbers or UUIDs of the GPUs that a program with these variables sees.

    The list ends at the first entry that is not a GPU, as CUDA reads it.
    """
    count = gpus_here()
    if _VISIBLE not in environ:
        return [str(index) for index in range(count)]
    gpus: list[str] = []
    for gpu in map(str.strip, environ[_VISIBLE].split(",") if count else []):
        if not (gpu.startswith(("GPU-", "MIG-")) or (gpu.isdecimal() and int(gpu) < count)):
            break
        gpus.append(gpu)
    return gpus


def check_gpus(request: LaunchRequest, spare_nodes: int) -> None:
    """Refuses (OrchError 65) simulated nodes of a program that would share GPUs.

    They would, because each node numbers its workers from 0.
    """
    gpus = visible_gpus(os.environ | request.environment.values)
    nodes = _largest_node_count(request) + spare_nodes
    if (
        not gpus
        or nodes == 1
        or not _may_share_gpus(request)
        or nodes * request.gpus_per_node <= len(gpus)
    ):
        return
    raise OrchError(
        f"{nodes} simulated nodes of {request.gpus_per_node} workers on {len(gpus)} GPUs would put"
        " two workers on one GPU: one node (cluster=local), fewer workers, or"
        f" {_VISIBLE}= for a program that uses no GPU",
        Exit.CONFIG,
    )


def gpus_of_node(
    node: str,
    request: LaunchRequest,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """The variable that gives a simulated node (`node-3`, `spare-0`) GPUs of its own.

    Returns {} where there is only one node, or no GPU.
    """
    gpus = visible_gpus(environ)
    nodes = _largest_node_count(request)
    name, _, number = node.rpartition("-")
    if (
        not gpus
        or not number.isdecimal()
        or not _may_share_gpus(request)
        or (nodes == 1 and name != "spare")
    ):
        return {}
    first = (int(number) + (nodes if name == "spare" else 0)) * request.gpus_per_node
    return {_VISIBLE: ",".join(gpus[first : first + request.gpus_per_node])}


def _largest_node_count(request: LaunchRequest) -> int:
    return max([request.nodes, *request.sizes])


def _may_share_gpus(request: LaunchRequest) -> bool:
    """Whether simulated nodes run a program that may use GPUs; the bundled trainer does not."""
    return request.device == "cpu" and not request.worker.bundled
