"""Inputs of recomputed layers shared by tensor-parallel ranks: the same gradients, 1/tp of the
bytes, few messages."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.config.compose import load
from orchestrator.cost.memory.activations import activations
from orchestrator.cost.model.stages import rank_stages
from orchestrator.cost.software import SOFTWARE
from orchestrator.cost.time.traffic import step_traffic
from orchestrator.cost.workload import Workload
from tests.beds.plans import make_plan
from tests.planner.configs import build_plan
from tests.trainer.samples import GQA, LLAMA, batch, engine_of, small
from tests.trainer.test_recompute import live_soon
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.data.order import samples_of_step
from trainer.metrics.memory import StorageTracker
from trainer.parallel.apply import build
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

#: mode of recomputation -> inputs of a layer that it keeps
KEPT = {"full": 1, "selective": 2}


#: An input of 15 x 33 elements is no whole number of them for each of two ranks.
ODD = {"hidden": 33, "seq_len": 15, "micro_batch_size": 1}


def plan_of(mode: str, shared: bool, layers: int = 2, hidden: int = 32, **values):
    values = {"tp": 2, "sp": False, "micro_batches": 1, "micro_batch_size": 2} | values
    model = small(**LLAMA, **GQA, layers=layers, hidden=hidden)
    return make_plan(model=model, recompute=mode, partition_activations=shared, **values)


def with_and_without(rank: int, mode: str, shape: dict) -> list[dict]:
    measurements = []
    for shared in (False, True):
        plan = plan_of(mode, shared, **shape)
        samples = plan.parallel.micro_batch_size
        model_part = build(plan, Mesh.from_plan(plan, rank), CommCounter())
        (stage,) = model_part.stages
        data = batch(plan.model, samples, plan.job.train.seq_len, 0, True)
        with StorageTracker() as tracker:
            loss = model_part.loss(stage(None, data), data.targets)
            kept_bytes = min(live_soon(tracker) for _ in range(20))
        loss.backward()
        engine = engine_of(plan, rank)
        batches = [
            micro_batch(plan, indices)
            for indices in samples_of_step(plan.parallel, engine.mesh.coord, 0)
        ]
        engine.gradients(batches, 100)
        measurements.append(
            {
                "kept": kept_bytes,
                "sent": engine.counter.take()[0]["tp"],
                "grads": engine.buckets.full_grads(),
            }
        )
    return measurements


@pytest.mark.process
@pytest.mark.parametrize("shape", [{}, ODD], ids=["even", "odd"])
@pytest.mark.parametrize("mode", KEPT)
def test_half_the_inputs_and_the_same_gradients(mode, shape):
    plans = [plan_of(mode, shared, **shape) for shared in (False, True)]
    planned = [
        activations(Workload(plan.model, plan.parallel, plan.job.train))[0] for plan in plans
    ]
    sent = [sum(message.sent_bytes for message in traffic(plan)) for plan in plans]
    plan = plans[0]
    filled = KEPT[mode] * plans[0].model.layers * 2 * bool(shape)
    inputs = KEPT[mode] * plan.model.layers * plan.job.train.seq_len * plan.model.hidden * 4
    inputs *= plan.parallel.micro_batch_size
    assert planned[0] - planned[1] == sent[1] - sent[0] == inputs // 2
    for unshared, shared in run_ranks(with_and_without, 2, mode, shape):
        assert all(unshared["grads"][name].equal(grad) for name, grad in shared["grads"].items())
        assert unshared["kept"] - shared["kept"] == inputs // 2 - filled, (
            "of an odd input half an element more is kept"
        )
        assert shared["sent"] - unshared["sent"] == inputs // 2 + filled


def traffic(plan):
    workload = Workload(plan.model, plan.parallel, plan.job.train, SOFTWARE["orch"])
    return [message for message in step_traffic(workload)[0] if message.axis == "tp"]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("mode", "lower_share", "upper_share"), [("full", 0.0, 0.1), ("selective", 0.1, 0.25)]
)
def test_messages_are_as_small_a_share_of_tensor_parallelism_s_as_docs_say(
    mode, lower_share, upper_share, tp
):
    """docs/offload.md: less than a tenth, with selective recomputation up to a quarter."""
    plans = [plan_of(mode, shared, tp=tp) for shared in (False, True)]
    unshared, shared = (sum(message.sent_bytes for message in traffic(plan)) for plan in plans)
    assert lower_share * unshared < shared - unshared < upper_share * unshared


def test_a_stage_that_has_received_its_input_keeps_it_whole():
    """Its gradient is sent back: half of such an input would come on top of the whole."""
    planned = [
        [
            activations(Workload(plan.model, plan.parallel, plan.job.train))[stage]
            for stage in (0, 1)
        ]
        for plan in (plan_of("full", shared, 4, pp=2, micro_batches=2) for shared in (False, True))
    ]
    once = 2 * 16 * 32 * 4 // 2
    saved = [before - after for before, after in zip(*planned, strict=True)]
    assert saved == [
        2 * 2 * once,
        once,
    ]  # two micro-batches of two layers; of one micro-batch the second layer


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_of_several_stages_each_that_has_received_its_input_keeps_it_whole(schedule):
    """Four stages of one layer: the rank without the first has received the inputs of both that it
    holds."""
    pipeline = {"pp": 2, "vpp": 2, "schedule": schedule, "micro_batches": 4}
    unshared, shared = (
        plan_of("full", partitioned, 4, **pipeline) for partitioned in (False, True)
    )
    received = [
        rank for rank, stages in enumerate(rank_stages(unshared.parallel)) if 0 not in stages
    ]
    before, after = (
        activations(Workload(plan.model, plan.parallel, plan.job.train))
        for plan in (unshared, shared)
    )
    assert received == [1] and before[1] == after[1] and before[0] > after[0]


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["parallel=tp2_dp4"], "sp"),
        (["parallel=dp8"], "tp=1"),
        (["parallel=tp2_dp4_sp0", "train.recompute=none"], "nothing is recomputed"),
        (["parallel=tp2_dp4_sp0"], None),
    ],
)
def test_a_plan_says_where_it_changes_nothing(overrides, reason):
    plan = build_plan(
        load(
            [
                "cluster=h100x8",
                "train.recompute=full",
                "train.partition_activations=true",
                *overrides,
            ]
        )
    )
    warnings = [line for line in plan.warnings if "partition_activations" in line]
    assert (reason in warnings[0]) if reason else not warnings


def test_a_plan_without_it_does_not_name_it():
    plan = build_plan(load(["cluster=h100x8", "parallel=tp2_sp0", "train.recompute=full"]))
    assert b"partition_activations" not in msgspec.json.encode(plan)
