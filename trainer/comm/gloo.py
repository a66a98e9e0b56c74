"""All-gather, reduce-scatter and ring exchange for gloo (CPU), built from gloo's fast operations.

gloo's own all-gather copies through buffers of the whole size; its reduce-scatter is an all-reduce
and a slice, twice the bytes of a ring; its sends block the caller. `python -m
benchmarks.collectives` compares these with gloo's own.

As with any collective, all members of a group start these calls in the same order.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.compat import storage_key


class CombinedWork(dist.Work):
    """Several operations as one `Work`."""

    def __init__(self, works: list[dist.Work | None]):
        super().__init__()
        self._works = [work for work in works if work is not None]

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def start_all_gather(tensor: Tensor, group: dist.ProcessGroup, out: Tensor) -> dist.Work:
    """Starts to broadcast every rank's piece into its slot of `out` [n*k, ...]. A `tensor` that is
    already in its slot is not copied."""
    pieces = out.view(group.size(), *tensor.shape)
    own_piece = pieces[group.rank()]
    in_place = (
        storage_key(own_piece.untyped_storage()) == storage_key(tensor.untyped_storage())
        and own_piece.storage_offset() == tensor.storage_offset()
    )
    if not in_place:
        own_piece.copy_(tensor)
    works = [
        dist.broadcast(
            piece,
            group=group,
            group_src=rank,
            async_op=True,
        )
        for rank, piece in enumerate(pieces)
    ]
    return CombinedWork(works)


def start_exchange(
    tensor: Tensor,
    out: Tensor,
    to: int,
    source: int,
    group: dist.ProcessGroup,
) -> dist.Work:
    """Starts to send `tensor` to the group's rank `to` and to receive `out` from its rank `source`:
    an all-to-all whose other pieces are empty. All members must call it.
    """
    send = [0] * group.size()
    send[to] = tensor.numel()
    receive = [0] * group.size()
    receive[source] = out.numel()
    work = dist.all_to_all_single(
        out.view(-1),
        tensor.view(-1),
        receive,
        send,
        group=group,
        async_op=True,
    )
    assert work is not None
    return work


class ReduceScatter:
    """A reduce-scatter in progress: `work` delivers the pieces [n, ...] of `tensor`, then `finish`
    sums into `out`.

    Pieces are added in rank order, so the sum does not depend on arrival order; bf16 is added in
    fp32.
    """

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup, out: Tensor):
        n = group.size()
        rank = group.rank()
        pieces = tensor.view(n, *out.shape)
        self.out = out
        self.own_piece: Tensor | None = None
        self.work: dist.Work | None
        if n == 2:
            # The own piece is not sent. `out` may be its memory, which is read before it is
            # written.
            peer = 1 - rank
            self.own_piece = pieces[rank]
            self.arrived = torch.empty_like(out, memory_format=torch.contiguous_format)
            self.work = start_exchange(pieces[peer], self.arrived, peer, peer, group)
        else:
            self.arrived = torch.empty_like(pieces)
            self.work = dist.all_to_all_single(
                self.arrived,
                pieces,
                group=group,
                async_op=True,
            )

    def finish(self) -> None:
        """Sums the pieces into `out`."""
        if self.own_piece is not None:
            torch.add(self.own_piece, self.arrived, out=self.out)
        else:
            torch.sum(self.arrived, dim=0, out=self.out)
