"""How a step's micro-batches are shared out among the replicas of the model, and what divides a
number. Pure.

As a rule each takes as many as the others. Where their number does not divide, some take one more:
the loss is a sum over tokens that is divided once by the count of the whole batch, so the gradient
is that of any other split, and what it costs is that the others are idle at the end of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .document import Coord, Parallel


_LISTED = 4  # replicas, one by one


def share(micro_batches: int, replicas: int) -> list[int]:
    """As equal as can be; the first replicas take one more where it does not divide."""
    base_count, remainder = divmod(micro_batches, replicas)
    return [base_count + (replica < remainder) for replica in range(replicas)]


def divisors(n: int) -> list[int]:
    """Ascending."""
    small = [divisor for divisor in range(1, int(n**0.5) + 1) if n % divisor == 0]
    return small + [n // divisor for divisor in reversed(small) if divisor * divisor != n]


def nearest_divisors(n: int, target: int) -> list[int]:
    """The two that are nearest to `wanted`, ascending."""
    return sorted(sorted(divisors(n), key=lambda divisor: abs(divisor - target))[:2])


def replica_of(parallel: Parallel, coord: Coord) -> int:
    """Which of the dp * ep replicas a rank belongs to (dp outermost)."""
    return coord.dp * parallel.ep + coord.ep


def taken(parallel: Parallel) -> list[int]:
    """Micro-batches of the global batch that each of the dp * ep replicas takes (dp outermost)."""
    return parallel.replica_micro_batches or [parallel.micro_batches] * (parallel.dp * parallel.ep)


def computed(parallel: Parallel, replica: int) -> int:
    """Micro-batches that a replica computes in a step: those that it takes.

    From ZeRO-2 on every one's gradients are reduced among all replicas, so all compute as many as
    the one with most, and the last of some have no token that counts. That takes no longer, for
    they would wait.
    """
    return parallel.micro_batches if parallel.zero >= 2 else taken(parallel)[replica]


def idle(parallel: Parallel) -> float:
    """Share of the replicas' time that is spent on no sample, because others take more."""
    counts = taken(parallel)
    return 1 - sum(counts) / (len(counts) * max(counts))


def text(parallel: Parallel) -> str:
    """For people: "6 micro-batches"; "6+5+5 micro-batches"; of many replicas "2 x 6 + 14 x 5
    micro-batches"."""
    counts = taken(parallel)
    if len(set(counts)) == 1:
        return f"{counts[0]} micro-batches"
    if len(counts) > _LISTED:
        found = " + ".join(
            f"{counts.count(many)} x {many}" for many in sorted(set(counts), reverse=True)
        )
    else:
        found = "+".join(map(str, counts))
    return f"{found} micro-batches"


def firsts(counts: Sequence[int], replica: int) -> list[int]:
    """Which micro-batches of the step a replica takes, counted in the order of the data: round by
    round, in each one for every replica that has not had all of its own yet, in their order."""
    full_rounds = min(counts)
    result = [turn * len(counts) + replica for turn in range(full_rounds)]
    given = full_rounds * len(counts)
    for turn in range(full_rounds, counts[replica]):
        result.append(given + sum(count > turn for count in counts[:replica]))
        given += sum(count > turn for count in counts)
    return result


def check_batch(parallel: Parallel) -> str | None:
    """None, or one line: what contradicts the global batch."""
    counts = parallel.replica_micro_batches
    replicas = parallel.dp * parallel.ep
    if counts:
        name = f"replica_micro_batches {counts}"
        if len(counts) != replicas or min(counts) < 1:
            return f"{name} must be {replicas} numbers of at least 1"
        if max(counts) != parallel.micro_batches or min(counts) == max(counts):
            return f"{name} must differ, and the largest be micro_batches {parallel.micro_batches}"
    samples = sum(taken(parallel)) * parallel.micro_batch_size
    if samples != parallel.global_batch_samples:
        return (
            f"the replicas take {samples} samples a step, global_batch_samples is"
            f" {parallel.global_batch_samples}"
        )
    return None
