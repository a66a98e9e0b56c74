"""The input of a recomputed part of a block, kept from forward to backward: under tensor
parallelism a share of it, which is gathered before the recomputation; and on the device or in other
memory.

ZeRO-R's partitioned activation checkpoints, Pa (arXiv 1910.02054, section 6.1): the ranks of a tp
group hold the same hidden states, so each keeps 1/tp. Each recomputed part adds one all-gather to
the all-reduces of tensor parallelism: a tenth of their bytes where whole layers are recomputed, up
to a quarter where both halves of each are (`train.recompute=selective`). Under sequence parallelism
the ranks hold different rows, so there is nothing to share. Inputs whose size tp does not divide
are padded with zeros. Pa+cpu keeps the inputs in host memory, `trainer.host.activations`; MD keeps
them in a buffer that was reserved at the start, `reserved_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import pad

from trainer.comm.collectives import CommCounter, all_gather


class InputStore(Protocol):
    """Keeps inputs elsewhere than autograd does. What `put` returns stands for the input as long
    as it lives."""

    def put(self, tensor: Tensor) -> Any: ...

    def get(self, entry: Any) -> Tensor: ...


class Kept:
    """A kept input of `shape`: this rank's share of it, or all. `held`: what the store has put
    away, or else the tensor."""

    __slots__ = ("held", "shape", "shared")

    def __init__(self, held: Any, shape: torch.Size, shared: bool):
        self.held = held
        self.shape = shape
        self.shared = shared


class KeptInputs:
    """Hooks around a recomputed function. They see the tensors that autograd saves of its
    arguments, and no others."""

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | None,
        counter: CommCounter,
        store: InputStore | None = None,
    ):
        """`group`: ranks with equal inputs, which recompute in the same order; None: inputs are
        kept whole. `store`: keeps inputs outside the device, or in a reserved buffer."""
        self.group = group
        self.counter = counter
        self.store = store
        self.count = 0  # functions whose inputs are kept

    def around(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wraps a recomputed function, so that its first argument is kept by these hooks. Autograd
        keeps its other arguments unchanged."""
        self.count += 1

        def run(x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            address = x.data_ptr()
            shape = x.shape  # autograd keeps the hooks: they must not hold `x`

            def pack(saved: Tensor) -> Tensor | Kept:
                is_input = saved.data_ptr() == address and saved.shape == shape
                return self._pack(saved) if is_input else saved

            with saved_tensors_hooks(pack, self._unpack):
                return function(x, *arguments, **keywords)

        return run

    def _pack(self, saved: Tensor) -> Tensor | Kept:
        shared = self.group is not None
        held = saved.detach()
        if self.group is not None:
            missing = -held.numel() % self.group.size()
            held = pad(held.flatten(), (0, missing)) if missing else held
            held = held.reshape(self.group.size(), -1)[self.group.rank()]
        if self.store is not None:
            return Kept(self.store.put(held), saved.shape, shared)
        return Kept(held.clone(), saved.shape, shared) if shared else saved

    def _unpack(self, packed: Tensor | Kept) -> Tensor:
        if not isinstance(packed, Kept):
            return packed
        held: Tensor = packed.held
        if self.store is not None:
            held = self.store.get(packed.held)
        if packed.shared:
            assert self.group is not None
            held = all_gather(held, self.group, "tp", self.counter)
        return held.flatten()[: packed.shape.numel()].view(packed.shape)
