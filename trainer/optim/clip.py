"""The global gradient norm over every axis, and clipping by it (Pascanu et al., arXiv
1211.5063)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainer.comm.collectives import all_reduce
from trainer.compat import foreach_norms
from trainer.parallel.data.buckets import Sharding

#: Elements per fp32 sum. One fp32 sum over 40 million squares is 0.3 % wrong on a CPU; rows of this
#: length, added in fp64, are exact to 3e-7 at the same speed.
ROW = 512
#: Tensors with fewer elements than SMALL are copied into one of about TOGETHER elements: for 291
#: tensors the kernels of each would take longer than the copy.
SMALL = 1 << 15
TOGETHER = 1 << 20


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of squares of 1-D tensors of one dtype and device, 0-d float64 on the
    device."""
    dtype = _at_least_fp32(tensors[0].dtype)
    if tensors[0].is_cuda:  # the kernel adds at most 128 squares in a row in fp32
        norms = foreach_norms(list(tensors), dtype)
        return torch.stack(norms).double().square().sum()
    blocks = [block for flat in _together(tensors) for block in _rows(flat)]
    norms = [torch.linalg.vector_norm(block, dim=1, dtype=dtype).double() for block in blocks]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    return torch.cat(norms).square().sum()


def _rows(flat: Tensor) -> list[Tensor]:
    """Views a 1-D tensor as rows of `ROW` elements and one row of the rest."""
    rows = flat.numel() // ROW * ROW
    blocks = [flat[:rows].view(-1, ROW)] if rows else []
    return blocks if rows == flat.numel() else [*blocks, flat[rows:].view(1, -1)]


def _together(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the same elements in fewer tensors: small ones are joined."""
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
    """Returns the 2-norm of the whole model's gradient after `finish`: 0-d float64 on `device`,
    equal on every rank, including one without parameters (a middle stage without layers).

    Each element counts once: a bucket that is replicated over tp on its owner only, tied copies on
    the first stage only. The squares are summed over the shards of data-parallel ranks (ZeRO) and
    over the model's ranks (tp, pp), for each class of parameters over the class's own groups. The
    host does not wait.
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
            all_reduce(
                squares,
                buckets.mesh.group(groups.shard),
                "norm",
                buckets.counter,
            )
        total += all_reduce(
            squares,
            buckets.mesh.group(groups.model),
            "norm",
            buckets.counter,
        )
    return total.sqrt_()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor that limits the gradients' norm to `max_norm` (0 = no clipping). It is
    finite for any norm, since it also multiplies padding, which no later gradient overwrites.

    The 1e-6 is that of `torch.nn.utils.clip_grad_norm_`, so that torch in one process gives the
    same weights.
    """
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / (norm + 1e-6)).nan_to_num(1.0).clamp(max=1.0)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
