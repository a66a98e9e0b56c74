"""ZeRO-3 whose shards of weights and gradients are outside the device's memory: to the bit what the
shards on the device compute, with no shard on the device between uses."""

from __future__ import annotations

import pytest
import torch
from msgspec import structs

from orchestrator.plan import Plan
from orchestrator.plan.document import Offload
from tests.beds.plans import make_plan
from tests.trainer.samples import GQA, LLAMA, engine_of, small
from tests.trainer.test_offload import PAGES, start_rounded, state, train
from trainer.engine import Engine
from trainer.metrics.memory import StepMemory
from trainer.model.stage import Stage
from trainer.parallel import apply
from trainer.verify.ranks import run_ranks

HOST = Offload(optimizer="host", weights=True)
DELAYED = structs.replace(HOST, delayed=True)
PLACES = {"host": HOST, "disk": PAGES}
LAYOUTS = {
    "bf16, accumulation": {"dp": 2, "precision": "bf16", "micro_batches": 3},
    "fp16": {"dp": 2, "precision": "fp16"},
    "one micro-batch": {"dp": 2, "micro_batches": 1},
    "tied": {"dp": 2, "tied_embeddings": True},
    "hybrid": {"dp": 4, "zero_group": 2, "micro_batches": 1},
    "tp2": {"dp": 2, "tp": 2},
    "pp2": {"dp": 2, "pp": 2, "micro_batches": 3, "precision": "bf16"},
    "dp3": {"dp": 3},  # no rows divide by three
}


def plan_of(layout: str, offload: Offload | None) -> Plan:
    fields = dict(LAYOUTS[layout])
    tied = fields.pop("tied_embeddings", False)
    model = small(**LLAMA, **GQA, layers=4, tied_embeddings=tied)
    return make_plan(model=model, zero=3, offload=offload, **fields)


def world(layout: str) -> int:
    return plan_of(layout, None).parallel.world_size


def device_state(rank: int, layout: str, steps: int) -> dict[str, torch.Tensor]:
    """What ZeRO-3 holds after `steps` steps, all on the device."""
    engine = engine_of(plan_of(layout, None), rank)
    start_rounded(engine)
    train(engine, range(steps))
    return state(engine)


def unequal(engine: Engine, expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that an engine does not hold to the bit as expected."""
    held = state(engine)
    assert held.keys() == expected.keys()
    return [
        name
        for name, tensor in expected.items()
        if not torch.equal(held[name], tensor.to(held[name].dtype))
    ]


def resume(engine: Engine, source: Engine, step: int) -> None:
    """Continues with a copy of another engine's state, as from a checkpoint."""
    pieces = {(p.kind, p.info.name, p.offset): p.data for p in source.state_pieces(to_write=False)}
    for piece in engine.state_pieces(to_write=False):
        key = piece.kind, piece.info.name, piece.offset
        if key in pieces:
            piece.data.copy_(pieces[key])
    engine.resumed(step, source.scalars())


def three_steps(rank: int, layout: str, place: Offload) -> list[str]:
    expected = device_state(rank, layout, 3)
    away = engine_of(plan_of(layout, place), rank)
    train(away, range(3))
    return unequal(away, expected)


@pytest.mark.process
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_and_states_are_those_of_shards_on_the_device(layout, place):
    for names in run_ranks(three_steps, world(layout), layout, PLACES[place]):
        assert names == []


def resumed_both_ways(rank: int, place: Offload) -> dict[str, list[str]]:
    """What differs after two steps with shards in one place and a third with them in another."""
    layout = "one micro-batch"
    expected = device_state(rank, layout, 3)
    beside = structs.replace(place, weights=False)
    answers = {}
    for name, places in {"back": (place, beside), "away": (beside, place)}.items():
        before, after = (engine_of(plan_of(layout, offload), rank) for offload in places)
        train(before, range(2))
        resume(after, before, 2)
        train(after, range(2, 3))
        answers[name] = unequal(after, expected)
    return answers


@pytest.mark.process
@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_of_one_resumes_with_and_without(place):
    for answers in run_ranks(resumed_both_ways, 2, PLACES[place]):
        assert answers == {"back": [], "away": []}


def delayed(rank: int) -> list[str]:
    layout = "one micro-batch"
    beside = engine_of(plan_of(layout, structs.replace(DELAYED, weights=False)), rank)
    away = engine_of(plan_of(layout, DELAYED), rank)
    for engine in (beside, away):
        train(engine, range(3))
    return unequal(away, state(beside))


@pytest.mark.process
def test_delayed_updates_are_those_of_shards_on_the_device():
    for names in run_ranks(delayed, 2):
        assert names == []


def device_bytes(rank: int, place: Offload) -> dict[str, int]:
    """Bytes of weights and gradients on the device: before a step, at most, and of the largest
    units that may be gathered at once."""
    engine = engine_of(plan_of("bf16, accumulation", place), rank)
    train(engine, range(1))
    memory = StepMemory.of_engine(engine)
    with memory.measure({}):
        train(engine, range(1, 2))
    points = memory.points()
    (stage,) = engine.part.stages
    layers = [sum(param.numel() for param in block.parameters()) for block in stage.blocks.values()]
    tables = sum(
        param.numel()
        for module in (*stage.embeddings, *stage.head_modules)
        for param in module.parameters()
    )
    return {
        "weights before": points[0].held["params"],
        "weights after": points[-1].held["params"],
        "weights at most": max(point.held["params"] for point in points),
        "gathered": 2 * (2 * max(layers) + tables),
        "whole": 2 * (sum(layers) + tables),
        "gradients": max(point.held["grads"] for point in points),
    }


@pytest.mark.process
@pytest.mark.parametrize("place", PLACES)
def test_the_device_holds_no_shard_but_the_units_that_are_gathered(place):
    for held in run_ranks(device_bytes, 2, PLACES[place]):
        assert held["weights before"] == held["weights after"] == 0 == held["gradients"]
        assert 0 < held["weights at most"] <= held["gathered"] < held["whole"]


def made_unit_by_unit(rank: int) -> tuple[int, int, int, list[str]]:
    """Calls that made initial weights, the most elements that one made, those of the model, and the
    weights that are not those of a model that is made at once."""
    plan = plan_of("one micro-batch", HOST)
    made = list[int]()
    init = apply.init_stage

    def counting(stage, model, seed, table):
        init(stage, model, seed, table)
        made.append(sum(table[name].numel for name in table))

    apply.init_stage = counting
    try:
        engine = engine_of(plan, rank)
    finally:
        apply.init_stage = init
    whole = Stage(plan.model, range(plan.model.layers), first=True, last=True)
    init(whole, plan.model, plan.job.train.seed)
    expected = dict(whole.named_parameters())
    wrong = [
        info.name
        for info, weights in engine.buckets.full_params()
        if not torch.equal(weights, expected.pop(info.name))
    ]
    elements = sum(info.numel for info in engine.part.table.values())
    return len(made), max(made), elements, [*wrong, *expected]


@pytest.mark.process
def test_a_model_is_made_unit_by_unit():
    """So it need not fit in memory as a whole."""
    for calls, most, elements, wrong in run_ranks(made_unit_by_unit, 2):
        assert calls == 4 + 3 and most < elements / 3
        assert wrong == []


def uneven(rank: int) -> list[bool]:
    """Whether each shard of weights, with its padding, is in the memory that the host lists."""
    engine = engine_of(plan_of("dp3", HOST), rank)
    train(engine, range(1))
    starts = {tensor.untyped_storage().data_ptr() for tensor in engine.host.tensors}
    return [
        bucket.param_shard.untyped_storage().data_ptr() in starts
        for bucket in engine.buckets.buckets
    ]


@pytest.mark.process
def test_shards_with_padding_stay_where_they_were_put():
    for known in run_ranks(uneven, 3):
        assert known and all(known)


def lacking_one(rank: int) -> str:
    engine = engine_of(plan_of("one micro-batch", HOST), rank)
    (stage,) = engine.part.stages
    stage.norm.requires_grad_(False)
    try:
        train(engine, range(1))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.process
def test_a_unit_that_lacks_a_gradient_is_named():
    for message in run_ranks(lacking_one, 2):
        assert "gradients of some of its parameters only" in message
