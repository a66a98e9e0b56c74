"""Collectives whose ranks send unequal numbers of rows, on the hot path; counted as in
`collectives`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import CommCounter


def start_all_to_all_uneven(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    axis: str,
    counter: CommCounter,
    levels: Sequence[str] = (),
) -> Callable[[], Tensor]:
    """[sum of `sent`, ...] -> [sum of `received`, ...]: `sent[i]` rows go to the i-th rank of the
    group, `received[i]` rows came from it. What stays on this rank is not counted as sent.
    `levels`: by what each rank of the group is reached, "nvlink" or "network", where that is
    counted; the wait counts as that for the slower one. The returned function waits and returns
    what arrived. Keep it until then."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    unsent = sent[group.rank()]
    row_bytes = rows[:1].nbytes if len(rows) else 0
    counter.count_sent("all-to-all", axis, (len(rows) - unsent) * row_bytes, group)
    for rank, (count, level) in enumerate(zip(sent, levels, strict=bool(levels))):
        if rank != group.rank():
            counter.levels[level] += count * row_bytes
    names = [*(["network" if "network" in levels else "nvlink"] if levels else []), axis]
    operation = counter.last
    with contextlib.ExitStack() as waits:
        for name in names:
            waits.enter_context(counter.waiting(name, rows))
        work = dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)
    assert work is not None  # since it is asynchronous
    ended = counter.on_arrival(work)

    def wait() -> Tensor:
        counter.before_wait()
        with contextlib.ExitStack() as waits:
            for name in names:
                waits.enter_context(
                    counter.waiting(name, rows, operation)
                )  # `rows` live until they are sent
            work.wait()
        ended()
        return out

    return wait


def all_gather_uneven(
    rows: Tensor, sizes: list[int], group: dist.ProcessGroup, axis: str, counter: CommCounter
) -> Tensor:
    """[sizes[this rank], ...] -> [sum of `sizes`, ...]: the rows of all ranks of the group, in
    their order."""
    index = group.rank()
    out = rows.new_empty(sum(sizes), *rows.shape[1:])
    pieces = list(out.split(sizes))
    pieces[index].copy_(rows)
    _exchange([rows] * len(sizes), pieces, group, axis, counter, "all-gather")
    return out


def reduce_scatter_uneven(
    rows: Tensor, sizes: list[int], group: dist.ProcessGroup, axis: str, counter: CommCounter
) -> Tensor:
    """[sum of `sizes`, ...] -> [sizes[this rank], ...]: the sum over the group of this rank's rows,
    added in the order of the ranks."""
    own_index = group.rank()
    pieces = [piece.contiguous() for piece in rows.split(sizes)]
    arrived = [
        piece if index == own_index else torch.empty_like(pieces[own_index])
        for index, piece in enumerate(pieces)
    ]
    _exchange(pieces, arrived, group, axis, counter, "reduce-scatter")
    total = arrived[0].clone()
    for piece in arrived[1:]:
        total += piece
    return total


def _exchange(
    to: list[Tensor],
    into: list[Tensor],
    group: dist.ProcessGroup,
    axis: str,
    counter: CommCounter,
    operation: str,
) -> None:
    """Send `to[i]` to the i-th rank of the group and receive `into[i]` from it, all at once; empty
    ones not at all."""
    peers = [
        (index, rank)
        for index, rank in enumerate(dist.get_process_group_ranks(group))
        if index != group.rank()
    ]
    counter.count_sent(operation, axis, sum(to[index].nbytes for index, _ in peers), group)
    ended = counter.on_arrival()
    with counter.waiting(axis, to[0]):
        operations = [
            dist.P2POp(dist.isend, to[index].contiguous(), rank, group) for index, rank in peers
        ]
        operations += [dist.P2POp(dist.irecv, into[index], rank, group) for index, rank in peers]
        works = dist.batch_isend_irecv(
            [transfer for transfer in operations if transfer.tensor.numel()] or operations
        )
    counter.before_wait()
    with counter.waiting(axis, to[0]):
        for work in works:
            work.wait()
    ended()
