"""Divides a step's micro-batches among the replicas of the model. Pure.

All replicas take equally many micro-batches if their number divides. Otherwise some take one more:
the loss is a sum over tokens that is divided once by the token count of the whole batch, so every
split gives the same gradient. The cost is that the other replicas idle at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .document import Coord, Parallel


_LISTED = 4  # replicas whose numbers are listed one by one
#: The most pieces that the planner chooses, and the fewest numbers of one: 32 MiB in bf16. A piece
#: costs the latency of a collective: `benchmarks.exposed` shows small ones to be slower.
MOST_PIECES = 4
FEWEST_NUMBERS = 16 << 20


def share(micro_batches: int, replicas: int) -> list[int]:
    """Splits micro-batches as equally as possible; the first replicas take the remainder."""
    base_count, remainder = divmod(micro_batches, replicas)
    return [base_count + (replica < remainder) for replica in range(replicas)]


def divisors(n: int) -> list[int]:
    """Lists the divisors of `n`, ascending."""
    small = [divisor for divisor in range(1, int(n**0.5) + 1) if n % divisor == 0]
    return small + [n // divisor for divisor in reversed(small) if divisor * divisor != n]


def nearest_divisors(n: int, target: int) -> list[int]:
    """Lists the two divisors of `n` that are nearest to `target`, ascending."""
    return sorted(sorted(divisors(n), key=lambda divisor: abs(divisor - target))[:2])


def replica_of(parallel: Parallel, coord: Coord) -> int:
    """The index of a rank's replica among the dp * ep replicas (dp outermost)."""
    return coord.dp * parallel.ep + coord.ep


def taken(parallel: Parallel) -> list[int]:
    """Lists how many micro-batches each of the dp * ep replicas takes (dp outermost)."""
    return parallel.replica_micro_batches or [parallel.micro_batches] * (parallel.dp * parallel.ep)


def computed(parallel: Parallel, replica: int) -> int:
    """The number of micro-batches that a replica computes in a step.

    With ZeRO-0 and ZeRO-1 it is the number that the replica takes. From ZeRO-2 on, the gradients of
    every micro-batch are reduced among all replicas, so each replica computes as many as the
    largest share. The additional micro-batches have no token that counts, and cost no time: without
    them the replica would wait.
    """
    return parallel.micro_batches if parallel.zero >= 2 else taken(parallel)[replica]


def idle(parallel: Parallel) -> float:
    """The share of the replicas' time in which they wait for replicas with more micro-batches."""
    counts = taken(parallel)
    return 1 - sum(counts) / (len(counts) * max(counts))


def describe(parallel: Parallel) -> str:
    """Formats the micro-batches of the replicas: "6 micro-batches" for equal numbers, "6+5+5
    micro-batches" for a few replicas, "2 x 6 + 14 x 5 micro-batches" for many."""
    counts = taken(parallel)
    distinct = sorted(set(counts), reverse=True)
    if len(distinct) == 1:
        return f"{counts[0]} micro-batches"
    if len(counts) <= _LISTED:
        return f"{'+'.join(map(str, counts))} micro-batches"
    terms = [f"{counts.count(count)} x {count}" for count in distinct]
    return f"{' + '.join(terms)} micro-batches"


def firsts(counts: Sequence[int], replica: int) -> list[int]:
    """Lists the micro-batches of the step that a replica takes, by their position in the data.

    The data is dealt in rounds. In each round, every replica that still needs micro-batches takes
    the next one, in the order of the replicas.
    """
    full_rounds = min(counts)
    result = [turn * len(counts) + replica for turn in range(full_rounds)]
    dealt = full_rounds * len(counts)
    for turn in range(full_rounds, counts[replica]):
        result.append(dealt + sum(count > turn for count in counts[:replica]))
        dealt += sum(count > turn for count in counts)
    return result


def check_batch(parallel: Parallel) -> str | None:
    """Checks the micro-batches and their pieces against the global batch. Returns one line, or
    None if they agree."""
    counts = parallel.replica_micro_batches
    replicas = parallel.dp * parallel.ep
    if counts:
        name = f"replica_micro_batches {counts}"
        if len(counts) != replicas or min(counts) < 1:
            return f"{name} must be {replicas} numbers of at least 1"
        if max(counts) != parallel.micro_batches or min(counts) == max(counts):
            return f"{name} must differ, and the largest be micro_batches {parallel.micro_batches}"
    if isinstance(parallel.tp_pieces, int) and parallel.tp_pieces < 1:
        return f"tp_pieces {parallel.tp_pieces} must be at least 1"
    samples = sum(taken(parallel)) * parallel.micro_batch_size
    if samples != parallel.global_batch_samples:
        return (
            f"the replicas take {samples} samples per step, global_batch_samples is"
            f" {parallel.global_batch_samples}"
        )
    return None


def suited_pieces(tp: int, tokens: int, hidden: int) -> int:
    """Returns the pieces that suit a micro-batch of `tokens` on the tp ranks of GPUs; 1: whole."""
    return 1 if tp == 1 else max(1, min(MOST_PIECES, tokens * hidden // FEWEST_NUMBERS))


def largest_cut(batch: int, length: int, limit: int) -> int:
    """Returns the largest number of equal pieces, at most `limit`, of `batch` sequences of `length`
    rows. A piece has whole samples, or equal slices of one."""
    return next(count for count in range(limit, 0, -1) if _cuts(batch, length, count))


def _cuts(batch: int, length: int, count: int) -> bool:
    if count <= batch:
        return batch % count == 0
    return count % batch == 0 and length % (count // batch) == 0
