"""Tokens to the ranks that hold their experts and back, by uneven all-to-all (GShard, arXiv
2006.16668, without its padding and dropping; MegaBlocks, arXiv 2211.15841).

A rank sends each copy of a token once, sorted by expert, so a receiver gets one run per sender and
expert. It sorts the runs by expert, computes, and sends the results back the same way; the results
of a token are summed on its own rank. Backward is the same with the directions swapped. The bytes
are the minimum of an exchange without node limits: a row of hidden size for each copy that leaves
its rank, in both directions, and its weight (fp32).

If each expert is cut over tensor-parallel ranks, these first gather the rows that each of them
received, compute with their slices, and sum and scatter the partial results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_gather, all_to_all
from trainer.comm.uneven import all_gather_uneven, reduce_scatter_uneven, start_all_to_all_uneven
from trainer.model.experts import Copies, Experts, Meanwhile
from trainer.model.permutation import inverse, permuted, read_counts
from trainer.model.router import Routing

AXIS = "ep"
TENSOR_AXIS = "tp"


#: Sends rows, and returns a function that waits for the rows that arrive.
Start = Callable[[Tensor], Callable[[], Tensor]]


class Move(NamedTuple):
    """A transfer of rows between ranks, and its reverse: forward and backward of one autograd
    operation."""

    send: Start
    send_back: Start

    @property
    def reverse(self) -> Move:
        return Move(self.send_back, self.send)

    def __call__(self, rows: Tensor) -> Tensor:
        return _Moved.apply(rows, self)

    def overlap(
        self,
        meanwhile: Meanwhile,
        *sent: Tensor,
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Returns (the rows that arrive for each of `sent`, the result of `meanwhile`, which is
        computed during their transfer). Backward computes the gradient of `meanwhile` during the
        transfer of the rows' gradients."""
        transfers = _Transfers()
        mark = _Started.apply(self, transfers, *sent)
        shared_out = meanwhile()
        return _Arrived.apply(mark, self, transfers), shared_out


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: Move) -> Tensor:
        ctx.move = move
        return move.send(rows)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.move.send_back(grad.contiguous())(), None


class _Transfers:
    """The transfers in progress: in forward from `_Started` to `_Arrived`, in backward from
    `_Arrived` to `_Started`."""

    waits: list[Callable[[], Tensor]]

    def wait(self) -> tuple[Tensor, ...]:
        """Waits for the rows that arrive, and drops the waits, which hold sent and received
        rows."""
        waits = self.waits
        self.waits = []
        return tuple(wait() for wait in waits)


class _Started(torch.autograd.Function):
    """Starts transfers. Returns a mark without elements that represents the rows in transit: so
    autograd runs the backward of what was computed in between also in between."""

    @staticmethod
    def forward(ctx: Any, move: Move, transfers: _Transfers, *sent: Tensor) -> Tensor:
        ctx.transfers = transfers
        transfers.waits = [move.send(rows) for rows in sent]
        return sent[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.transfers.wait()


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mark: Tensor,
        move: Move,
        transfers: _Transfers,
    ) -> tuple[Tensor, ...]:
        ctx.move = move
        ctx.transfers = transfers
        return transfers.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.transfers.waits = [ctx.move.send_back(grad.contiguous()) for grad in grads]
        return grads[0].new_empty(0), None, None


def all_to_all_move(
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    counter: CommCounter,
    levels: Sequence[str],
) -> Move:
    """Returns the move that sends `sent[i]` rows to the i-th rank of `group` and receives
    `received[i]` rows from it."""

    def start(rows: Tensor, sent: list[int], received: list[int]) -> Callable[[], Tensor]:
        return start_all_to_all_uneven(
            rows,
            sent,
            received,
            group,
            axis=AXIS,
            counter=counter,
            levels=levels,
        )

    return Move(
        lambda rows: start(rows, sent, received),
        lambda rows: start(rows, received, sent),
    )


class ExpertDispatch:
    """Replaces `model.experts.dispatch`.

    The i-th rank of `expert_group` holds the i-th run of experts, each rank of `tensor_group` a
    slice of each expert; None: one rank. Ranks of `tensor_group` have different tokens (sequence
    parallelism). `levels`: the levels of `Mesh.levels` at which the ranks of `expert_group` are
    reached.
    """

    def __init__(
        self,
        expert_group: dist.ProcessGroup | None,
        tensor_group: dist.ProcessGroup | None,
        counter: CommCounter,
        levels: Sequence[str],
    ):
        self.expert_group = expert_group
        self.tensor_group = tensor_group
        self.counter = counter
        self.levels = levels

    @property
    def ranks(self) -> int:
        """The number of ranks that share the experts."""
        return self.expert_group.size() if self.expert_group is not None else 1

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Meanwhile,
    ) -> tuple[Tensor, Tensor | None]:
        copies = Copies.of(x, routing, self.ranks * experts.count)
        sent = [copies.rows]
        copies = copies._replace(rows=copies.rows.new_empty(0))
        out, shared_out = self.exchange(sent, copies.weights, copies.counts, experts, meanwhile)
        return copies.summed(out), shared_out

    def exchange(
        self,
        sent: list[Tensor],
        weights: Tensor,
        counts: Tensor,
        experts: Experts,
        meanwhile: Meanwhile,
    ) -> tuple[Tensor, Tensor | None]:
        """Copies of tokens sorted by expert, `counts` [experts of all ranks] -> the experts'
        results for them, and that of `meanwhile`. `sent` holds the copies until they are sent; then
        their memory is free."""
        rows = sent.pop()
        counts = counts.view(self.ranks, experts.count)
        moves = []
        if self.expert_group is not None:
            move, counts = self._to_experts(counts, self.expert_group)
            moves.append(move)
        if self.tensor_group is not None:
            move, counts = self._to_slices(counts, self.tensor_group)
            moves.append(move)
        shared_out = None if moves else meanwhile()
        for move in moves:
            if move is moves[0]:
                (rows, weights), shared_out = move.overlap(meanwhile, rows, weights)
            else:
                rows = move(rows)
                weights = move(weights)
        rows, weights, runs = _by_expert(rows, weights, counts)
        out = experts(rows, counts.sum(0), weights)
        out = out if runs is None else permuted(out, runs.positions, runs.order)
        for move in reversed(moves):
            out = move.reverse(out)
        return out, shared_out

    def _to_experts(self, counts: Tensor, group: dist.ProcessGroup) -> tuple[Move, Tensor]:
        """Returns the move to the ranks of the experts, and the arriving counts: `counts`
        [receiver, its expert] sent -> [sender, expert of this rank]."""
        arriving = all_to_all(counts, group, AXIS, self.counter)
        totals = torch.stack([counts.sum(1), arriving.sum(1)])
        sent, received = read_counts(totals)
        return all_to_all_move(sent, received, group, self.counter, self.levels), arriving

    def _to_slices(self, counts: Tensor, group: dist.ProcessGroup) -> tuple[Move, Tensor]:
        """Returns the move to the slices of experts, and the counts of all its rows: `counts`
        [runs, experts] of this rank -> those of all ranks of the group, rank after rank."""
        all_counts = all_gather(counts, group, TENSOR_AXIS, self.counter)
        sizes = read_counts(all_counts.view(group.size(), -1).sum(1))

        def gather(rows: Tensor) -> Callable[[], Tensor]:
            return lambda: all_gather_uneven(rows, sizes, group, TENSOR_AXIS, self.counter)

        def scatter(rows: Tensor) -> Callable[[], Tensor]:
            return lambda: reduce_scatter_uneven(rows, sizes, group, TENSOR_AXIS, self.counter)

        return Move(gather, scatter), all_counts


class _Runs(NamedTuple):
    """The permutation that sorts runs of rows by expert."""

    order: Tensor
    positions: Tensor  # the inverse of `order`


def _by_expert(
    rows: Tensor,
    weights: Tensor,
    counts: Tensor,
) -> tuple[Tensor, Tensor, _Runs | None]:
    """Returns rows and weights sorted by expert, and the permutation, or None if they were sorted.
    `counts` [runs, experts of this rank]: the runs follow each other, each sorted by expert."""
    if 1 in counts.shape:  # one run, or one expert
        return rows, weights, None
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    sizes = counts.T.flatten()
    starts = starts.T.flatten()  # expert after expert
    ends = sizes.cumsum(0)
    shift = (starts - ends + sizes).repeat_interleave(sizes, output_size=len(rows))
    order = shift.add_(torch.arange(len(rows), device=rows.device))
    runs = _Runs(order, inverse(order))
    return permuted(rows, *runs), permuted(weights, *runs), runs
