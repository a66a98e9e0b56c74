"""One bucket of flat parameters and gradients, and this rank's shard of both."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.comm.collectives import Handle
from trainer.host.memory import HostMemory
from trainer.parallel.data.layout import Bucket
from trainer.parallel.params import DENSE, GradGroups, ParamInfo


class Kind(NamedTuple):
    """What all parameters of a bucket have in common."""

    dtype: torch.dtype
    decay: bool
    replicated: bool  # over tp: only the owner counts it in norms and writes it
    sums: tuple[str, ...]  # groups over which the gradient is summed after the data-parallel one
    groups: GradGroups = DENSE  # its class: the data-parallel groups
    whole: bool = False  # each parameter lies in one shard
    narrow: bool = False  # as `ParamInfo.narrow`


class FlatBucket:
    """The buffers of one bucket, and this rank's shard of each as a view."""

    def __init__(self, layout: Bucket, params: list[Parameter], infos: list[ParamInfo], shards: int, shard_index: int,
                 reduce_dtype: torch.dtype, allocate_grads: bool, host: HostMemory | None = None):  # fmt: skip
        device = params[0].device
        self.shards = shards
        self.shard_index = shard_index
        self.layout = layout
        self.infos = infos
        self.range = layout.shard(shard_index, shards)
        self.kind = cast(Kind, layout.key)
        self.owner = infos[0].owner
        self._new = partial(torch.zeros, device=device) if host is None else host.device_zeros
        self.params = self._new(layout.numel, dtype=self.kind.dtype)
        self.reduce_dtype = reduce_dtype
        self.shapes = [param.shape for param in params]
        self.members = params
        self.direct = (
            reduce_dtype == self.kind.dtype
        )  # autograd itself can add to the gradient buffer
        for slot, param in zip(layout.slots, params, strict=True):
            view = self.params[slot.start : slot.stop].view(param.shape)
            view.copy_(param.detach())
            param.data = view
        self.param_shard = self.params[slice(*self.range)]
        self.grads: Tensor | None = None
        self.grad_views: list[Tensor] = []
        taking = host if host is not None and host.takes_gradients else None
        if allocate_grads:
            self.open()
            self.grad_shard = self.whole_grads[slice(*self.range)]
        elif taking is not None:
            self.grad_shard = taking.zeros(self.param_shard.numel(), reduce_dtype)
        else:
            self.grad_shard = self._new(self.param_shard.numel(), dtype=reduce_dtype)
        self.host_grad: Tensor | None = (
            None  # where the optimizer reads `grad_shard`, if it is on the host
        )
        if taking is not None:
            self.host_grad = (
                taking.zeros(self.grad_shard.numel(), reduce_dtype)
                if allocate_grads
                else self.grad_shard
            )
        self.copies_to_host = False  # this step's `grad_shard` is on its way to the host
        self.missing: float = (
            0  # gradients that the reduction still waits for; inf: it starts in `finish`
        )
        self.reduction: Handle | None = None
        self.gathering: Handle | None = None
        self.summed = False  # over the replicas, in this step

    def open(self) -> None:
        """Allocate the whole gradient buffer, and its view for each parameter."""
        self.grads = self._new(self.layout.numel, dtype=self.reduce_dtype)
        slots = zip(self.layout.slots, self.shapes, strict=True)
        self.grad_views = [self.grads[slot.start : slot.stop].view(shape) for slot, shape in slots]

    def close(self) -> Tensor:
        """Release the whole gradient buffer; the buffer."""
        full_grads = self.whole_grads
        self.grads = None
        self.grad_views = []
        return full_grads

    @property
    def whole_grads(self) -> Tensor:
        """The whole gradient buffer, while it is allocated."""
        assert self.grads is not None
        return self.grads

    def wait_reduction(self) -> None:
        """Wait for the reduction in progress, if any."""
        if self.reduction is not None:
            self.reduction.wait()
            self.reduction = None

    def copy_grad_to_host(self, host: HostMemory | None) -> None:
        """Start to copy the summed gradient to the host, if the optimizer is there, once a step; on
        CUDA while its reduction is in progress."""
        if host is None or self.host_grad is None or self.copies_to_host:
            return
        self.copies_to_host = True
        work = None
        if self.grad_shard.is_cuda and self.reduction is not None:
            work = self.reduction.work
        else:
            self.wait_reduction()
        host.take(self.host_grad, self.grad_shard, work)

    def wait_gather(self) -> None:
        """Wait until the parameters are whole, if they are being gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
