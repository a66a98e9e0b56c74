"""`train.recompute=budget`: fits where anything fits, repeats no more than it must, and costs what
the plan says."""

from __future__ import annotations

import itertools

import pytest
from msgspec import structs

from orchestrator.cost.memory.activations import activations
from orchestrator.cost.memory.recompute import MODES, resolve_recompute
from orchestrator.cost.model.stages import rank_stages, stage_range
from orchestrator.cost.of_plan import context_of
from orchestrator.cost.time.compute import layer_seconds
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Measured
from tests.planner import configs, shapes

from .configs import build_plan

GIB = 1 << 30


def plan(gib: float | None, degrees: dict | None = None, recompute: str = "budget", model=None):
    config = configs.config(
        configs.cluster(1), model or shapes.tiny(), degrees or {"tp": 2, "pp": 2}
    )
    train = structs.replace(
        config.train, recompute=recompute, recompute_budget_gib=gib, seq_len=128
    )
    return build_plan(structs.replace(config, train=train))


def kept(plan) -> list[float]:
    return activations(Workload(plan.model, plan.parallel, plan.job.train))


def test_a_large_budget_repeats_nothing_and_a_tiny_one_everything():
    assert set(plan(1000.0).job.train.recompute_layers) == {"none"}
    assert set(plan(1e-9).job.train.recompute_layers) == {"full"}
    assert set(plan(None).job.train.recompute_layers) == {"none"}  # a tiny model on 80 GiB


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 0.95])
@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "pp": 2},
        {"pp": 2, "vpp": 2, "schedule": "interleaved"},
        {"pp": 2, "schedule": "dualpipe"},
    ],
    ids=str,
)
def test_the_choice_fits_and_none_that_fits_repeats_less(degrees, share):
    """Against every assignment of modes to a rank's layers, costed by the same account."""
    model = structs.replace(shapes.tiny(), layers=6)
    full, none = (kept(plan(None, degrees, mode, model)) for mode in ("full", "none"))
    budget = (min(full) + share * (max(none) - min(full))) / GIB
    chosen = plan(budget, degrees, model=model)
    par = chosen.parallel
    train = chosen.job.train
    context = context_of(chosen)
    layer_cost = layer_seconds(
        Workload(chosen.model, par, train, context.software), 0, context.rate
    )
    seconds = {"none": 0.0, "selective": layer_cost.selective, "full": layer_cost.forward}
    for rank, stages in enumerate(rank_stages(par)):
        layers = [layer for stage in stages for layer in stage_range(par, stage)]
        rank_seconds = sum(seconds[train.recompute_layers[layer]] for layer in layers)
        fits = kept(chosen)[rank] <= budget * GIB * (1 + 1e-12)
        if not fits:
            assert {train.recompute_layers[layer] for layer in layers} == {"full"}
            continue
        if (
            "dualpipe" in degrees.values()
        ):  # two holders: the tighter one decides, so this one may repeat more
            continue
        for modes in itertools.product(MODES, repeat=len(layers)):
            if sum(seconds[mode] for mode in modes) < rank_seconds * (1 - 1e-12):
                by_layer = list(train.recompute_layers)
                for layer, mode in zip(layers, modes, strict=True):
                    by_layer[layer] = mode
                activation_bytes = activations(
                    Workload(chosen.model, par, structs.replace(train, recompute_layers=by_layer))
                )[rank]
                assert activation_bytes > budget * GIB


def test_the_first_stage_repeats_most_under_1f1b():
    """It holds the most micro-batches in flight."""
    none = kept(plan(None, recompute="none"))
    modes = plan(0.6 * none[0] / GIB).job.train.recompute_layers
    half = len(modes) // 2
    assert sum(map(MODES.index, modes[:half])) > sum(map(MODES.index, modes[half:]))


def test_zero2_and_zero3_say_what_accumulation_costs():
    lines = {zero: plan(None, {"zero": zero}).warnings for zero in (1, 2, 3)}
    assert not [line for line in lines[1] if "Psi" in line]
    assert [
        line
        for line in lines[2]
        if line.startswith("zero2 reduce-scatters") and "zero1: 2 Psi" in line
    ]
    assert [line for line in lines[3] if line.startswith("zero3 gathers weights twice")]


def test_work_is_weighed_at_the_rates_that_were_measured():
    """Slow matrix products make it better to keep them (selective) on many layers than to run a few
    layers again; slow memory makes it the other way round."""
    base_plan = plan(None, {"pp": 2}, model=shapes.llama3_8b())
    cluster = base_plan.cluster
    model = base_plan.model
    parallel = base_plan.parallel
    train = structs.replace(base_plan.job.train, recompute="budget", seq_len=8192)
    gib = (
        activations(Workload(model, parallel, structs.replace(train, recompute="none")))[0]
        * 0.8
        / GIB
    )
    modes = []
    for flops, bytes_per_s in ((1e12, 1e14), (1e17, 1e9)):
        products = {name: {"bf16": flops} for name in ("matmul_flops", "attention_flops")}
        measured = Measured(source="test", memory_bytes_per_s=bytes_per_s, launch_s=0.0, **products)
        cheapest = resolve_recompute(
            Workload(model, parallel, train), structs.replace(cluster, measured=measured), gib
        )
        modes.append(cheapest.recompute_layers[:16])
    assert modes[0].count("full") == 0 < modes[0].count("selective")
    assert modes[1].count("full") > 0
