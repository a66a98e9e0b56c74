"""Settings that CUDA, its libraries and torch read from the environment or a global switch, and
only before they start.

A variable that the user has set stays unchanged.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

from orchestrator.plan import Plan

#: Hardware queues of a device. With fewer queues than streams, work of one stream waits for
#: another's.
MANY_QUEUES = 32


def settings(plan: Plan) -> dict[str, str]:
    """Returns the environment variables of a worker of `plan`. Pure.

    PYTORCH_CUDA_ALLOC_CONF      Segments grow: a step's blocks of many sizes leave no holes that no
                                 block fits.
    CUDA_DEVICE_MAX_CONNECTIONS  1 if the only communication during computation is that of tensor
                                 parallelism and of gradient buckets: kernels then begin in the
                                 order in which the host enqueues them, a collective before the
                                 product that covers it (as in Megatron-LM). Otherwise many: a
                                 stream that waits for another rank would hold up all others.
    CUBLAS_WORKSPACE_CONFIG      For a deterministic run: one cuBLAS workspace per stream.
    NCCL_ALGO                    For a deterministic run: sums in rings and trees, whose order is
                                 fixed, but not in switches.
    """
    if plan.cluster.device == "cpu":
        return {}
    par = plan.parallel
    # ZeRO-3 gathers weights, and hybrid sharding sums replicas, on streams of their own.
    replicas = par.dp * par.cp * par.ep
    one_stream = par.zero < 3 and par.zero_group in (0, replicas)
    in_order = par.tp > 1 and par.pp == par.cp == par.ep == 1 and one_stream
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1" if in_order else str(MANY_QUEUES)
    if plan.job.train.deterministic is True:
        variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "^NVLS,NVLSTree"}
    return variables


def apply_settings(plan: Plan, environ: MutableMapping[str, str] = os.environ) -> None:
    """Applies the settings. Call it before the first use of a device in this process."""
    for name, value in settings(plan).items():
        environ.setdefault(name, value)
    if plan.job.train.deterministic is True:
        torch.use_deterministic_algorithms(True)
        # All memory is written before it is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
