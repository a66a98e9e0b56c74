"""Inputs of recomputed layers in a reserved buffer (ZeRO-R's MD): the same gradients to the bit,
planned bytes measured, and nothing kept outside the buffer but what a stage has received."""

from __future__ import annotations

import gc

import msgspec
import pytest
import torch

from orchestrator.config.compose import load
from orchestrator.cost.memory.offloaded_inputs import reserved_bytes
from orchestrator.cost.memory.rank_memory import memory_by_pp_rank
from orchestrator.cost.workload import Workload
from orchestrator.errors import OrchError
from orchestrator.plan.model import Moe, Mtp
from orchestrator.plan.offload import slot_bytes
from orchestrator.plan.schedules import peak_inputs, schedule_of
from tests.beds.plans import make_plan, tiny_model
from tests.planner.configs import build_plan
from tests.trainer.pairs import launches
from tests.trainer.samples import engine_of
from tests.trainer.test_planned_memory import LLAMA
from tests.trainer.together import run_together, told, world
from trainer.data.order import samples_of_step
from trainer.metrics.memory import StepMemory
from trainer.parallel.reserved_inputs import ReservedInputs
from trainer.twin.choices import choose_evenly
from trainer.verify.samples import micro_batch

FULL = {"recompute": "full"}
SELECTIVE = {"recompute": "selective"}
PIPE = {"pp": 2, "micro_batches": 4}
SHARED = {"tp": 2, "sp": False, "partition_activations": True}
LAYOUTS = {
    "full": FULL | {"dp": 2},
    "selective, zero2": SELECTIVE | {"dp": 2, "zero": 2},
    "full, zero3": FULL | {"dp": 2, "zero": 3},
    "tp2 sp": FULL | {"tp": 2},
    "tp2, shared": SELECTIVE | SHARED,
    "cp2": FULL | {"cp": 2},
    "experts": SELECTIVE | {"ep": 2, "moe": Moe(experts=4, top_k=2, ffn_hidden=48)},
    "further predictions": FULL | {"dp": 2, "mtp": Mtp(depth=1)},
    "modes by layer": {
        "recompute": "budget",
        "recompute_layers": ["full", "selective", "none", "full"],
        "dp": 2,
    },
    "pp2": FULL | PIPE,
    "pp2 all forward first": SELECTIVE | PIPE | {"schedule": "afab"},
    "pp2 interleaved": FULL | PIPE | {"vpp": 2, "schedule": "interleaved"},
    "pp2 zb_h1": SELECTIVE | PIPE | {"schedule": "zb_h1"},
    "pp2 zb_h2": FULL | PIPE | {"schedule": "zb_h2"},
    "pp2 zbv": SELECTIVE | PIPE | {"vpp": 2, "schedule": "zbv"},
    "pp2 dualpipe": FULL | PIPE | {"schedule": "dualpipe"},
    "pp2 dualpipev": SELECTIVE | PIPE | {"vpp": 2, "schedule": "dualpipev"},
    "tp2 pp2 dualpipe, shared": FULL | PIPE | SHARED | {"schedule": "dualpipe"},
}
#: Without messages, which on a busy machine may be on their way at the peak.
UNDISTURBED = ("full", "selective, zero2", "full, zero3", "tp2, shared", "modes by layer")


def plan_of(layout: dict, reserved: bool):
    fields = dict(layout)
    more = {key: fields.pop(key) for key in ("moe", "mtp") if key in fields}
    model = tiny_model(**LLAMA, **more)
    return make_plan(model=model, seq_len=128, contiguous_activations=reserved, **fields)


def steps(rank: int, layout: dict) -> dict:
    """Three steps with autograd's inputs and with the buffer: gradients and bytes."""
    gradients = {}
    for reserved in (False, True):
        engine = engine_of(plan_of(layout, reserved), rank)
        for stage in engine.part.stages:
            choose_evenly(stage)  # as the plan takes it
        memory = StepMemory.of_engine(engine)
        grads = []
        gc.disable()  # slots must become free by themselves
        for step in range(3):
            rows = samples_of_step(engine.plan.parallel, engine.mesh.coord, step)
            batches = [micro_batch(engine.plan, row) for row in rows]
            with memory.measure({}):
                norm = engine.gradients(batches, 100)[1]
            grads.append(engine.buckets.full_grads())
            engine.update(norm, 1e-3)
        gc.enable()
        gradients["copied" if reserved else "kept"] = grads
    buffer = engine.reserved
    return gradients | {
        "activations": max(point.held["activations"] for point in memory.points()),
        "buffer": buffer.tensors[0].nbytes,
        "free": len(buffer._free) * slot_bytes(buffer.size),
        "pp": engine.mesh.coord.pp,
    }


@pytest.mark.process
@pytest.mark.parametrize("cases", launches({(name,): case for name, case in LAYOUTS.items()}))
def test_the_same_gradients_in_the_planned_bytes(cases):
    (ranks,) = {world(case) for case in cases.values()}
    arguments = {name: (case,) for name, case in cases.items()}
    for name, answers in run_together(steps, ranks, arguments).items():
        with told(name):
            check(name, cases[name], answers)


def check(name: str, case: dict, answers: list[dict]) -> None:
    plan = plan_of(case, True)
    workload = Workload.of_plan(plan)
    planned = memory_by_pp_rank(workload, plan.cluster)
    buffers = reserved_bytes(workload)
    assert any(buffers)
    for answer in answers:
        for kept, copied in zip(answer["kept"], answer["copied"], strict=True):
            assert kept.keys() == copied.keys()
            assert all(torch.equal(kept[key], copied[key]) for key in kept)
        # After a step every slot is free again, without the garbage collector.
        assert answer["buffer"] == answer["free"] == buffers[answer["pp"]]
        if name in UNDISTURBED:
            account = planned[answer["pp"]]
            assert answer["activations"] == pytest.approx(account.activations, rel=0.01)


def test_the_buffer_holds_what_the_schedule_keeps_at_once():
    """1F1B: the first of four stages holds four micro-batches, the last one; the inputs that
    stages have received are not among them."""
    plan = plan_of(FULL | {"pp": 4, "micro_batches": 8}, True)
    schedule = schedule_of(plan.parallel)
    counts = [peak_inputs(schedule, rank, {rank: 3}) for rank in range(4)]
    assert counts == [12, 9, 6, 3]
    slot = 128 * LLAMA["hidden"] * 4
    assert reserved_bytes(Workload.of_plan(plan)) == [4 * slot, 0, 0, 0]


def test_slots_are_used_again_and_one_too_many_is_an_error():
    buffer = ReservedInputs(12, torch.device("cpu"))
    buffer.reserve(2)
    first = torch.tensor([1.0, 2.0, 3.0])
    entries = [buffer.put(first), buffer.put(2 * first)]
    with pytest.raises(RuntimeError, match="more than 2 inputs"):
        buffer.put(first)
    assert torch.equal(buffer.get(entries[1]), 2 * first)
    entries.pop(0)
    entries.append(buffer.put(3 * first))
    assert [buffer.get(entry)[0].item() for entry in entries] == [2.0, 3.0]
    starts = {buffer.get(entry).data_ptr() - buffer.tensors[0].data_ptr() for entry in entries}
    assert starts == {0, 256}


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([], "train.recompute=selective, full or budget"),
        (["train.recompute=none"], "train.recompute=selective, full or budget"),
        (["train.recompute=full", "train.offload_activations=host"], "offload_activations=none"),
    ],
)
def test_a_buffer_without_inputs_is_refused_in_one_line(overrides, reason):
    with pytest.raises(OrchError, match=reason) as refusal:
        build_plan(load(["cluster=h100x8", "train.contiguous_activations=true", *overrides]))
    assert refusal.value.exit == 65 and "\n" not in str(refusal.value)


def test_the_copies_have_a_price_and_other_plans_do_not_name_them():
    words = ["cluster=h100x8", "parallel=dp8", "train.recompute=full"]
    plain = build_plan(load(words))
    copied = build_plan(load([*words, "train.contiguous_activations=true"]))
    assert b"contiguous_activations" not in msgspec.json.encode(plain)
    assert "checkpoints" not in plain.time.terms
    seconds = copied.time.terms["checkpoints"]
    assert copied.time.step_s == pytest.approx(plain.time.step_s + seconds)
    # Each input is read and written once, at the bandwidth of the device's memory or below it.
    par = plain.parallel
    inputs = plain.model.layers * par.micro_batches * par.micro_batch_size
    size = inputs * plain.job.train.seq_len * plain.model.hidden * 2
    assert 1.0 <= seconds / (2 * size / plain.cluster.gpu.hbm_bytes_per_s) < 2.0
