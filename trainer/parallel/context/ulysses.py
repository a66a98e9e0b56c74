"""Ulysses (arXiv 2309.14509): exchange heads for sequence, attend as on one rank, exchange back.

Needs heads divisible by cp. Fewer key/value heads than ranks are repeated until each rank has one.
"""

from __future__ import annotations

from math import lcm

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_gather, all_to_all
from trainer.model.attention import SDPA
from trainer.model.documents import Documents


class UlyssesAttention:
    """An attention core for one rank: q, k, v [b, s / cp, heads, d] -> [b, s / cp, heads, d].

    Inside, `core` sees whole sequences and 1 / cp of the heads.
    """

    def __init__(
        self,
        core: SDPA,
        group: dist.ProcessGroup,
        size: int,
        counter: CommCounter,
    ):
        self.core = core
        self.group = group
        self.size = size
        self.counter = counter

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_index: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        if q.shape[2] % self.size:
            raise ValueError(
                f"ulysses needs heads divisible by cp={self.size}, a rank has {q.shape[2]} heads"
            )
        repeat = lcm(k.shape[2], self.size) // k.shape[2]
        if repeat > 1:
            k, v = (t.repeat_interleave(repeat, dim=2) for t in (k, v))
        # One message: each rank's heads of queries, keys and values, one after the other.
        by_rank = [tensor.unflatten(2, (self.size, -1)) for tensor in (q, k, v)]
        heads = [tensor.shape[3] for tensor in by_rank]
        joined = torch.cat(by_rank, dim=3).flatten(2, 3)
        q, k, v = _Exchange.apply(joined, 2, 1, self).split(heads, dim=2)
        token_index = None if token_index is None else self.gather(token_index)
        if documents is not None and not self.core.knows_documents(q):
            documents = documents.each(self.gather)  # for a mask of the whole sequence
        return _Exchange.apply(
            self.core(q, k, v, token_index, documents),
            1,
            2,
            self,
        )

    def gather(self, local: Tensor) -> Tensor:
        """[b, s / cp] -> [b, s]"""
        columns = local.t().contiguous()
        return all_gather(columns, self.group, "cp", self.counter).t().contiguous()

    def exchange(self, tensor: Tensor, split: int, join: int) -> Tensor:
        """Cuts dimension `split` into one piece per rank, and joins the pieces that arrive along
        dimension `join`."""
        pieces = torch.stack(tensor.chunk(self.size, dim=split)).contiguous()
        arrived = all_to_all(pieces, self.group, "cp", self.counter)
        return torch.cat(arrived.unbind(0), dim=join)


class _Exchange(torch.autograd.Function):
    """The exchange, which is its own transpose with the dimensions swapped."""

    @staticmethod
    def forward(ctx, tensor, split, join, ulysses: UlyssesAttention):
        ctx.dims = (split, join)
        ctx.ulysses = ulysses
        return ulysses.exchange(tensor, split, join)

    @staticmethod
    def backward(ctx, grad):
        split, join = ctx.dims
        return ctx.ulysses.exchange(grad, join, split), None, None, None
