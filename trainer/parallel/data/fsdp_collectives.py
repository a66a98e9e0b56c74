"""Our collectives behind the interface that torch's FSDP2 calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, reduce_scatter, start_all_gather


class _Communication:
    """The base of the custom collectives that FSDP2 calls, which also asks them for buffers."""

    def __init__(self, counter: CommCounter):
        self.counter = counter

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class FsdpAllGather(_Communication):
    """An all-gather of the shards of a unit."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        handle = start_all_gather(
            input_tensor,
            group,
            "dp",
            self.counter,
            out=output_tensor,
        )
        if async_op:
            return handle.work
        handle.wait()
        return None


class FsdpReduceScatter(_Communication):
    """A reduce-scatter of the gradients of a unit."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """`op` is SUM. Synchronous: on CUDA it runs in FSDP2's own stream, concurrently with
        backward."""
        reduce_scatter(input_tensor, group, "dp", self.counter, out=output_tensor)
