"""Measures seconds per operation as a training step sees it: all ranks take part, the slowest one
counts."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from trainer.comm.collectives import (
    CommCounter,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    start_rotate,
)
from trainer.comm.control import WORLD, ControlPath
from trainer.precision import DTYPES

_BATCHES = 5
_BATCH_S = 0.08  # operations are repeated until a batch lasts about this long
_MOST_REPEATS = 200


def seconds(
    once: Callable[[], object] | None,
    device: torch.device,
    control: ControlPath = WORLD,
) -> float:
    """Median over batches of the slowest rank's time for one call. Collective; None: this rank only
    waits."""

    def batch(repeats: int) -> float:
        control.barrier()
        start = perf_counter()
        if once is not None:
            for _ in range(repeats):
                once()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return control.maximum(perf_counter() - start if once is not None else 0.0) / repeats

    batch(1)  # buffers, connections
    repeats = max(1, min(_MOST_REPEATS, round(_BATCH_S / max(batch(1), 1e-7))))
    return statistics.median(batch(repeats) for _ in range(_BATCHES))


def operation(
    name: str,
    size: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[[], Tensor | list]:
    """Returns a function that runs a collective of the trainer on `size` bytes (p2p: a message of
    `size` to the next rank)."""
    n = group.size()
    counter = CommCounter(gloo=device.type == "cpu")
    tensor = torch.zeros(max(size // 4 // n, 1) * n, device=device)
    if name == "all_reduce":
        return lambda: all_reduce(tensor, group, "dp", counter)
    if name == "all_gather":
        shard = tensor.chunk(n)[0].clone()
        return lambda: all_gather(shard, group, "dp", counter)
    if name == "reduce_scatter":
        return lambda: reduce_scatter(tensor, group, "dp", counter)
    if name == "all_to_all":
        return lambda: all_to_all(tensor, group, "ep", counter)
    ranks = dist.get_process_group_ranks(group)
    position = ranks.index(dist.get_rank())
    to = ranks[(position + 1) % n]
    source = ranks[position - 1]
    return lambda: start_rotate([tensor], to, source, group=group, axis="cp", counter=counter)()


def compute(precision: str, device: torch.device) -> dict[str, float]:
    """Measures one rank while all compute: FLOP/s of a matrix product and of attention, bytes/s of
    memory, seconds per call."""
    dtype = DTYPES[precision]
    small = device.type == "cpu"
    side = 512 if small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    matmul = 2 * side**3 / seconds(lambda: a @ b, device)
    heads, length, width = (8, 256, 32) if small else (32, 4096, 128)
    query = torch.randn(
        1,
        heads,
        length,
        width,
        device=device,
        dtype=dtype,
    )
    core = seconds(
        lambda: scaled_dot_product_attention(query, query, query, is_causal=True), device
    )
    numel = (4 << 20) if small else (256 << 20)
    augend, addend, out = (torch.zeros(numel, device=device, dtype=torch.float32) for _ in range(3))
    memory = 3 * augend.nbytes / seconds(lambda: torch.add(augend, addend, out=out), device)
    x = torch.zeros(4, 16, device=device)
    weight = torch.zeros(16, 16, device=device, requires_grad=True)
    return {
        "matmul_flops": matmul,
        "attention_flops": 2 * heads * length * length * width / core,  # causal: half of 4 s^2 d
        "memory_bytes_per_s": memory,
        "launch_s": seconds(lambda: linear(x, weight), device),
    }
