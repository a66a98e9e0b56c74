"""The order of samples is a bijection, a pure function, well mixed, and the same for every
layout."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan.document import Coord
from tests.beds.plans import make_plan
from trainer.data.order import Permutation, SampleOrder, samples_at, samples_of_step

SEEDS = st.integers(0, 2**63 - 1)


@given(st.integers(1, 3000), SEEDS, st.integers(0, 1000))
def test_a_permutation_is_a_bijection(size, seed, epoch):
    permutation = Permutation(size, seed, epoch)
    assert sorted(permutation(index) for index in range(size)) == list(range(size))


@given(
    st.integers(2**40, 2**62),
    SEEDS,
    st.lists(st.integers(0, 2**40 - 1), min_size=2, max_size=20, unique=True),
)
def test_a_large_permutation_stays_inside_and_apart(size, seed, indices):
    images = [Permutation(size, seed, 0)(index) for index in indices]
    assert all(0 <= image < size for image in images) and len(set(images)) == len(indices)


def test_the_order_of_today_is_the_order_of_tomorrow():
    """A changed permutation would silently change what a resumed run reads: this one is frozen."""
    assert [Permutation(10, 1234, 0)(i) for i in range(10)] == [1, 8, 4, 6, 2, 5, 3, 0, 7, 9]
    assert [Permutation(10**9, 7, 3)(i) for i in (0, 1, 10**9 - 1)] == [
        630556434,
        871524436,
        87986755,
    ]


def test_seeds_and_epochs_give_different_orders():
    orders = {
        tuple(Permutation(50, seed, epoch)(i) for i in range(50))
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 400


@pytest.mark.parametrize("size", [4, 6, 10])
def test_small_permutations_are_uniform(size):
    """Chi-squared over where each index goes, for 4000 seeds: within five sigma of its mean."""
    trials = 4000
    counts = np.zeros((size, size))
    for seed in range(trials):
        permutation = Permutation(size, seed, 0)
        for index in range(size):
            counts[index, permutation(index)] += 1
    expected = trials / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_neighbours_do_not_stay_neighbours():
    permutation = Permutation(100_000, 5, 0)
    images = np.array([permutation(index) for index in range(2000)])
    assert abs(np.corrcoef(np.arange(2000), images)[0, 1]) < 0.1
    assert np.median(np.abs(np.diff(images))) > 20_000


def test_outside_is_an_error():
    for index in (-1, 5):
        with pytest.raises(IndexError):
            Permutation(5, 0, 0)(index)
    with pytest.raises(ValueError):
        Permutation(0, 0, 0)


@given(st.integers(1, 60), SEEDS, st.integers(1, 4))
def test_each_epoch_visits_each_sample_once(samples, seed, epochs):
    order = SampleOrder(samples, seed)
    for epoch in range(epochs):
        assert sorted(order(epoch * samples + i) for i in range(samples)) == list(range(samples))


@given(st.integers(1, 60), SEEDS, st.lists(st.integers(0, 500), max_size=30))
def test_order_has_no_memory(samples, seed, positions):
    order = SampleOrder(samples, seed)
    assert [order(position) for position in positions] == [
        SampleOrder(samples, seed)(position) for position in positions
    ]


LAYOUTS = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (2, 4), (8, 1)])


@given(LAYOUTS, st.integers(1, 3), st.sampled_from([1, 2]), st.integers(0, 10_000))
def test_a_step_reads_the_same_samples_on_every_layout(layout, accumulation, size, consumed):
    dp, ep = layout
    plan = make_plan(dp=dp, ep=ep, tp=2, micro_batch_size=size, micro_batches=accumulation)
    read = {}
    for rank in plan.ranks:
        rank_samples = samples_of_step(plan.parallel, rank.coord, consumed)
        assert [len(micro) for micro in rank_samples] == [size] * accumulation
        assert (
            read.setdefault((rank.coord.dp, rank.coord.ep), rank_samples) == rank_samples
        )  # tp neighbours agree
    everything = sorted(
        sample for rank_samples in read.values() for micro in rank_samples for sample in micro
    )
    assert everything == list(range(consumed, consumed + plan.parallel.global_batch_samples))


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=6),
    st.sampled_from([1, 2]),
    st.integers(0, 10_000),
)
def test_replicas_of_unequal_shares_read_each_sample_once(counts, size, consumed):
    if len(set(counts)) == 1:
        counts[0] += 1
    par = make_plan(dp=len(counts), replica_micro_batches=counts, micro_batch_size=size).parallel
    read = [
        samples_of_step(par, Coord(pp=0, dp=dp, cp=0, ep=0, tp=0), consumed) for dp in range(par.dp)
    ]
    assert [len(replica_samples) for replica_samples in read] == counts and {
        len(micro) for replica_samples in read for micro in replica_samples
    } == {size}
    everything = sorted(
        sample for replica_samples in read for micro in replica_samples for sample in micro
    )
    assert everything == list(range(consumed, consumed + samples_at(par, None, consumed)))


def test_a_place_far_out_costs_no_more_than_the_first():
    begin = time.perf_counter()
    SampleOrder(10**12, 1)(10**15 + 7)
    assert time.perf_counter() - begin < 5  # seconds: it would be years if it walked there
