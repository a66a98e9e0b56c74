"""Gradients are on their way before backward ends: the order of operations of a whole step says so."""

from __future__ import annotations

import pytest

from tests.beds.plans import make_plan
from tests.trainer.operations import Order
from tests.trainer.samples import engine_of
from trainer.precision import FP64
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

REDUCTION = {0: "c10d.allreduce", 1: "c10d.alltoall_base", 2: "c10d.alltoall_base", 3: "c10d.alltoall_base"}


@pytest.mark.process
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_reductions_start_while_backward_computes(zero):
    plan = make_plan(dp=2, zero=zero, micro_batches=2, bucket_bytes=1 << 12)

    def work(rank):
        engine = engine_of(plan, rank, FP64)
        batches = [micro_batch(plan, [2 * number + rank]) for number in range(2)]
        with Order() as first:  # the first step learns in which order gradients come
            engine.gradients(batches, 10)
        with Order() as order:
            engine.gradients(batches, 10)
        return [first.seen, order.seen]

    for first, seen in run_ranks(work, 2):
        if zero < 2:
            assert "mm" not in first[first.index(REDUCTION[zero]) :], "it only counts, and reduces when all is there"
        products = [place for place, name in enumerate(seen) if name == "mm"]
        sums = [place for place, name in enumerate(seen) if name == REDUCTION[zero]]
        before_the_end = [place for place in sums if place < products[-1]]
        assert len(before_the_end) > 1, "several buckets are under way when backward computes its last gradient"
        second_half = products[len(products) // 2]  # the second micro-batch
        if zero < 2:
            assert before_the_end[0] > second_half, "with accumulation gradients travel once a step"
        else:
            assert before_the_end[0] < second_half, "shards of gradients are summed every micro-batch"
