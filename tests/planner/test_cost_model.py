"""The cost model by itself: derivatives, terms, monotony, and what each trait of software
changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.accuracy.predict.predict import context_of, predict
from orchestrator.accuracy.predict.rows import read_row
from orchestrator.cost.context import CostContext
from orchestrator.cost.dual import Dual, duals, larger, smaller, value_of
from orchestrator.cost.nesting import candidates
from orchestrator.cost.parameters import NAMES, PRIOR_VALUES, generation_of
from orchestrator.cost.profile import prior_profile, shipped
from orchestrator.cost.software import SOFTWARE, software_named
from orchestrator.cost.time.step_bound import lower_bound_s
from orchestrator.cost.time.step_time import StepCost
from orchestrator.cost.time.traffic import step_traffic
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import AXES, Parallel

from . import configs, shapes

ROW = {
    "model": "Llama3-70B",
    "layers": "80",
    "hidden": "8192",
    "ffn_hidden": "28672",
    "heads": "64",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-80GB",
    "num_gpus": "64",
    "gpus_per_node": "8",
    "interconnect": "IB 8x400Gb/s",
    "framework": "Megatron-LM",
    "precision": "bf16",
    "tp": "4",
    "pp": "4",
    "vpp": "1",
    "pp_schedule": "1f1b",
    "micro_batch": "1",
    "global_batch": "64",
    "zero_stage": "1",
    "recompute": "none",
    "sp": "1",
}


def cost(values: Any = None, **cells: object) -> StepCost:
    """The step of ROW with some cells changed, with parameter values in the place of the shipped
    ones."""
    job = read_row(ROW | {name: str(value) for name, value in cells.items()})
    context = context_of(job, {}, shipped())
    return cost_in(context, job.parallel, values)


def cost_in(context: CostContext, par: Parallel, values: Any = None) -> StepCost:
    traffic = step_traffic(Workload(context.model, par, context.train, context.software))
    rate = context.rates(values) if values is not None else None
    work = context.work(par, context.train, rate)
    return candidates(context.path_cache, par, traffic, work, AXES)[0].cost


def seconds(values: Any = None, **cells: object) -> float:
    return value_of(cost(values, **cells).step_s)


CASES: list[dict[str, object]] = [
    {},
    {"vpp": 5, "pp_schedule": "interleaved", "framework": "NeMo"},
    {"framework": "torchtitan", "tp": 1, "pp": 1, "zero_stage": 3, "recompute": "selective"},
    {"precision": "fp8", "framework": "NeMo", "cp": 2},
    {
        "gpu": "A100-80GB",
        "framework": "Megatron-DeepSpeed",
        "precision": "fp16",
        "recompute": "full",
    },
    {
        "model": "Mixtral-8x7B",
        "experts": 8,
        "topk": 2,
        "moe_ffn": 14336,
        "ep": 4,
        "layers": 32,
        "hidden": 4096,
    }
    | {"heads": 32, "ffn_hidden": 14336, "pp": 2},
]


@pytest.mark.parametrize(
    "cells", CASES, ids=lambda cells: " ".join(map(str, cells.values())) or "plain"
)
def test_derivatives_are_those_of_finite_differences(cells: dict[str, object]):
    """The derivative by every parameter is checked at the prior. Where the schedule is simulated
    the span follows its slowest rank."""
    values = PRIOR_VALUES
    step = cost(duals(values), **cells).step_s
    assert isinstance(step, Dual)
    assert step.value == pytest.approx(seconds(values, **cells), rel=1e-12)
    relative = step.grad / step.value
    for at, name in enumerate(NAMES):
        up, down = (
            seconds(values | {name: values[name] * np.exp(log_shift)}, **cells)
            for log_shift in (1e-4, -1e-4)
        )
        slope = (np.log(up) - np.log(down)) / 2e-4
        assert relative[at] == pytest.approx(slope, abs=0.02), name


@pytest.mark.parametrize(
    "cells", CASES, ids=lambda cells: " ".join(map(str, cells.values())) or "plain"
)
def test_terms_sum_to_the_step(cells: dict[str, object]):
    step_cost = cost(**cells)
    assert sum(map(value_of, step_cost.terms().values())) == pytest.approx(
        value_of(step_cost.step_s), rel=1e-9
    )
    assert {"gemm", "attention", "elementwise", "optimizer"} <= step_cost.terms().keys()


COSTS = (
    "attention.scores",
    "attention.cp",
    "attention.packed",
)  # not rates: bytes, and shares of seconds
SHARES = [
    name for name in NAMES if name.split(".")[0] in ("gemm", "attention", "hbm", "nvlink", "nic")
]
SHARES = [name for name in SHARES if name not in COSTS]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SHARES), st.sampled_from(CASES), st.floats(1.05, 2.0))
def test_a_higher_rate_never_slows_a_step(name: str, cells: dict[str, object], factor: float):
    values = dict(shipped().values)
    assert seconds(values | {name: values[name] * factor}, **cells) <= seconds(values, **cells) * (
        1 + 1e-12
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([name for name in NAMES if name not in SHARES and "family" not in name]),
    st.sampled_from(CASES),
)
def test_a_vanishing_term_never_slows_a_step(name: str, cells: dict[str, object]):
    values = dict(shipped().values)
    assert seconds(values | {name: values[name] * 1e-6}, **cells) <= seconds(values, **cells) * (
        1 + 1e-12
    )


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 8, "pp": 4, "zero": 1},
    {"tp": 16, "zero": 3, "allow_tp_across_nvlink": True},
    {"tp": 8, "cp": 4, "cp_method": "ring"},
    {"tp": 2, "pp": 4, "ep": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("level", ["nvlink", "nic", "leaf", "spine"])
@pytest.mark.parametrize("change", ["bandwidth", "latency"])
def test_a_faster_cluster_never_slows_a_step(layout: dict[str, Any], level: str, change: str):
    """One of its links gets more bandwidth or less latency."""
    model = shapes.mixtral_8x7b() if "ep" in layout else shapes.llama3_70b()

    def step(factor: float) -> float:
        spec = configs.cluster(8, 8, [("leaf", 4, 1.0), ("spine", 8, 4.0)])
        link = getattr(spec, level, None) or next(
            level_spec for level_spec in spec.levels if level_spec.name == level
        )
        rate = "gb_per_s" if level == "nvlink" else "gbit_per_s"
        values = {rate: getattr(link, rate) * factor}
        if change == "latency":
            values = {"latency_us": link.latency_us / factor}
        faster = structs.replace(link, **values)
        if level in ("nvlink", "nic"):
            links = {level: faster}
            spec = structs.replace(spec, **links)
        else:
            levels = [
                faster if level_spec.name == level else level_spec for level_spec in spec.levels
            ]
            spec = structs.replace(spec, levels=levels)
        return configs.planned(model, layout, spec, global_batch_samples=128).time.step_s

    seconds_of = [step(factor) for factor in (1.0, 1.5, 10.0)]
    assert sorted(seconds_of, reverse=True) == pytest.approx(seconds_of, rel=1e-9)


def test_numbers_and_duals_follow_the_same_rules():
    a, b = (Dual(value, np.array(grad)) for value, grad in ((3.0, [3.0, 0.0]), (2.0, [0.0, 2.0])))
    assert value_of(a * b / (a + b) - 1.0) == pytest.approx(0.2)
    assert ((a * b) / (a + b)).grad == pytest.approx([1.2 - 0.72, 1.2 - 0.48])
    assert (a**0.5).grad == pytest.approx([0.5 * 3**0.5, 0.0]) and (1.0 / a).grad == pytest.approx(
        [-1 / 3, 0.0]
    )
    assert (
        larger(a, b) is a
        and smaller(a, 2.5) == 2.5
        and b < a
        and a >= 3.0
        and (5.0 - a).grad[0] == -3.0
    )


# ---------------------------------------------------------------------------------------- what
#     traits change


def with_software(**traits: Any) -> float:
    job = read_row(ROW)
    context = context_of(
        job._replace(software=structs.replace(job.software, **traits)), {}, shipped()
    )
    return value_of(cost_in(context, job.parallel).step_s)


def test_each_trait_has_its_effect():
    assert (
        with_software(attention="unfused")
        > with_software(attention="flash")
        > with_software(attention="cudnn")
    )
    assert with_software(elementwise="eager") > with_software(elementwise="fused")
    assert with_software(tp_overlap=False) > with_software(tp_overlap=True)
    assert with_software(pp_overlap=False) > with_software(pp_overlap=True)
    assert with_software(grad_bytes=4) > with_software(grad_bytes=2)
    assert with_software(accumulate="separate") > with_software(accumulate="fused")


def test_a_zero_bubble_schedule_has_no_bubble_where_steps_overlap():
    cells = {"pp": 8, "pp_schedule": "zb-2p", "num_gpus": 32}
    job = read_row(ROW | {name: str(value) for name, value in cells.items()})
    assert job.parallel.schedule == "zb_h2"
    both = []
    for overlapped in (True, False):
        software = structs.replace(job.software, overlapped_steps=overlapped)
        step_cost = cost_in(
            context_of(job._replace(software=software), {}, shipped()), job.parallel
        )
        both.append(value_of(step_cost.terms().get("bubble", 0.0)))
        assert lower_bound_s(step_cost) <= value_of(step_cost.step_s)
    assert both[0] == 0.0 < both[1]


def test_8_bit_products_are_faster_by_less_than_their_peak():
    """DGX tables: 1.25 to 1.6 times the throughput, never 2 (planning.md B)."""
    gain = seconds(framework="NeMo") / seconds(framework="NeMo", precision="fp8")
    assert 1.2 < gain < 1.7


def test_gpus_belong_to_generations():
    pairs = {
        "H100-SXM5-80GB": "hopper",
        "A100-SXM4-80GB": "a100",
        "GB300": "blackwell_ultra",
        "GB200": "blackwell",
    }
    pairs |= {"V100-SXM3-32GB": "v100", "MI300X": "other"}
    assert {name: generation_of(name, "cuda") for name in pairs} == pairs and generation_of(
        "Xeon", "cpu"
    ) == "cpu"


def test_every_family_has_parameters_and_an_unknown_one_a_line():
    for name in SOFTWARE:
        assert f"family.{name}" in NAMES and software_named(name).name == name
    with pytest.raises(
        Exception, match=r"cost.software=megatrn: legal: orch, .*did you mean megatron\?"
    ):
        software_named("megatrn")


def test_the_shipped_profile_is_a_fit_and_the_prior_is_not():
    assert shipped().fitted_on.what == "table" and len(shipped().fitted_on.rows) >= 10
    assert prior_profile().fitted_on.what == "prior"
    assert all(np.linalg.eigvalsh(shipped().posterior) > -1e-6)
    assert shipped().values.keys() >= set(NAMES)


# ---------------------------------------------------------------------------------------- against
#     measurements

#: Published steps, a row or two a source: (cells, measured seconds, most relative error).
MEASURED: list[tuple[dict[str, object], float, float]] = [
    (  # Narayanan et al. 2021 (arXiv 2104.04473), table 1: 1,008 B on 3,072 A100
        {
            "model": "GPT-1008B",
            "layers": 128,
            "hidden": 25600,
            "ffn_hidden": 102400,
            "heads": 160,
            "kv_heads": 160,
        }
        | {
            "vocab": 51200,
            "seq_len": 2048,
            "gpu": "A100-80GB",
            "num_gpus": 3072,
            "tp": 8,
            "pp": 64,
            "zero_stage": 0,
        }
        | {
            "interconnect": "IB HDR 8x200Gb/s",
            "framework": "Megatron-LM",
            "precision": "fp16",
            "recompute": "full",
        }
        | {"global_batch": 3072, "sp": 0},
        102.371,
        0.10,
    ),
    (  # NeMo docs, performance_summary.md of 24.07: Llama 3 70B, fp8, 64 H100
        {"framework": "NeMo", "precision": "fp8", "pp": 4, "vpp": 5, "cp": 2, "global_batch": 128}
        | {"pp_schedule": "interleaved-1f1b"},
        10.6875,
        0.12,
    ),
]


@pytest.mark.parametrize(
    ("cells", "measured", "bound"), MEASURED, ids=["megatron 1T", "nemo 70B fp8"]
)
def test_a_published_step(cells: dict[str, object], measured: float, bound: float):
    (prediction,) = predict([ROW | {name: str(value) for name, value in cells.items()}])
    assert prediction.step_time_s == pytest.approx(measured, rel=bound)


def test_doubling_tensor_parallelism_costs_much_and_doubling_the_pipeline_little():
    """Llama 3 70B on 32 H100 (planning.md C3, measured): 704 TFLOP/s at tp4 pp4, 668 at tp4 pp8,
    509 at tp8 pp4."""
    shared_cells = {
        "framework": "Megatron-Bridge",
        "precision": "fp8",
        "num_gpus": 32,
        "global_batch": 128,
        "vpp": 5,
    }
    shared_cells |= {"pp_schedule": "interleaved"}
    base, deep, wide = (
        seconds(tp=tp, pp=pp, **shared_cells) for tp, pp in ((4, 4), (4, 8), (8, 4))
    )
    assert 0.0 < deep / base - 1 < 0.10
    assert 0.15 < wide / base - 1 < 0.40
