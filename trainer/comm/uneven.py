"""Collectives on the hot path whose ranks send unequal numbers of rows, counted as in
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
    *,
    axis: str,
    counter: CommCounter,
    levels: Sequence[str] = (),
) -> Callable[[], Tensor]:
    """[sum of `sent`, ...] -> [sum of `received`, ...]: starts to send `sent[i]` rows to the i-th
    rank of the group and to receive `received[i]` rows from it. Rows that stay on this rank do not
    count as sent.

    `levels`: the link to each rank of the group, "nvlink" or "network", if bytes are counted by
    link; the wait counts as that for the slower link. The returned function waits and returns the
    received rows. Keep it until then.
    """
    out = rows.new_empty(sum(received), *rows.shape[1:])
    unsent = sent[group.rank()]
    row_bytes = rows[:1].nbytes if len(rows) else 0
    counter.count_sent(
        "all-to-all",
        axis,
        (len(rows) - unsent) * row_bytes,
        group,
    )
    for rank, (count, level) in enumerate(zip(sent, levels, strict=bool(levels))):
        if rank != group.rank():
            counter.levels[level] += count * row_bytes
    names = [axis]
    if levels:
        names.insert(0, "network" if "network" in levels else "nvlink")
    operation = counter.last
    with contextlib.ExitStack() as waits:
        for name in names:
            waits.enter_context(counter.waiting(name, rows))
        work = dist.all_to_all_single(
            out,
            rows,
            received,
            sent,
            group=group,
            async_op=True,
        )
    assert work is not None  # since it is asynchronous
    ended = counter.on_arrival(work)

    def wait() -> Tensor:
        counter.before_wait()
        with contextlib.ExitStack() as waits:
            for name in names:
                # `rows` live until they are sent.
                waits.enter_context(counter.waiting(name, rows, operation))
            work.wait()
        ended()
        return out

    return wait


def all_gather_uneven(
    rows: Tensor,
    sizes: list[int],
    group: dist.ProcessGroup,
    axis: str,
    counter: CommCounter,
) -> Tensor:
    """[sizes[this rank], ...] -> [sum of `sizes`, ...]: joins the rows of all ranks of the group,
    in their order."""
    index = group.rank()
    out = rows.new_empty(sum(sizes), *rows.shape[1:])
    pieces = list(out.split(sizes))
    pieces[index].copy_(rows)
    sent = [rows] * len(sizes)
    _exchange(
        "all-gather",
        sent,
        pieces,
        group,
        axis=axis,
        counter=counter,
    )
    return out


def reduce_scatter_uneven(
    rows: Tensor,
    sizes: list[int],
    group: dist.ProcessGroup,
    axis: str,
    counter: CommCounter,
) -> Tensor:
    """[sum of `sizes`, ...] -> [sizes[this rank], ...]: sums this rank's rows over the group, in
    the order of the ranks."""
    own_index = group.rank()
    pieces = [piece.contiguous() for piece in rows.split(sizes)]
    arrived = [
        piece if index == own_index else torch.empty_like(pieces[own_index])
        for index, piece in enumerate(pieces)
    ]
    _exchange(
        "reduce-scatter",
        pieces,
        arrived,
        group,
        axis=axis,
        counter=counter,
    )
    total = arrived[0].clone()
    for piece in arrived[1:]:
        total += piece
    return total


def _exchange(
    operation: str,
    to: list[Tensor],
    into: list[Tensor],
    group: dist.ProcessGroup,
    *,
    axis: str,
    counter: CommCounter,
) -> None:
    """Sends `to[i]` to the i-th rank of the group and receives `into[i]` from it, all at once;
    empty tensors are not sent."""
    peers = [
        (index, rank)
        for index, rank in enumerate(dist.get_process_group_ranks(group))
        if index != group.rank()
    ]
    counter.count_sent(
        operation,
        axis,
        sum(to[index].nbytes for index, _ in peers),
        group,
    )
    ended = counter.on_arrival()
    with counter.waiting(axis, to[0]):
        operations = [
            dist.P2POp(dist.isend, to[index].contiguous(), rank, group) for index, rank in peers
        ]
        operations += [dist.P2POp(dist.irecv, into[index], rank, group) for index, rank in peers]
        not_empty = [transfer for transfer in operations if transfer.tensor.numel()]
        works = dist.batch_isend_irecv(not_empty or operations)
    counter.before_wait()
    with counter.waiting(axis, to[0]):
        for work in works:
            work.wait()
    ended()
