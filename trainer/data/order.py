"""The order of samples: a pure function of (seed, number of samples consumed), the same for every
layout.

An epoch visits each sample once, in the order of a keyed permutation that is computed, not stored:
a Feistel network over the smallest even number of bits that holds the index, applied until the
result is in range (cycle-walking; Black & Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002). Any index takes O(1) time and memory, so a resume costs nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from orchestrator.plan.batch import firsts, replica_of, taken
from orchestrator.plan.document import BatchRamp, Coord, Parallel

#: Four rounds are indistinguishable from random in theory (Luby & Rackoff 1988); two more are for
#: tiny domains.
_ROUNDS = 6
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0..size-1, chosen by (seed, epoch)."""

    size: int
    seed: int
    epoch: int
    _half_bits: int = field(init=False, repr=False)
    _keys: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError("a permutation needs at least one element")
        key_source = f"orch.order/1 {self.seed} {self.epoch} {self.size}".encode()
        digest = hashlib.blake2b(key_source, digest_size=8 * _ROUNDS).digest()
        keys = tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))
        object.__setattr__(self, "_keys", keys)
        object.__setattr__(
            self,
            "_half_bits",
            max(1, ((self.size - 1).bit_length() + 1) // 2),
        )

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(f"index {index} is outside 0..{self.size - 1}")
        half_bits = self._half_bits
        mask = (1 << self._half_bits) - 1
        while True:
            high = index >> half_bits
            low = index & mask
            for key in self._keys:
                mixed = high ^ (_mix(low ^ key) & mask)
                high = low
                low = mixed
            index = high << half_bits | low
            if index < self.size:
                return index


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea & Flood, OOPSLA 2014): every input bit affects every
    output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


class SampleOrder:
    """Maps the n-th sample that the run consumes, over all epochs, to its number in the corpus."""

    def __init__(self, samples: int, seed: int):
        self.samples = samples
        self.seed = seed
        self._epoch = Permutation(samples, seed, 0)

    def __call__(self, consumed: int) -> int:
        epoch, index = divmod(consumed, self.samples)
        if epoch != self._epoch.epoch:
            self._epoch = Permutation(self.samples, self.seed, epoch)
        return self._epoch(index)


def micro_batches_at(parallel: Parallel, ramp: BatchRamp | None, consumed: int) -> int:
    """Returns the micro-batches per rank of the step that starts after `consumed` samples: all, or
    fewer during a ramp.

    During a ramp the global batch is `start + (full - start) * consumed / over`, rounded down to
    whole micro-batches on every replica (at least one each); DeepSeek-V3 ramps like this, arXiv
    2412.19437, section 4.2. If replicas take unequal numbers, which excludes a ramp, it is the
    largest.
    """
    if ramp is None or consumed >= ramp.over_samples:
        return parallel.micro_batches
    unit = parallel.micro_batch_size * parallel.dp * parallel.ep
    grown = (parallel.global_batch_samples - ramp.start_samples) * consumed // ramp.over_samples
    return max(1, (ramp.start_samples + grown) // unit)


def samples_at(parallel: Parallel, ramp: BatchRamp | None, consumed: int) -> int:
    """Returns the samples, over all ranks, of the step that starts after `consumed` samples."""
    counts = _counts(parallel, micro_batches_at(parallel, ramp, consumed))
    return sum(counts) * parallel.micro_batch_size


def samples_of_step(
    parallel: Parallel,
    coord: Coord,
    consumed: int,
    micro_batches: int | None = None,
) -> list[list[int]]:
    """Returns the indices in the global order that a rank reads in the step that starts after
    `consumed` samples: [micro-batches of this replica][micro_batch_size].

    A step takes the next `global_batch_samples` indices, whatever the layout: micro-batch by
    micro-batch, and within one replica by replica (dp outermost, then ep), without the replicas
    that have already had all of theirs. Ranks that differ only in tp, cp or pp read the same
    samples. `micro_batches` is the number of this step, if it is not the plan's.
    """
    size = parallel.micro_batch_size
    counts = _counts(parallel, micro_batches)
    starts = (consumed + first * size for first in firsts(counts, replica_of(parallel, coord)))
    return [list(range(start, start + size)) for start in starts]


def _counts(parallel: Parallel, micro_batches: int | None) -> list[int]:
    if micro_batches in (None, parallel.micro_batches):
        return taken(parallel)
    return [micro_batches] * (parallel.dp * parallel.ep)
