"""Torch's caching allocator of CUDA memory, simulated: which segments a sequence of allocations
takes from the device, and how much of them is in pieces that nothing fits into.

As `c10/cuda/CUDACachingAllocator.cpp` does by default: sizes are rounded up to 512 bytes; those up
to 1 MiB share segments of 2 MiB, others below 10 MiB segments of 20 MiB, and larger ones get a
segment rounded up to 2 MiB. A request takes the smallest free block that it fits into, and splits
it if the rest is of use: from 512 bytes on in the small pool, above 1 MiB in the large one. A freed
block joins its free neighbours. Only if the device has no more memory are segments returned that
are free as a whole. Streams and expandable segments are not simulated.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MIB = 1 << 20
ROUND = 512  # bytes; requests are rounded up to it
SMALL = MIB  # bytes of the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
LEAST_OWN_SEGMENT = 10 * MIB  # from this request on a segment has the request's size
SEGMENT_ROUND = 2 * MIB
TOLERANCE = 2 * MIB  # of the least capacity


class OutOfMemory(RuntimeError):
    """The device has too little memory, although all segments without tensors were returned."""


class Event(NamedTuple):
    """A tensor's storage is allocated, or freed (`size` 0)."""

    storage: int  # its number, for its allocation and its free
    size: int


class Statistics(NamedTuple):
    """Bytes, under the names that `torch.cuda.memory_stats` gives them."""

    allocated: int  # in blocks of tensors
    reserved: int  # in segments
    inactive_split: int  # free pieces of segments of which other pieces are in use


class _Block:
    """A piece of a segment, between its neighbours."""

    __slots__ = ("address", "free", "left", "pool", "right", "size")

    def __init__(self, pool: _Pool, address: int, size: int):
        self.pool = pool
        self.address = address
        self.size = size
        self.free = True
        self.left: _Block | None = None
        self.right: _Block | None = None

    @property
    def is_segment(self) -> bool:
        return self.left is None and self.right is None


class _Pool:
    """The free blocks of one kind of segments, the smallest first."""

    def __init__(self, least_rest: int):
        self.least_rest = least_rest  # bytes from which on the rest of a block becomes a block
        self.blocks = dict[int, _Block]()  # by address
        self.order = list[tuple[int, int]]()  # (size, address)

    def add(self, block: _Block) -> None:
        block.free = True
        self.blocks[block.address] = block
        insort(self.order, (block.size, block.address))

    def remove(self, block: _Block) -> None:
        block.free = False
        del self.blocks[block.address]
        del self.order[bisect_left(self.order, (block.size, block.address))]

    def best_fit(self, size: int) -> _Block | None:
        """Returns the smallest free block of at least `size` bytes."""
        index = bisect_left(self.order, (size, 0))
        if index == len(self.order):
            return None
        return self.blocks[self.order[index][1]]


class CachingAllocator:
    """The allocator of one device of `capacity` bytes."""

    def __init__(self, capacity: int = 1 << 62):
        self.capacity = capacity
        self.allocated = 0
        self.reserved = 0
        self._small = _Pool(ROUND)
        self._large = _Pool(SMALL + 1)
        self._next_address = 0  # segments never touch
        self._in_use = dict[int, _Block]()  # by storage

    @property
    def statistics(self) -> Statistics:
        inactive = sum(
            block.size
            for pool in (self._small, self._large)
            for block in pool.blocks.values()
            if not block.is_segment
        )
        return Statistics(self.allocated, self.reserved, inactive)

    @property
    def largest_free(self) -> int:
        """Bytes of the largest request that takes no new segment."""
        return max(
            (pool.order[-1][0] for pool in (self._small, self._large) if pool.order), default=0
        )

    def allocate(self, storage: int, size: int) -> None:
        """Raises OutOfMemory."""
        rounded = _round_up(max(size, 1), ROUND)
        pool = self._small if rounded <= SMALL else self._large
        block = pool.best_fit(rounded)
        if block is None:
            block = self._new_segment(pool, rounded)
        pool.remove(block)
        if block.size - rounded >= pool.least_rest:
            self._split(block, rounded)
        self.allocated += block.size
        self._in_use[storage] = block

    def free(self, storage: int) -> None:
        block = self._in_use.pop(storage)
        self.allocated -= block.size
        for neighbour in (block.left, block.right):
            if neighbour is not None and neighbour.free:
                block.pool.remove(neighbour)
                _join(block, neighbour)
        block.pool.add(block)

    def play(self, events: Iterable[Event]) -> None:
        """Allocates and frees in order. Raises OutOfMemory."""
        for event in events:
            if event.size:
                self.allocate(event.storage, event.size)
            else:
                self.free(event.storage)

    def _split(self, block: _Block, size: int) -> None:
        """Cuts a block after `size` bytes; the rest is free."""
        rest = _Block(block.pool, block.address + size, block.size - size)
        rest.left = block
        rest.right = block.right
        if block.right is not None:
            block.right.left = rest
        block.right = rest
        block.size = size
        block.pool.add(rest)

    def _new_segment(self, pool: _Pool, size: int) -> _Block:
        segment_size = _segment_size(size)
        if self.reserved + segment_size > self.capacity:
            self.empty_cache()
        if self.reserved + segment_size > self.capacity:
            raise OutOfMemory(
                f"{size} bytes: {self.reserved - self.allocated} of {self.reserved} reserved bytes"
                f" are free, at most {self.largest_free} of them in one piece"
            )
        block = _Block(pool, self._next_address, segment_size)
        self._next_address += segment_size + ROUND
        self.reserved += segment_size
        pool.add(block)
        return block

    def empty_cache(self) -> None:
        """Returns the segments without tensors to the device."""
        for pool in (self._small, self._large):
            for block in [block for block in pool.blocks.values() if block.is_segment]:
                pool.remove(block)
                self.reserved -= block.size


def _join(block: _Block, neighbour: _Block) -> None:
    """Makes a block that is being freed as large as itself and its free neighbour."""
    if neighbour is block.left:
        block.address = neighbour.address
        block.left = neighbour.left
        if block.left is not None:
            block.left.right = block
    else:
        block.right = neighbour.right
        if block.right is not None:
            block.right.left = block
    block.size += neighbour.size


def _segment_size(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    if size < LEAST_OWN_SEGMENT:
        return LARGE_SEGMENT
    return _round_up(size, SEGMENT_ROUND)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Fragmentation(NamedTuple):
    """How much more than its tensors a sequence of allocations takes, in bytes."""

    allocated: int  # the most in blocks of tensors
    reserved: int  # the most in segments, on a device that is large enough
    inactive_split: int  # in free pieces of segments, when the most is allocated
    least_capacity: int  # of the smallest device on which the sequence can be played


def measure(start: Sequence[Event], steps: Sequence[Event]) -> Fragmentation:
    """Plays `steps` on a device whose free segments were returned after `start`."""
    allocator = _started(start)
    allocated = allocator.allocated
    reserved = allocator.reserved
    inactive_split = 0
    for event in steps:
        allocator.play([event])
        reserved = max(reserved, allocator.reserved)
        if allocator.allocated > allocated:
            allocated = allocator.allocated
            inactive_split = allocator.statistics.inactive_split
    low = allocated - 1
    high = reserved
    while high - low > TOLERANCE:
        middle = (low + high) // 2
        allocator = _started(start)
        allocator.capacity = middle
        try:
            allocator.play(steps)
            high = middle
        except OutOfMemory:
            low = middle
    return Fragmentation(allocated, reserved, inactive_split, high)


def _started(start: Iterable[Event]) -> CachingAllocator:
    allocator = CachingAllocator()
    allocator.play(start)
    allocator.empty_cache()
    return allocator
