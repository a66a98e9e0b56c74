"""The largest model by technique: parameters whose states fit the GPUs, their hosts and their
disks.

`python -m benchmarks.largest_model` prints the table of docs/offload.md. States alone,
as in ZeRO's table 2 (arXiv 1910.02054): no activations, no context. Of the hosts, those that
predictions assume where none is described.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import structs

from orchestrator.cost.memory.rank_memory import param_state_bytes
from orchestrator.cost.time.offload import ASSUMED
from orchestrator.plan.document import Offload, Parallel, Train

GPU_BYTES = 80e9
GPUS_PER_NODE = 8
#: name -> (ZeRO stage, where the optimizer is)
TECHNIQUES: dict[str, tuple[Literal[0, 1, 2, 3], Literal["", "host", "disk"]]] = {
    "none": (0, ""),
    "zero1": (1, ""),
    "zero2": (2, ""),
    "zero3": (3, ""),
    "zero1, host": (1, "host"),
    "zero2, host": (2, "host"),
    "zero3, host": (3, "host"),
    "zero3, disk": (3, "disk"),
}


def largest(gpus: int, technique: str) -> float:
    """Parameters of the largest model in bf16 on `gpus` GPUs of 80 GB, without tensor or pipeline
    parallelism."""
    zero, place = TECHNIQUES[technique]
    train = structs.replace(_TRAIN, offload=Offload(optimizer=place))
    states = param_state_bytes(gpus, structs.replace(_PARALLEL, zero=zero, dp=gpus), train)
    ranks = min(gpus, GPUS_PER_NODE)
    most = [GPU_BYTES / states.on_device]
    most += [ASSUMED.memory_bytes / (ranks * states.host)] if states.host else []
    most += [ASSUMED.disk_bytes / (ranks * states.disk)] if states.disk else []
    return min(most)


_ONES: dict[str, Any] = {
    name: 1 for name in ("tp", "cp", "ep", "pp", "dp", "vpp", "world_size", "bucket_bytes")
}
_ONES |= {name: 1 for name in ("micro_batch_size", "micro_batches", "accumulation")}
_ONES |= {name: 1 for name in ("global_batch_samples", "global_batch_tokens")}
_PARALLEL = Parallel(**_ONES, zero=0, sp=False, order=[], schedule="1f1b", stage_layers=[1])
_TRAIN = Train(
    steps=1,
    seq_len=1,
    seed=0,
    precision="bf16",
    grad_dtype="bf16",
    recompute="none",
    clip_grad_norm=0.0,
    log_every_steps=1,
)
COUNTS = (1, 8, 64, 512)


def table() -> str:
    """Lines of a Markdown table, billions of parameters."""
    lines = [
        "| GPUs of 80 GB | " + " | ".join(TECHNIQUES) + " |",
        "|---" * (len(TECHNIQUES) + 1) + "|",
    ]
    for gpus in COUNTS:
        values = (largest(gpus, technique) / 1e9 for technique in TECHNIQUES)
        lines.append(f"| {gpus} | " + " | ".join(f"{value:,.1f}" for value in values) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
