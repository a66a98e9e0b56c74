"""Position of each parameter in the flat buckets: a pure function of names and sizes.

A bucket is one contiguous buffer that is reduced by one collective and updated by one optimizer
call. So its parameters must have the same dtype, weight decay, chain of gradient sums and norm
ownership: the kind, in `Item.key`. Parameters of different kinds never share a bucket.

Buckets follow the reverse of the registration order, because backward finishes the last layers
first. Every parameter starts on a multiple of `ALIGN` elements (vector loads, NCCL's 16-byte rule)
and every bucket is padded so that each of `shards` ranks owns an equal piece of every bucket,
itself a multiple of `SHARD_ALIGN` (Megatron-LM's distributed optimizer:
`mc/optimizer/param_layout.py`; ZeRO, arXiv 1910.02054, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

ALIGN = 64  # elements; a parameter starts on a multiple of this
SHARD_ALIGN = 16  # elements; a shard's length is a multiple of this


@dataclass(frozen=True)
class Item:
    """A parameter to place: `index` in the caller's list, its size in elements, its kind, and
    whether shards may cut it."""

    index: int
    numel: int
    key: Hashable = None
    whole: bool = False  # it must lie in one shard; equal for all items of a kind
    align: int = SHARD_ALIGN  # elements that shards do not cut; equal for all items of a kind


@dataclass(frozen=True)
class Slot:
    """A parameter's elements `[start, start + numel)` of its bucket."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    key: Hashable
    slots: tuple[Slot, ...]
    numel: int  # with padding; a multiple of ALIGN and of shards * SHARD_ALIGN

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        """The half-open range of elements that shard `index` of `shards` owns."""
        size = self.numel // shards
        return index * size, (index + 1) * size

    def rows(self, shards: int) -> list[tuple[int, int]]:
        return []

    def param_ranges(self, index: int, shards: int) -> list[tuple[Slot, int, int]]:
        """The parts of parameters inside a shard: (slot, start, stop) in the parameter's own flat
        elements."""
        low, high = self.shard(index, shards)
        cuts = [(s, max(low, s.start) - s.start, min(high, s.stop) - s.start) for s in self.slots]
        return [cut for cut in cuts if cut[1] < cut[2]]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def make_layout(
    items: Sequence[Item], shards: int | Callable[[Hashable], int], bucket_numel: int
) -> list[Bucket]:
    """Buckets of at least `bucket_numel` elements (the last of each kind may be smaller), in the
    order in which backward completes them when it visits `items` last to first. `shards`: of all
    kinds, or of the kind that it is called with.

    Raises ValueError for an empty parameter, `shards` < 1 or `bucket_numel` < 1.
    """
    if bucket_numel < 1 or (isinstance(shards, int) and shards < 1):
        raise ValueError(f"shards ({shards}) and bucket_numel ({bucket_numel}) must be at least 1")
    open_slots: dict[Hashable, list[Slot]] = {}
    done: list[tuple[int, Bucket]] = []  # (position at which backward completes it, bucket)

    def shards_of(key: Hashable) -> int:
        return shards if isinstance(shards, int) else shards(key)

    def close(key: Hashable, position: int) -> None:
        slots = open_slots.pop(key)
        count = shards_of(key)
        if key in uncut:
            done.append((position, _balanced(key, slots, count)))
            return
        numel = _round_up(slots[-1].stop, math.lcm(ALIGN, count * align[key]))
        done.append((position, Bucket(key, tuple(slots), numel)))

    last_of_kind: dict[Hashable, int] = {}
    uncut = set[Hashable]()
    align = dict[Hashable, int]()
    for position, item in enumerate(reversed(items)):
        if item.numel < 1:
            raise ValueError(f"parameter {item.index} is empty")
        slots = open_slots.setdefault(item.key, [])
        start = _round_up(slots[-1].stop, ALIGN) if slots else 0
        slots.append(Slot(item.index, start, item.numel))
        last_of_kind[item.key], align[item.key] = position, item.align
        min_numel = bucket_numel
        if item.whole:  # enough for every shard
            uncut.add(item.key)
            min_numel = max(min_numel, shards_of(item.key) * max(slot.numel for slot in slots))
        if slots[-1].stop >= min_numel:
            close(item.key, position)
    for key in list(open_slots):
        close(key, last_of_kind[key])
    return [bucket for _, bucket in sorted(done, key=lambda pair: pair[0])]


def _balanced(key: Hashable, slots: Sequence[Slot], shards: int) -> Bucket:
    """A bucket in which every parameter lies in one of equal shards: the largest first, each into
    the emptiest shard (Graham 1969, "Bounds on multiprocessing timing anomalies": at most 4/3 of
    the best)."""
    filled = [0] * shards
    placed = list[tuple[int, int, Slot]]()
    for slot in sorted(slots, key=lambda slot: (-slot.numel, slot.index)):
        shard = filled.index(min(filled))
        placed.append((shard, filled[shard], slot))
        filled[shard] = _round_up(filled[shard] + slot.numel, ALIGN)
    size = max(filled)
    moved = [Slot(slot.index, shard * size + start, slot.numel) for shard, start, slot in placed]
    return Bucket(key, tuple(sorted(moved, key=lambda slot: slot.start)), shards * size)
