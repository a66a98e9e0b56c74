"""What a recomputed part of a block keeps of its input from forward to backward: under tensor parallelism a share of
it, gathered again before the recomputation.

ZeRO-R's partitioned activation checkpoints, Pa (arXiv 1910.02054, section 6.1): the ranks of a tp group hold the same
hidden states, so each keeps 1/tp. One all-gather for each recomputed part is added to the all-reduces of tensor
parallelism: at most a tenth of their bytes. Under sequence parallelism the ranks hold different rows and nothing is
left to share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainer.comm.collectives import CommCounter, all_gather


class Share:
    """This rank's share of an input, in its place."""

    __slots__ = ("part", "shape")

    def __init__(self, part: Tensor, shape: torch.Size):
        self.part, self.shape = part, shape


class KeptInputs:
    """Hooks around a recomputed function: they see the tensors that it saves of its arguments, and no others."""

    def __init__(self, group: torch.distributed.ProcessGroup, counter: CommCounter):
        """`group`: of ranks with equal inputs, which recompute in the same order."""
        self.group, self.counter = group, counter

    def around(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function`, a recomputed one, which keeps a share of its first argument; its others are kept as they are."""

        def run(x: Tensor, *others: Any) -> Tensor:
            address, shape = x.data_ptr(), x.shape  # autograd keeps the hooks: they must not hold `x`

            def pack(saved: Tensor) -> Tensor | Share:
                return self._pack(saved) if saved.data_ptr() == address and saved.shape == shape else saved

            with saved_tensors_hooks(pack, self._unpack):
                return function(x, *others)

        return run

    def _pack(self, saved: Tensor) -> Tensor | Share:
        parts = self.group.size()
        if saved.numel() % parts:
            return saved
        return Share(saved.detach().reshape(parts, -1)[self.group.rank()].clone(), saved.shape)

    def _unpack(self, kept: Tensor | Share) -> Tensor:
        if not isinstance(kept, Share):
            return kept
        return all_gather(kept.part, self.group, "tp", self.counter).view(kept.shape)
