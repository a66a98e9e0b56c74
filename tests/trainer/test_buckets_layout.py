"""The bucket layout is a pure function: its promises, as properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.data.layout import ALIGN, SHARD_ALIGN, Item, make_layout

SIZES = st.lists(st.tuples(st.integers(1, 5000), st.sampled_from("abc")), min_size=1, max_size=40)
SHARDS = st.integers(1, 9)
BUCKET = st.integers(1, 20_000)


def items_of(sizes) -> list[Item]:
    return [Item(index, numel, key) for index, (numel, key) in enumerate(sizes)]


@given(SIZES, SHARDS, BUCKET)
def test_every_parameter_is_placed_once_aligned_and_apart(sizes, shards, bucket_numel):
    layout = make_layout(items_of(sizes), shards, bucket_numel)
    placed = sorted(slot.index for bucket in layout for slot in bucket.slots)
    assert placed == list(range(len(sizes)))
    for bucket in layout:
        end = 0
        for slot in bucket.slots:
            assert slot.start % ALIGN == 0 and slot.start >= end
            assert slot.numel == sizes[slot.index][0] and sizes[slot.index][1] == bucket.key
            end = slot.stop
        assert end <= bucket.numel


@given(SIZES, SHARDS, BUCKET)
def test_shards_are_equal_aligned_and_cover_each_element_once(sizes, shards, bucket_numel):
    held = {index: [0] * numel for index, (numel, _) in enumerate(sizes)}
    for bucket in make_layout(items_of(sizes), shards, bucket_numel):
        ranges = [bucket.shard(index, shards) for index in range(shards)]
        assert [low for low, _ in ranges] == [i * bucket.numel // shards for i in range(shards)]
        assert ranges[-1][1] == bucket.numel and (bucket.numel // shards) % SHARD_ALIGN == 0
        for index in range(shards):
            for slot, start, stop in bucket.param_ranges(index, shards):
                assert (
                    ranges[index][0] <= slot.start + start < slot.start + stop <= ranges[index][1]
                )
                for element in range(start, stop):
                    held[slot.index][element] += 1
    assert all(set(counts) == {1} for counts in held.values())


@given(SIZES, SHARDS, BUCKET)
def test_only_the_last_bucket_of_a_kind_is_smaller_than_asked(sizes, shards, bucket_numel):
    layout = make_layout(items_of(sizes), shards, bucket_numel)
    for key in {bucket.key for bucket in layout}:
        for bucket in [b for b in layout if b.key == key][:-1]:
            assert (
                bucket.slots[-1].stop
                >= bucket_numel
                > (bucket.slots[-2].stop if len(bucket.slots) > 1 else 0)
            )


@given(SIZES, SHARDS, BUCKET)
def test_buckets_stand_in_the_order_in_which_backward_completes_them(sizes, shards, bucket_numel):
    layout = make_layout(items_of(sizes), shards, bucket_numel)
    completed = [min(slot.index for slot in bucket.slots) for bucket in layout]
    assert completed == sorted(completed, reverse=True)
    for bucket in layout:  # and inside a bucket, last layer first
        indices = [slot.index for slot in bucket.slots]
        assert indices == sorted(indices, reverse=True)


def test_one_bucket_and_many():
    items = [Item(i, 100) for i in range(10)]
    assert len(make_layout(items, 2, 10**9)) == 1
    assert len(make_layout(items, 2, 1)) == 10


@pytest.mark.parametrize("shards, numel, size", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nonsense_is_refused(shards, numel, size):
    with pytest.raises(ValueError):
        make_layout([Item(0, size)], shards, numel)


@given(SIZES, SHARDS, BUCKET)
def test_what_is_whole_lies_in_one_shard_and_shards_are_balanced(sizes, shards, bucket_numel):
    items = [Item(index, numel, key, one_shard=True) for index, (numel, key) in enumerate(sizes)]
    held = []
    for bucket in make_layout(items, shards, bucket_numel):
        loads = []
        end = 0
        for index in range(shards):
            ranges = bucket.param_ranges(index, shards)
            assert all((start, stop) == (0, slot.numel) for slot, start, stop in ranges)
            held += [slot.index for slot, _, _ in ranges]
            loads.append(sum(slot.numel for slot, _, _ in ranges))
        for slot in bucket.slots:
            assert slot.start % ALIGN == 0 and slot.start >= end
            end = slot.stop
        assert max(loads) <= sum(loads) / shards + max(
            slot.numel for slot in bucket.slots
        ) + ALIGN * len(bucket.slots)
        assert bucket.numel % (shards * SHARD_ALIGN) == 0
    assert sorted(held) == list(range(len(sizes)))
