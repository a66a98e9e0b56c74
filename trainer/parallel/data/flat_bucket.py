"""One bucket of flat parameters and gradients, and this rank's shard of both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from trainer.comm.collectives import Handle
from trainer.host.memory import HostMemory
from trainer.parallel.data.layout import Bucket
from trainer.parallel.data.rooms import Rooms
from trainer.parallel.params import DENSE, GradGroups, ParamInfo


class Kind(NamedTuple):
    """The properties that all parameters of a bucket share."""

    dtype: torch.dtype
    decay: bool
    replicated: bool  # over tp: only the owner counts the bucket in norms and writes it
    sums: tuple[str, ...]  # groups over which the gradient is summed after the data-parallel one
    groups: GradGroups = DENSE  # the class of parameters: the data-parallel groups
    whole_matrix: bool = False  # whether each parameter must lie in one shard
    narrow: bool = False  # whether the optimizer's state is narrower than the master weights


class CutParameter:
    """The buffers of a parameter that is cut over several buckets, each of which has a run of
    them."""

    def __init__(self) -> None:
        self.numel = 0  # of the buckets together
        self.buckets = 0  # their number
        self.params: Tensor | None = None
        self.grads: Tensor | None = None


def cut_parameters(layouts: Sequence[Bucket]) -> dict[int, CutParameter]:
    """Returns the parameters that are cut over several buckets, by index."""
    parameters: dict[int, CutParameter] = {}
    for layout in layouts:
        first = layout.slots[0]
        if layout.continues or first.stop > layout.numel:
            parameter = parameters.setdefault(first.index, CutParameter())
            parameter.numel += layout.numel
            parameter.buckets += 1
    return parameters


class FlatBucket:
    """The buffers of one bucket, and this rank's shard of each as a view."""

    def __init__(
        self,
        layout: Bucket,
        params: list[Parameter],
        infos: list[ParamInfo],
        *,
        shards: int,
        shard_index: int,
        reduce_dtype: torch.dtype,
        allocate_grads: bool,
        host: HostMemory | None = None,
        cut: CutParameter | None = None,
        rooms: Rooms | None = None,
    ):
        """`cut`: the buffers in which the bucket has a run, if its parameter is cut. `rooms`:
        hold the whole gradients while these are not kept."""
        device = params[0].device
        self.cut = cut
        self.rooms = rooms
        self.shards = shards
        self.shard_index = shard_index
        self.layout = layout
        self.infos = infos
        self.range = layout.shard(shard_index, shards)
        self.kind = cast(Kind, layout.key)
        self.owner = infos[0].owner
        self._zeros = partial(torch.zeros, device=device) if host is None else host.device_zeros
        self.params = self._params()
        self.reduce_dtype = reduce_dtype
        self.shapes = [param.shape for param in params]
        self.members = params
        #: Whether autograd itself can add to the gradient buffer.
        self.direct = reduce_dtype == self.kind.dtype
        self._move_params()
        self.param_shard = self.params[slice(*self.range)]
        self.grads: Tensor | None = None
        self.grad_views: list[Tensor] = []
        #: Where the optimizer reads `grad_shard`, if the optimizer is on the host.
        self.host_grad: Tensor | None = None
        self._allocate_grads(allocate_grads, host)
        self.copies_to_host = False  # whether this step's `grad_shard` is being copied to the host
        #: Gradients that the reduction still waits for; inf: it starts in `finish`.
        self.missing: float = 0
        self.reduction: Handle | None = None
        self.gathering: Handle | None = None
        self.summed = False  # whether the replicas' sum of this step has started

    @property
    def buckets(self) -> int:
        """The number of buckets, from this one on, that hold its parameters."""
        return 1 if self.cut is None else self.cut.buckets

    def _params(self) -> Tensor:
        cut = self.cut
        if cut is None:
            return self._zeros(self.layout.numel, dtype=self.kind.dtype)
        if cut.params is None:
            cut.params = self._zeros(cut.numel, dtype=self.kind.dtype)
        return cut.params[self._run]

    @property
    def _run(self) -> slice:
        """The bucket's elements of a parameter that is cut."""
        start = -self.layout.slots[0].start
        return slice(start, start + self.layout.numel)

    def _move_params(self) -> None:
        """Makes the parameters views of the flat buffer."""
        if self.cut is not None:
            (param,) = self.members
            if not self.layout.continues:
                assert self.cut.params is not None
                view = self.cut.params[: param.numel()].view(param.shape)
                view.copy_(param.detach())
                param.data = view
            return
        for slot, param in zip(self.layout.slots, self.members, strict=True):
            view = self.params[slot.start : slot.stop].view(param.shape)
            view.copy_(param.detach())
            param.data = view

    def _allocate_grads(self, full: bool, host: HostMemory | None) -> None:
        """Allocates the gradients: the whole buffer or this rank's shard, on the device or, for an
        optimizer on the host, there as well."""
        grad_host = host if host is not None and host.takes_gradients else None
        numel = self.param_shard.numel()
        if full:
            self.open(full)
            self.grad_shard = self.whole_grads[slice(*self.range)]
        elif grad_host is not None:
            self.grad_shard = grad_host.zeros(numel, self.reduce_dtype)
        else:
            self.grad_shard = self._zeros(numel, dtype=self.reduce_dtype)
        if grad_host is not None:
            self.host_grad = self.grad_shard
            if full:
                self.host_grad = grad_host.zeros(numel, self.reduce_dtype)

    def open(self, lasting: bool = False) -> None:
        """Allocates the whole gradient buffer, and its view for each parameter. `lasting`: buckets
        of a parameter that is cut have runs of one buffer, so that the first has its view."""
        if self.cut is not None and lasting:
            self._open_run(self.cut)
            return
        allocate = self._zeros if self.rooms is None or lasting else self.rooms.take
        self.grads = allocate(self.layout.numel, dtype=self.reduce_dtype)
        if self.cut is not None:
            self.grad_views = [self.grads]
            return
        slots = zip(self.layout.slots, self.shapes, strict=True)
        self.grad_views = [self.grads[slot.start : slot.stop].view(shape) for slot, shape in slots]

    def _open_run(self, cut: CutParameter) -> None:
        if cut.grads is None:
            cut.grads = self._zeros(cut.numel, dtype=self.reduce_dtype)
        self.grads = cut.grads[self._run]
        self.grad_views = [self.grads]
        if not self.layout.continues:
            (shape,) = self.shapes
            self.grad_views = [cut.grads[: shape.numel()].view(shape)]

    def close(self) -> Tensor:
        """Releases the whole gradient buffer, and returns it."""
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
        """Waits for the reduction in progress, if any."""
        if self.reduction is not None:
            self.reduction.wait()
            self.reduction = None

    def copy_grad_to_host(self, host: HostMemory | None) -> None:
        """Starts to copy the summed gradient to the host, once per step, if the optimizer is there.
        On CUDA the copy may start while the reduction is in progress."""
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
        """Waits until the parameters are whole, if they are being gathered."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
