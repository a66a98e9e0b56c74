"""The global gradient norm over every axis, and clipping by it (Pascanu et al., arXiv
1211.5063)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainer.comm.collectives import all_reduce
from trainer.compat import foreach_norms
from trainer.parallel.data.buckets import Sharding

#: Elements summed in fp32 at a time. One fp32 sum over 40 million squares is 0.3 % wrong on a CPU;
#: rows of this length, added in fp64, are exact to 3e-7 at the same speed.
ROW = 512
#: A tensor with fewer elements is copied beside others, up to so many: 291 kernels take longer than
#: the copy.
SMALL = 1 << 15
TOGETHER = 1 << 20


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of squares of 1-D tensors of one dtype and device, as a 0-d float64 tensor on the
    device."""
    dtype = _at_least_fp32(tensors[0].dtype)
    if tensors[0].is_cuda:  # its kernel adds no more than 128 squares in a row, in fp32
        norms = foreach_norms(list(tensors), dtype)
        return torch.stack(norms).double().square().sum()
    blocks = [block for flat in _together(tensors) for block in _rows(flat)]
    norms = [torch.linalg.vector_norm(block, dim=1, dtype=dtype).double() for block in blocks]
    return (
        torch.cat(norms).square().sum()
        if norms
        else torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    )


def _rows(flat: Tensor) -> list[Tensor]:
    """A 1-D tensor as rows of `ROW`, and the rest."""
    rows = flat.numel() // ROW * ROW
    blocks = [flat[:rows].view(-1, ROW)] if rows else []
    return blocks if rows == flat.numel() else [*blocks, flat[rows:].view(1, -1)]


def _together(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same elements in fewer tensors: small ones are joined."""
    joined = list[Tensor]()
    size = 0
    for tensor in tensors:
        if tensor.numel() >= SMALL:
            yield tensor
            continue
        joined.append(tensor)
        size += tensor.numel()
        if size >= TOGETHER:
            yield torch.cat(joined)
            joined = []
            size = 0
    if joined:
        yield joined[0] if len(joined) == 1 else torch.cat(joined)


def grad_norm(buckets: Sharding, device: torch.device) -> Tensor:
    """The 2-norm of the whole model's gradient after `finish`: 0-d float64 on `device`, the same on
    every rank, also on one without parameters (a middle stage without layers).

    Each element counts once: a bucket replicated over tp on its owner only, tied copies on the
    first stage only. Sums over the shards of data-parallel ranks (ZeRO) and over the model's ranks
    (tp, pp), for each class of parameters over its own. Does not synchronise the host.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups in buckets.classes:
        owned = [
            bucket.grad_shard
            for bucket in buckets.buckets
            if bucket.owner and bucket.kind.groups == groups
        ]
        squares = squared_norm(owned).to(device) if owned else torch.zeros_like(total)
        if buckets.zero:
            all_reduce(squares, buckets.mesh.group(groups.shard), "norm", buckets.counter)
        total += all_reduce(squares, buckets.mesh.group(groups.model), "norm", buckets.counter)
    return total.sqrt_()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor that limits the gradients' norm to `max_norm` (0 = no clipping), finite whatever
    the norm is: padding is multiplied by it too, and no later gradient overwrites that.

    The 1e-6 is that of `torch.nn.utils.clip_grad_norm_`, so that torch in one process gives the
    same weights.
    """
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).nan_to_num(1.0).clamp(max=1.0)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
