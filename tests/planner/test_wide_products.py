"""`train.matmul_wide` in plans: which words are legal, and memory and time between those of a plan
with all linears in 8 bits and of one with none."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from orchestrator.cost.memory.activations import activations
from orchestrator.cost.memory.kernels import trainer_kernels
from orchestrator.cost.memory.layer_activations import layer_activation_bytes
from orchestrator.cost.workload import Workload
from orchestrator.errors import OrchError
from orchestrator.plan import Plan, from_json, to_json
from orchestrator.plan.rounding.wide import in_fewer_layers, wide_share
from tests.planner import shapes
from tests.planner.configs import planned

LINEARS = ["wq", "wk", "wv", "wo", "gate", "up", "down"]
NARROW = {"matmul": "fp8_tensor", "compile": False}
LAYOUT = {"tp": 2, "pp": 2, "dp": 16, "zero": 1}


def plan_with(wide: list[str], layout=LAYOUT, **train) -> Plan:
    return planned(shapes.llama3_8b(), layout, matmul_wide=wide, **(NARROW | train))


def test_a_plan_without_wide_linears_does_not_name_them():
    plain = plan_with([])
    assert plain.job.train.matmul_wide is UNSET and b"matmul_wide" not in to_json(plain)
    named = from_json(to_json(plan_with(["wo", "3.down", "wo"])))
    assert named.job.train.matmul_wide == ["wo", "3.down"]
    assert named.hash != plain.hash


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["dwn"],
            r"no linear 'dwn'; did you mean 'down'\? choices: wq, wk, wv, wo, gate, up, down",
        ),
        (["wo", "32.down"], "has no linear '32.down'.*0.wq to 31.wq for single layers"),
        (["lm_head"], "has no linear 'lm_head'; choices: .*, first, last"),
        (["first."], "has no linear 'first.'"),
        (["experts.down"], "has no linear 'experts.down'"),
        (["q_down"], "has no linear 'q_down'"),
    ],
)
def test_words_that_name_no_linear_are_refused(words, problem):
    with pytest.raises(OrchError, match=problem):
        plan_with(words)


def test_wide_linears_need_narrow_ones():
    with pytest.raises(OrchError, match=r"train\.matmul=fp8_tensor, fp8_delayed or fp8_block"):
        plan_with(["wo"], matmul="")


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_and_time_are_between_all_and_none(recompute):
    narrow = plan_with([], recompute=recompute)
    plans = [
        plan_with(LINEARS[:count], recompute=recompute) for count in range(1, len(LINEARS) + 1)
    ]
    plain = plan_with([], matmul="", recompute=recompute, layout=LAYOUT | {"tp_pieces": 1})
    seconds = [plan.time.step_s for plan in (narrow, *plans)]
    assert seconds == sorted(seconds) and len(set(seconds)) == len(seconds)
    # Tensor parallelism without 8 bits may hide more.
    gemms = plans[-1].time.terms["gemm"]
    assert gemms == pytest.approx(plain.time.terms["gemm"], rel=1e-9)
    assert "cast" not in plans[-1].time.terms and narrow.time.terms["cast"] > 0
    assert plans[-1].memory.activations == plain.memory.activations


@pytest.mark.parametrize(
    ("words", "features"),
    [
        (["wq"], 2 * 4096),  # the wide input beside the narrow one, which wk and wv still read
        (["wq", "wk", "wv"], 4096),
        (["wo"], -4096),  # attention itself keeps its wide output: the narrow copy is saved
        (["down"], 14336),
        (["gate", "up", "down"], 4096 + 14336),
    ],
)
def test_a_wide_linear_keeps_its_input_wide(words, features):
    """In 16 bits rather than 8."""

    def stored(words: list[str]) -> float:
        plan = plan_with(words, {"dp": 64})
        kernels = trainer_kernels(plan.model, plan.parallel, matmul="fp8_tensor")
        return layer_activation_bytes(Workload.of_plan(plan), 0, kernels, "none").stored

    assert stored(words) - stored([]) == features * 8192


def test_a_layer_counts_in_its_own_stage():
    """The first layer is on the first of two stages, the last one on the other."""
    layout = {"pp": 2, "dp": 32}
    kept = {}
    for words in ([], ["first"], ["last"]):
        plan = plan_with(words, layout)
        workload = Workload.of_plan(plan)
        kernels = trainer_kernels(plan.model, plan.parallel, matmul="fp8_tensor")
        kept[" ".join(words)] = activations(workload, kernels)
    assert kept["first"][0] > kept[""][0] and kept["first"][1] == kept[""][1]
    assert kept["last"][1] > kept[""][1] and kept["last"][0] == kept[""][0]


def test_one_layer_costs_its_share():
    train = plan_with(["3.down", "first"]).job.train
    model = shapes.llama3_8b()
    assert wide_share(train, model, 0, "mlp.down") == 2 / 32
    assert wide_share(train, model, 0, "attn.wq") == 1 / 32
    narrow, single, every = (
        plan_with(words).time.terms["gemm"] for words in ([], ["3.down"], ["down"])
    )
    assert single - narrow == pytest.approx((every - narrow) / 32, rel=1e-6)


def test_layers_that_a_smaller_model_lacks_become_its_last_one():
    words = ["wo", "first", "3.down", "30.down", "32.project"]
    assert in_fewer_layers(words, 4, before=32) == [
        "wo",
        "first",
        "3.down",
        "3.down",
        "4.project",
    ]
    assert in_fewer_layers(["4.wo", "3.wo"], 4, before=4) == ["4.wo", "3.wo"]
