"""ZeRO-3 with a split backward: a rank holds whole weights within a step, and between steps its
shard of them."""

from __future__ import annotations

import pytest

from tests.beds.plans import make_plan
from tests.trainer.samples import engine_of, small
from trainer.precision import FP64
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch


@pytest.mark.process
def test_whole_weights_take_memory_within_a_step_only():
    plan = make_plan(
        dp=2,
        pp=2,
        zero=3,
        schedule="zb_h1",
        micro_batches=2,
        bucket_bytes=1 << 12,
        model=small(layers=4),
    )

    def work(rank):
        engine = engine_of(plan, rank, FP64)
        buckets = engine.buckets.buckets
        held = list[int]()

        def measure() -> None:
            held.append(sum(bucket.params.untyped_storage().nbytes() for bucket in buckets))

        finish = engine.buckets.finish

        def watched() -> None:
            measure()
            finish()

        engine.buckets.finish = watched
        batches = [micro_batch(plan, [2 * number + rank % 2]) for number in range(2)]
        measure()
        for _ in range(2):
            engine.update(engine.gradients(batches, 10)[1], 1e-3)
            measure()
        whole_bytes = sum(bucket.params.numel() for bucket in buckets) * 8
        shard_bytes = sum(bucket.param_shard.untyped_storage().nbytes() for bucket in buckets)
        return held, whole_bytes, shard_bytes

    for held, whole_bytes, shard_bytes in run_ranks(work, 4):
        assert held == [0, whole_bytes, 0, whole_bytes, 0]
        assert 2 * shard_bytes == whole_bytes
