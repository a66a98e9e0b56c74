"""The position of each parameter in the flat buckets: a pure function of names and sizes.

A bucket is one contiguous buffer that one collective reduces and one optimizer call updates. So its
parameters must have the same dtype, weight decay, chain of gradient sums and norm ownership: the
kind, in `Item.key`. Parameters of different kinds never share a bucket.

Buckets follow the reverse of the registration order, because backward finishes the last layers
first. Every parameter starts on a multiple of `ALIGN` elements (vector loads, NCCL's 16-byte rule).
Every bucket is padded so that each of `shards` ranks owns an equal slice of it, whose length is a
multiple of `SHARD_ALIGN` (Megatron-LM's distributed optimizer: `mc/optimizer/param_layout.py`;
ZeRO, arXiv 1910.02054, section 5).

With a bound on buckets (ZeRO-R's constant-size buffers, CB, section 6.2), a parameter that is
larger is cut over several buckets, each with a run of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

ALIGN = 64  # elements; a parameter starts on a multiple of this
SHARD_ALIGN = 16  # elements; a shard's length is a multiple of this


@dataclass(frozen=True)
class Item:
    """A parameter to place in a bucket."""

    index: int  # in the caller's list
    numel: int
    key: Hashable = None  # its kind
    one_shard: bool = False  # whether it must lie in one shard; equal for all items of a kind
    align: int = SHARD_ALIGN  # elements that shards do not cut; equal for all items of a kind


@dataclass(frozen=True)
class Slot:
    """A parameter's elements `[start, start + numel)` of its bucket. Of a parameter that is cut
    over buckets, the elements before 0 and after the bucket's end are in its other buckets."""

    index: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Bucket:
    """The slots of one bucket in order."""

    key: Hashable
    slots: tuple[Slot, ...]
    numel: int  # with padding; a multiple of ALIGN and of shards * SHARD_ALIGN

    def shard(self, index: int, shards: int) -> tuple[int, int]:
        """Returns the elements [start, stop) that shard `index` of `shards` owns."""
        size = self.numel // shards
        return index * size, (index + 1) * size

    @property
    def continues(self) -> bool:
        """Whether the bucket holds later elements of a parameter that earlier buckets begin."""
        return self.slots[0].start < 0

    def rows(self, shards: int) -> list[tuple[int, int]]:
        """Returns no rows: shards of a flat bucket do not cut matrices into rows."""
        return []

    def param_ranges(self, index: int, shards: int) -> list[tuple[Slot, int, int]]:
        """Returns the slices of parameters inside a shard: (slot, start, stop) in the parameter's
        own flat elements."""
        low, high = self.shard(index, shards)
        ranges = [
            (
                slot,
                max(low, slot.start) - slot.start,
                min(high, slot.stop) - slot.start,
            )
            for slot in self.slots
        ]
        return [(slot, start, stop) for slot, start, stop in ranges if start < stop]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def make_layout(
    items: Sequence[Item],
    shards: int | Callable[[Hashable], int],
    bucket_numel: int,
    most_numel: int | None = None,
) -> list[Bucket]:
    """Returns buckets of at least `bucket_numel` elements (the last of each kind may be smaller),
    in the order in which backward completes them when it visits `items` last to first. `shards`:
    the shards of all kinds, or a function of the kind.

    No bucket has more than `most_numel` elements, if that is given; then buckets may be smaller,
    and the buckets of a parameter that is cut follow each other.

    Raises ValueError for an empty parameter, `shards` < 1, `bucket_numel` < 1, or a bound that is
    too small for the shards.
    """
    if bucket_numel < 1 or (isinstance(shards, int) and shards < 1):
        raise ValueError(f"shards ({shards}) and bucket_numel ({bucket_numel}) must be at least 1")
    open_buckets: dict[Hashable, _OpenBucket] = {}
    completed: list[tuple[int, Bucket]] = []  # (position at which backward completes it, bucket)
    for position, item in enumerate(reversed(items)):
        if item.numel < 1:
            raise ValueError(f"parameter {item.index} is empty")
        count = shards if isinstance(shards, int) else shards(item.key)
        open_bucket = open_buckets.get(item.key)
        limit = math.inf if most_numel is None else most_numel
        if open_bucket and open_bucket.with_item(item) > limit:
            del open_buckets[item.key]
            completed.append((open_bucket.position, open_bucket.close()))
        if most_numel is not None and _OpenBucket(item, count).with_item(item) > limit:
            cut = _cut(item, count, most_numel)
            completed += [(position, bucket) for bucket in cut]
            continue
        if item.key not in open_buckets:
            open_buckets[item.key] = _OpenBucket(item, count)
        bucket = open_buckets[item.key]
        bucket.add(item, position)
        if bucket.numel >= bucket.required_numel(bucket_numel):
            completed.append((position, open_buckets.pop(item.key).close()))
    completed += [(bucket.position, bucket.close()) for bucket in open_buckets.values()]
    return [bucket for _, bucket in sorted(completed, key=lambda pair: pair[0])]


def _cut(item: Item, shards: int, most_numel: int) -> list[Bucket]:
    """Returns the buckets of a parameter that is larger than `most_numel`."""
    unit = math.lcm(ALIGN, shards * item.align)
    size = most_numel // unit * unit
    if not size or item.one_shard:
        raise ValueError(
            f"buckets of {most_numel} elements cannot hold parameter {item.index}: at least"
            f" {_round_up(item.numel, unit) if item.one_shard else unit}"
        )
    return [
        Bucket(
            item.key,
            (
                Slot(
                    item.index,
                    -start,
                    item.numel,
                ),
            ),
            min(
                size,
                _round_up(item.numel - start, unit),
            ),
        )
        for start in range(
            0,
            item.numel,
            size,
        )
    ]


class _OpenBucket:
    """A bucket of one kind that is being filled."""

    def __init__(self, first: Item, shards: int):
        self.key = first.key
        self.one_shard = first.one_shard
        self.shards = shards
        self.slots: list[Slot] = []
        self.align = first.align
        self.position = 0  # of the latest item in the order of backward

    @property
    def numel(self) -> int:
        return self.slots[-1].stop if self.slots else 0

    def with_item(self, item: Item) -> int:
        """Returns the elements that the bucket has if it is closed after a further item."""
        end = _round_up(self.numel, ALIGN) + item.numel
        return _round_up(end, math.lcm(ALIGN, self.shards * item.align))

    def add(self, item: Item, position: int) -> None:
        self.slots.append(Slot(item.index, _round_up(self.numel, ALIGN), item.numel))
        self.align = item.align
        self.position = position

    def required_numel(self, bucket_numel: int) -> int:
        """Returns the elements at which the bucket is full; items in one shard need enough for
        every shard."""
        if not self.one_shard:
            return bucket_numel
        return max(bucket_numel, self.shards * max(slot.numel for slot in self.slots))

    def close(self) -> Bucket:
        if self.one_shard:
            return _balanced(self.key, self.slots, self.shards)
        numel = _round_up(self.numel, math.lcm(ALIGN, self.shards * self.align))
        return Bucket(self.key, tuple(self.slots), numel)


def _balanced(key: Hashable, slots: Sequence[Slot], shards: int) -> Bucket:
    """Returns a bucket of equal shards in which every parameter lies in one shard: the largest
    parameter is placed first, each into the emptiest shard (Graham 1969, "Bounds on multiprocessing
    timing anomalies": at most 4/3 of the best)."""
    filled = [0] * shards
    placed = list[tuple[int, int, Slot]]()
    for slot in sorted(slots, key=lambda slot: (-slot.numel, slot.index)):
        shard = filled.index(min(filled))
        placed.append((shard, filled[shard], slot))
        filled[shard] = _round_up(filled[shard] + slot.numel, ALIGN)
    size = max(filled)
    moved = [Slot(slot.index, shard * size + start, slot.numel) for shard, start, slot in placed]
    return Bucket(
        key,
        tuple(sorted(moved, key=lambda slot: slot.start)),
        shards * size,
    )
