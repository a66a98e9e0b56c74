"""The simulated caching allocator against a naive one on random sequences, and against the numbers
that torch documents; and a recorded step that is played through it."""

from __future__ import annotations

import random

import pytest

from tests.beds.plans import make_plan, tiny_model
from tests.reference.caching_allocator import NaiveAllocator
from trainer.twin.allocations import record
from trainer.twin.caching_allocator import CachingAllocator, Event, OutOfMemory, measure

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # less than 1 MiB would be left: not split
        (13 * MIB + 1, 14 * MIB, 14 * MIB),
    ],
)
def test_a_first_request_gets_its_segment(size, allocated, reserved):
    allocator = CachingAllocator()
    allocator.allocate(0, size)
    assert allocator.statistics[:2] == (allocated, reserved)
    allocator.free(0)
    assert allocator.statistics == (0, reserved, 0)
    allocator.empty_cache()
    assert allocator.reserved == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_sequences_end_as_with_the_naive_allocator(seed):
    draw = random.Random(seed)
    allocator = CachingAllocator()
    naive = NaiveAllocator()
    live = list[int]()
    sizes = [600, 3000, 70_000, MIB, 2 * MIB, 3 * MIB + 5, 8 * MIB, 11 * MIB, 33 * MIB]
    for storage in range(400):
        if live and draw.random() < 0.48:
            freed = live.pop(draw.randrange(len(live)))
            allocator.free(freed)
            naive.free(freed)
        size = draw.choice(sizes) + draw.randrange(2000)
        allocator.allocate(storage, size)
        naive.allocate(storage, size)
        live.append(storage)
        assert tuple(allocator.statistics) == naive.statistics()


def test_long_lived_tensors_between_short_lived_ones_take_more_than_they_hold():
    """The paper's case: every second tensor stays, so the holes hold no tensor that is larger."""
    steps = [Event(number, 4 * MIB) for number in range(20)]
    steps += [Event(number, 0) for number in range(0, 20, 2)]
    steps += [Event(20 + number, 8 * MIB) for number in range(5)]
    among = measure([], steps)
    apart = measure([], [event for event in steps if event.storage >= 20 or event.storage % 2])
    assert among.allocated == apart.allocated == 80 * MIB
    assert among.least_capacity > apart.least_capacity
    with pytest.raises(OutOfMemory, match="are free, at most 4194304 of them in one piece"):
        CachingAllocator(80 * MIB).play(steps)


def test_a_recorded_step_repeats_itself_and_names_what_lives_on():
    """Forward and backward of a rank: of what the last step allocates nothing stays but what
    replaces it, and the reserved inputs are one allocation before the first step."""
    model = tiny_model(hidden=64)
    plans = {
        reserved: make_plan(
            model=model,
            seq_len=32,
            recompute="full",
            contiguous_activations=reserved,
        )
        for reserved in (False, True)
    }
    phases = {reserved: record(plan, 0, steps=3) for reserved, plan in plans.items()}
    buffer = model.layers * 32 * 64 * 4
    for reserved, (start, _, second, third) in phases.items():
        assert [event.size for event in second] == [event.size for event in third]
        assert sum(event.size == buffer for event in start) == reserved
        balance = sum(1 if event.size else -1 for event in third)
        assert balance == 0
