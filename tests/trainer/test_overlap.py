"""Gradients are on their way before backward ends: the order of operations of a whole step says
so."""

from __future__ import annotations

import pytest
import torch

from orchestrator.plan.document import Moe
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.operations import Order
from tests.trainer.samples import engine_of, small
from tests.trainer.test_loop import finish, job, saved_state
from trainer.compat import DispatchMode
from trainer.precision import FP64
from trainer.train import Run
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

REDUCTION = {
    0: "c10d.allreduce",
    1: "c10d.alltoall_base",
    2: "c10d.alltoall_base",
    3: "c10d.alltoall_base",
}


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
            assert "mm" not in first[first.index(REDUCTION[zero]) :], (
                "it only counts, and reduces when all is there"
            )
        products = [position for position, name in enumerate(seen) if name == "mm"]
        sums = [position for position, name in enumerate(seen) if name == REDUCTION[zero]]
        before_the_end = [position for position in sums if position < products[-1]]
        assert len(before_the_end) > 1, (
            "several buckets are under way when backward computes its last gradient"
        )
        second_half = products[len(products) // 2]  # the second micro-batch
        if zero < 2:
            assert before_the_end[0] > second_half, "with accumulation gradients travel once a step"
        else:
            assert before_the_end[0] < second_half, (
                "shards of gradients are summed every micro-batch"
            )


def waits(engine):
    """Notes in the returned list when a bucket's gather is waited for, and when a matrix product
    starts."""
    seen = []
    for number, bucket in enumerate(engine.buckets.buckets):

        def wait_gather(number=number, real=bucket.wait_gather, bucket=bucket):
            if bucket.gathering is not None:
                seen.append(number)
            real()

        bucket.wait_gather = wait_gather

    class Products(DispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                seen.append("mm")
            return op(*args, **(kwargs or {}))

    return seen, Products()


@pytest.mark.process
@pytest.mark.parametrize(
    ("zero", "pp", "schedule"),
    [(1, 1, "1f1b"), (1, 2, "1f1b"), (2, 1, "1f1b"), (2, 2, "1f1b"), (3, 2, "zb_h1")],
)
def test_parameters_are_waited_for_by_the_layer_that_reads_them(zero, pp, schedule):
    """They are gathered after the update, or with ZeRO-3 when the next step starts."""
    plan = make_plan(
        dp=2,
        pp=pp,
        zero=zero,
        schedule=schedule,
        micro_batches=2,
        bucket_bytes=1 << 12,
        model=small(layers=4),
    )

    def work(rank):
        engine = engine_of(plan, rank, FP64)
        batches = [micro_batch(plan, [2 * number + rank % 2]) for number in range(2)]
        for _ in range(2):
            norm = engine.gradients(batches, 10)[1]
            engine.update(norm, 1e-3)
        under_way = sum(bucket.gathering is not None for bucket in engine.buckets.buckets)
        seen, products = waits(engine)
        with products:
            engine.gradients(batches, 10)
        unfinished = sum(bucket.gathering is not None for bucket in engine.buckets.buckets)
        return {
            "under_way": under_way,
            "seen": seen,
            "left": unfinished,
            "buckets": len(engine.buckets.buckets),
        }

    for result in run_ranks(work, 2 * pp):
        seen = result["seen"]
        assert result["under_way"] == (result["buckets"] if zero < 3 else 0)
        assert result["left"] == 0
        gathers = [at for at, operation in enumerate(seen) if operation != "mm"]
        products = [at for at, operation in enumerate(seen) if operation == "mm"]
        behind = [at for at in gathers if at > products[0]]
        assert len(gathers) == result["buckets"], "each is waited for once"
        assert len(behind) >= len(gathers) // 3, "gathers run beside the first layers"
        assert max(gathers) < products[len(products) // 2], "in the first forward"


@pytest.mark.process
def test_nothing_waits_behind_the_weights_that_are_gathered_for_the_next_step(
    cache, tmp_path, monkeypatch
):
    """Choices of experts and the losses of a logged step are summed by the replicas, whose
    communicator gathers the weights. The range of biases that it reports is that after the
    update."""
    moe = Moe(experts=4, top_k=2, ffn_hidden=32, bias_update=0.125)
    model = tiny_model(layers=2, moe=moe)
    plan = job(cache, steps=2, dp=2, zero=1, bucket_bytes=1 << 12, model=model)
    train_step = Run._train_step

    def watched_step(self, *args):
        with Order() as order:
            train_step(self, *args)
        operations = [name for name in order.seen if name.startswith("c10d.")]
        path = tmp_path / f"step-{self.step}.rank-{self.mesh.rank}"
        path.write_text("\n".join(operations))

    monkeypatch.setattr(Run, "_train_step", watched_step)
    codes, workers = finish(plan, tmp_path)
    assert codes == [0, 0]
    for path in tmp_path.glob("step-*.rank-*"):
        operations = path.read_text().split()
        sums = [at for at, name in enumerate(operations) if name == "c10d.allreduce"]
        behind = operations[sums[-1] + 1 :]
        assert len(sums) >= 4, "the norm, choices for biases, those that are logged, the loss"
        assert behind and set(behind) == {"c10d.broadcast"}, "weights are gathered"
    assert len([*tmp_path.glob("step-*.rank-*")]) == 4
    state = saved_state(tmp_path, plan, 2)
    step = workers.steps()[-1]
    assert step.experts.keys() == {"0", "1"}
    for layer, load in step.experts.items():
        (bias,) = {tuple(state[key].tolist()) for key in state if f"{layer}.mlp.router.bias" in key}
        assert load.bias == (min(bias), max(bias)) != (0.0, 0.0)


@pytest.mark.process
def test_a_parameter_used_before_its_gather_is_found():
    plan = make_plan(dp=2, zero=1, bucket_bytes=1 << 12)

    def work(rank):
        engine = engine_of(plan, rank, FP64)
        batches = [micro_batch(plan, [2 * number + rank]) for number in range(2)]
        engine.update(engine.gradients(batches, 10)[1], 1e-3)
        engine.part.stages[0].before = lambda layer: None
        try:
            engine.gradients(batches, 10)
        except RuntimeError as error:
            return str(error)
        return ""

    assert all("was used before it was gathered" in error_text for error_text in run_ranks(work, 2))


@pytest.mark.process
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sums_over_replicas_leave_during_backward(zero):
    plan = make_plan(dp=4, zero=zero, zero_group=2, micro_batches=2, bucket_bytes=1 << 12)

    def work(rank):
        engine = engine_of(plan, rank, FP64)
        batches = [micro_batch(plan, [4 * number + rank]) for number in range(2)]
        engine.gradients(batches, 10)
        with Order() as order:
            engine.gradients(batches, 10)
        return order.seen

    for seen in run_ranks(work, 4):
        products = [position for position, name in enumerate(seen) if name == "mm"]
        shards = [position for position, name in enumerate(seen) if name == REDUCTION[1]]
        replicas = [position for position, name in enumerate(seen) if name == REDUCTION[0]]
        assert sum(position < products[-1] for position in replicas) > 1, (
            "several before the last gradient is computed"
        )
        assert replicas[0] < shards[-1], "and before the last reduction starts"
        assert replicas[0] > products[len(products) // 2], "of the last micro-batch alone"
        if zero == 3:  # a message a unit: embedding, four blocks, norm and head; then the norm's
            assert len(replicas) == 7


@pytest.mark.process
@pytest.mark.parametrize("tp", [1, 2])
def test_zero3_gathers_and_reduces_the_ends_of_the_model_as_units_of_their_own(tp):
    """The head's gradient is on its way before the blocks' are computed, its weights come behind
    the first blocks."""
    plan = make_plan(dp=2, tp=tp, zero=3, micro_batches=1)

    def work(rank):
        engine = engine_of(plan, rank, FP64)
        engine.gradients([micro_batch(plan, [rank])], 10)
        with Order() as order:
            engine.gradients([micro_batch(plan, [rank])], 10)
        return order.seen

    for seen in run_ranks(work, 2 * tp):
        products = [position for position, name in enumerate(seen) if name == "mm"]
        forward = products[: len(products) // 3]
        backward = products[len(products) // 3 :]
        gathers = [position for position, name in enumerate(seen) if name == "c10d.broadcast"]
        ahead = [position for position in gathers if forward[0] < position < forward[-1]]
        assert ahead, "weights are gathered beside products of the forward"
        reductions = [position for position, name in enumerate(seen) if name == REDUCTION[3]]
        within = [
            position
            for position in reductions
            if backward[2] < position < backward[len(backward) // 3]
        ]
        assert within, "the head's shard of gradients leaves in the first third of backward"
