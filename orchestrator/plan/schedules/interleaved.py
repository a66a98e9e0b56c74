"""Interleaved 1F1B (Megatron-LM, Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

Each rank holds v stages, p apart, and runs micro-batches through them in groups of p: p
micro-batches through its first stage, the same p through its second, and so on; backwards in the
reverse order of stages. Bubble (p - 1) / (v m) when p divides m (a last group that is not full
costs a full one's bubble); rank 0 holds at most p (v + 1) - 1 stage activations, 1 + (p - 1) / (p
v) times what 1F1B holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Kind


def order(rank: int, pp: int, micro_batches: int, vpp: int) -> Iterator[Action]:
    # The last group counts as full; `at` leaves out micro-batches that do not exist.
    groups = -(-micro_batches // pp)
    total = groups * pp * vpp

    def at(kind: Kind, index: int) -> Iterator[Action]:
        """Yields the index-th forward or backward of this rank, if it exists."""
        group, inside = divmod(index, pp * vpp)
        chunk, member = divmod(inside, pp)
        if kind is Kind.B:
            chunk = vpp - 1 - chunk
        if (micro_batch := group * pp + member) < micro_batches:
            yield Action(kind, chunk * pp + rank, micro_batch)

    # Before the first backward: a trip through all chunks but the last, and twice the distance to
    # the last rank.
    ahead = min((vpp - 1) * pp + 2 * (pp - 1 - rank), total)
    for index in range(ahead):
        yield from at(Kind.F, index)
    for index in range(total):
        if index + ahead < total:
            yield from at(Kind.F, index + ahead)
        yield from at(Kind.B, index)
