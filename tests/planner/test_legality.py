"""Every rule refuses with its name, and every suggested word is legal."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.cluster.build import build_cluster
from orchestrator.config.grammar import parse
from orchestrator.config.schema import BatchRampSpec
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import BatchRamp, Mla, Mtp, Yarn
from orchestrator.plan.supported import LAYOUT, Case, broken
from orchestrator.plan.trained import NOT_RUN, TRAINER, case_of
from orchestrator.planner.legality import check, nearest_legal
from trainer.errors import LayoutError, check_supported

from . import configs, shapes
from .configs import planned


def case(model=None, cluster=None, **degrees) -> Case:
    cluster = build_cluster(cluster or configs.cluster())
    gpus = len(cluster.node_names) * cluster.gpus_per_node
    values = dict(
        tp=1, cp=1, ep=1, pp=1, vpp=1, zero=0, schedule=None, allow_tp_across_nvlink=False
    )
    values |= dict(micro_batch_size=1, global_batch_samples=1024, seq_len=8192) | degrees
    values.setdefault("sp", values["tp"] > 1)
    values.setdefault(
        "dp", max(1, gpus // (values["tp"] * values["cp"] * values["ep"] * values["pp"]))
    )
    return Case(model=model or shapes.llama3_70b(), cluster=cluster, **values)


TWELVE = shapes.model("m", 4, 96, 12, 4, 384, 256)
BROKEN = {
    "gpus": case(tp=8, pp=4, dp=3),
    "heads": case(shapes.gpt2(), tp=8, global_batch_samples=64, seq_len=1024),
    "kv_heads": case(TWELVE, configs.cluster(1, 6, []), tp=6, global_batch_samples=6),
    "ffn": case(shapes.model("m", 4, 64, 4, 4, 90, 256), configs.cluster(1, 4, []), tp=4),
    "layers": case(shapes.tiny(), pp=8, seq_len=128),
    "virtual_stages": case(vpp=2),
    "nvlink": case(tp=16, pp=4),
    "experts": case(ep=8),
    "sequence": case(cp=4, seq_len=4100),
    "ulysses": case(
        shapes.gpt2(), cp=8, cp_method="ulysses", seq_len=1024, global_batch_samples=64
    ),
    "zero_group": case(zero=1, zero_group=5),
    "sharding": case(pp=4, schedule="dualpipe", zero=3),
    "positions": case(shapes.gpt2(), seq_len=2048),
    "batch": case(global_batch_samples=100),
    "schedule": case(pp=4, schedule="1f1b", vpp=2),
}


#: What is said of some beside the rule's name.
SAID = dict.fromkeys(
    ["gpus", "heads", "kv_heads", "ffn", "layers", "nvlink"], r".*nearest legal: \w+"
)
SAID["batch"] = r".*global_batch_samples=64 or 128 does\); nearest legal: tp\d"


@pytest.mark.parametrize("rule", LAYOUT)
def test_every_rule_refuses_and_names_itself(rule):
    assert broken(BROKEN[rule])[0] == rule
    with pytest.raises(OrchError, match=f"rule '{rule}'{SAID.get(rule, '')}") as caught:
        check(BROKEN[rule])
    assert caught.value.exit == Exit.CONFIG and "\n" not in str(caught.value)


PREDICTS = structs.replace(shapes.tiny(), mtp=Mtp(depth=2, weight=0.4))
CPU = {"cluster": structs.replace(configs.cluster(), device="cpu")}
MLA = Mla(q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
#: Rows of 100 numbers.
ODD = structs.replace(shapes.tiny(), ffn_hidden=100)
UNTRAINED = {
    "biases": (structs.replace(shapes.mixtral_8x7b(), bias=True), {}, "experts do not have biases"),
    "expert_parallel": (
        shapes.mixtral_8x7b(),
        {"ep": 2, "zero": 1, "zero_group": 1},
        "ep=2 does not divide zero_group=1",
    ),
    "objective": (structs.replace(shapes.tiny(), causal=False), {}, "is not causal"),
    "objective ": (shapes.tiny(), {"objective": "masked"}, "predicted from both sides"),
    "kv_groups": (
        structs.replace(shapes.tiny(), kv_heads=3),
        {},
        "kv_heads=3 must divide model.heads=4",
    ),
    "rotary": (structs.replace(shapes.tiny(), head_dim=7), {}, "head_dim=7 must be even"),
    "layer_kind": (
        structs.replace(shapes.tiny(), block="sandwich"),
        {},
        "model.block=sandwich is not a kind of layer that this version knows; legal: pre_norm",
    ),
    "rotary ": (
        structs.replace(shapes.tiny(), mla=structs.replace(MLA, qk_rope_head_dim=5)),
        {},
        "dim=5 must be even",
    ),
    "rotary   ": (
        structs.replace(shapes.tiny(), yarn=Yarn(factor=4.0, original_seq_len=64)),
        {},
        "has yarn without latent attention",
    ),
    "rotary  ": (
        structs.replace(shapes.tiny(), mla=MLA, position="none"),
        {},
        "its positions are rotary",
    ),
    "biases ": (
        structs.replace(shapes.tiny(), mla=MLA, bias=True),
        {},
        "latent attention does not have",
    ),
    "batch_ramp": (
        shapes.tiny(),
        {"batch_ramp": BatchRamp(start_samples=1, over_samples=9)},
        "starts at 1 samples; legal",
    ),
    "matmul": (
        shapes.tiny(),
        {"matmul": "mxfp8"},
        "train.matmul=mxfp8: the trainer does not run it yet; legal: fp8_t",
    ),
    "matmul   ": (
        shapes.tiny(),
        {"matmul": "fp8_tensor", "precision": "fp16", **CPU},
        "bf16, fp32 or fp64",
    ),
    "optim_state": (ODD, {"optim_state": "8bit"}, "optim.state=8bit: model.ffn_hidden=100 must be"),
    "predictions": (
        PREDICTS,
        {"seq_len": 2},
        "model.mtp.depth=2: a sequence of 2 tokens has no target",
    ),
    "matmul     ": (shapes.tiny(), {"matmul": "fp8_block"}, "the trainer has blocks on CPUs only"),
    "matmul ": (
        shapes.mixtral_8x7b(),
        {"matmul": "fp8_tensor"},
        "experts have 8 bits on CPUs only",
    ),
    "grad_dtype": (shapes.tiny(), {"grad_dtype": "fp16"}, "train.grad_dtype=fp16"),
    "grad_wire": (
        shapes.tiny(),
        {"grad_wire": "bf16", "zero": 3},
        "train.grad_wire=bf16 with zero=3: legal is zero=1 or 2",
    ),
    "grad_wire ": (
        shapes.tiny(),
        {"grad_wire": "fp16", "zero": 1},
        "train.grad_wire=fp16 with train.precision=fp32: legal is bf16 with fp32",
    ),
    "grad_wire  ": (
        shapes.tiny(),
        {"grad_wire": "bf16", "zero": 1, "precision": "bf16", "grad_dtype": "bf16"},
        "train.grad_wire=bf16 with train.grad_dtype=bf16: legal is fp32",
    ),
    "comm_buffer": (
        shapes.tiny(),
        {"comm_buffer_bytes": 1 << 20, "zero": 3},
        "train.comm_buffer_mib=1 with zero=3",
    ),
    "offload_weights": (
        shapes.tiny(),
        {"offload": "host", "offload_weights": True, "zero": 2},
        "only ZeRO-3 over several ranks brings weights from the host; legal: zero=3",
    ),
    "offload_weights ": (
        shapes.tiny(),
        {"offload": "disk", "offload_weights": True, "zero": 3},
        "mapped pages, since these are not page-locked; legal: train.offload=host with zero=3",
    ),
    "offload_weights  ": (
        shapes.mixtral_8x7b(),
        {"offload": "host", "offload_weights": True, "zero": 3, "ep": 8, "dp": 1, "tp": 8},
        "each expert is on one rank alone, which gathers nothing; legal: a larger dp",
    ),
    "comm_buffer ": (
        shapes.tiny(),
        {"comm_buffer_bytes": 100},
        "too small for shards of 64 replicas",
    ),
}


@pytest.mark.parametrize("rule", UNTRAINED)
def test_what_the_bundled_trainer_does_not_run_is_legal_for_others(rule):
    model, degrees, line = UNTRAINED[rule]
    untrained = case(model, **({"seq_len": 128} | degrees))
    assert broken(untrained) is None
    name, problem = broken(untrained, TRAINER)
    assert name == rule.strip() and line in problem


def test_every_rule_of_the_trainer_is_tested():
    assert {rule.strip() for rule in UNTRAINED} == set(TRAINER)


def test_fp64_is_for_weights_and_gradients_or_for_neither():
    for precision, grads in (
        ("fp64", "fp32"),
        ("fp32", "fp64"),
        ("fp64", "bf16"),
        ("fp32", "bf16"),
        ("fp16", "fp16"),
    ):
        name, problem = broken(
            case(shapes.tiny(), seq_len=128, precision=precision, grad_dtype=grads), TRAINER
        )
        assert name == "grad_dtype" and f"train.grad_dtype={grads} with {precision}" in problem
    assert (
        broken(case(shapes.tiny(), seq_len=128, precision="fp64", grad_dtype="fp64"), TRAINER)
        is None
    )


#: A word that may mean anything, and the numbers of one that may be wrong.
NUMBERS = {
    "tp": (1, 2, 3, 4, 8, 64),
    "pp": (1, 2, 4, 7),
    "cp": (1, 2, 3, 4),
    "ep": (1, 2, 3, 4, 6, 8, 12, 16, 64, 256),
}
NUMBERS |= {"etp": (1, 2, 3, 4, 8), "vpp": (1, 2, 9), "zero": (0, 1, 3), "sp": (0, 1)}
KEYS = st.fixed_dictionaries(
    {}, optional={"etp": st.sampled_from([1, 2, 3, 8]), "fold_cp": st.just(True)}
)


@st.composite
def words(draw) -> str:
    names = draw(st.lists(st.sampled_from(list(NUMBERS)), min_size=1, max_size=5, unique=True))
    return "_".join(f"{name}{draw(st.sampled_from(NUMBERS[name]))}" for name in names)


@given(
    words(),
    KEYS,
    st.sampled_from(["mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3", "llama3_8b"]),
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_every_word_that_a_refusal_names_is_legal(layout, keys, name, size):
    """A wrong word gets one line; each word in it is read, and is planned in place of the wrong
    one. Keys beside the word go: those that a word cannot say stand behind it."""
    spec = [configs.cluster(), configs.cluster(2, 4), configs.cluster(16, 8, domain_nodes=2)][size]
    model = shapes.published(name)
    train = {"seq_len": 4096, "global_batch_samples": 512}
    try:
        planned(model, parse(layout) | keys, spec, **train)
    except OrchError as error:
        line = str(error)
    else:
        return
    assert "\n" not in line
    if error_of_the_word := re.search(r"did you mean '([^']*)'", line):
        parse(error_of_the_word[1])
    if hints := re.search(r"nearest legal: (.*)$", line):
        for hint in hints[1].split(", "):
            hint_layout, *overrides = hint.split()
            hint_keys = {
                key.removeprefix("parallel."): value
                for key, value in (override.split("=") for override in overrides)
            }
            given_ = {
                key: value == "true" if key == "fold_cp" else int(value)
                for key, value in hint_keys.items()
            }
            planned(model, parse(hint_layout) | given_, spec, **train)
    else:
        assert "did you mean" in line or "no other degrees are legal" in line


WISHES = {
    name: st.integers(1, limit)
    for name, limit in (("tp", 24), ("pp", 24), ("cp", 4), ("ep", 4), ("vpp", 3))
}


@given(st.fixed_dictionaries(WISHES | {"zero": st.sampled_from([0, 1])}))
@settings(max_examples=80, deadline=None)
def test_suggestions_are_legal_and_plan(degrees):
    wish = case(shapes.mixtral_8x7b(), **degrees)
    for near in nearest_legal(wish):
        assert broken(near) is None
        assert near.zero == wish.zero
        assert near.tp * near.pp * near.cp * near.ep * near.dp == 64
    if broken(wish) is None:  # a legal wish is its own nearest word
        assert nearest_legal(wish)[0] == wish


@given(
    st.fixed_dictionaries(
        {name: st.sampled_from([1, 2, 4]) for name in ("tp", "pp", "cp", "ep")}
        | {"vpp": st.integers(1, 2), "zero": st.integers(0, 3), "uneven": st.booleans()}
        | {
            "schedule": st.sampled_from([None, "1f1b", "zb_h1", "dualpipe"]),
            "zero_group": st.sampled_from([0, 2]),
        }
        | {"cp_method": st.sampled_from([None, "ulysses", "ring"])}
    ),
    st.sampled_from(
        [shapes.tiny(), shapes.gpt2(), shapes.mixtral_8x7b(), UNTRAINED["objective"][0]]
    ),
    st.sampled_from([None, BatchRampSpec(start_samples=4, over_samples=64)]),
    st.sampled_from([16, 18]),
)
@settings(max_examples=200, deadline=None)
def test_the_trainer_refuses_exactly_what_a_plan_warns_about(parallel, model, ramp, samples):
    train = {"seq_len": 128, "global_batch_samples": samples, "batch_ramp": ramp}
    try:
        plan = planned(model, parallel, configs.cluster(2, 4), **train)
    except OrchError as error:
        assert error.exit == Exit.CONFIG
        return
    assert broken(case_of(plan)) is None, (
        "what the planner takes keeps every rule when the trainer asks again"
    )
    warned = [line for line in plan.warnings if line.startswith(NOT_RUN)]
    if warned:
        with pytest.raises(LayoutError) as caught:
            check_supported(plan)
        assert str(caught.value) in warned[0]
    else:
        check_supported(plan)


def test_the_word_says_all_that_differs_from_the_default():
    assert case(tp=8, pp=4, zero=1).spec == "tp8_pp4_dp2_zero1"
    assert case(tp=8, pp=4, sp=False, vpp=2).spec == "tp8_pp4_dp2_vpp2_sp0"
    assert case(cluster=configs.cluster(1, 1, [])).spec == "dp1"
    assert case(tp=4, cp=2, etp=1, fold_cp=True).spec == "tp4_dp8_cp2_ep8_etp1"
    assert case(cp=2, fold_cp=True).spec == "dp32_cp2_ep2_etp1"
    assert (
        case(tp=4, cp=2, ep=2, etp=1).spec == "tp4_dp4_cp2_ep2 parallel.etp=1"
    )  # an axis without folding over cp


def test_context_parallel_counts_zig_zag_pieces():
    assert broken(case(cp=2, seq_len=6)) is not None  # 2 x cp = 4 pieces
    assert broken(case(cp=2, seq_len=8)) is None


def test_tp_over_nodes_needs_to_be_asked_for_and_then_has_a_price():
    degrees = {"tp": 16, "pp": 2, "zero": 1}
    with pytest.raises(OrchError, match=r"rule 'nvlink'.*allow_tp_across_nvlink=true"):
        planned(shapes.llama3_70b(), degrees)
    plan = planned(shapes.llama3_70b(), degrees | {"allow_tp_across_nvlink": True})
    assert plan.placement["tp"].worst_level == "leaf"
    price = [w for w in plan.warnings if "leave NVLink" in w]
    assert len(price) == 1 and re.search(
        r"predicted cost against tp8_pp4_dp2_zero1: \+[\d.]+ s per step", price[0]
    )


def test_an_explicit_order_may_not_move_tp_off_nvlink_in_silence():
    order = ["pp", "tp", "cp", "ep", "dp"]
    parallel = {"tp": 8, "pp": 4, "zero": 1, "order": order}
    with pytest.raises(OrchError, match=r"parallel.order=.* puts tp=8 groups across leaf"):
        planned(shapes.llama3_70b(), parallel)
    plan = planned(shapes.llama3_70b(), parallel | {"allow_tp_across_nvlink": True})
    assert plan.parallel.order == order and any("leave NVLink" in w for w in plan.warnings)


def test_domains_of_several_nodes_hold_wide_groups():
    spec = configs.cluster(36, 4, [("leaf", 18, 1.0), ("spine", 36, 1.0)], domain_nodes=18)
    assert broken(case(cluster=spec, tp=8, pp=9, global_batch_samples=16)) is None
    assert broken(case(cluster=spec, tp=16, pp=9, global_batch_samples=16))[0] == "nvlink"


@pytest.mark.parametrize(
    ("parallel", "train", "line"),
    [
        ({"order": ["tp", "pp", "dp", "cp", "cp"]}, {}, "parallel.order=.* must name each"),
        (
            {"pp": 4, "stage_layers": [20, 20, 20]},
            {},
            r"stage_layers=.* must be pp x vpp = 4 numbers .* balanced: \[",
        ),
        (
            {},
            {"global_batch_tokens": 100_000},
            r"not a multiple of train.seq_len=8192; nearest: 98304",
        ),
        ({}, {"global_batch_samples": None}, "exactly one of"),
        ({}, {"precision": "bf16"}, r"train.precision bf16: GPU .* computes in fp32, fp16$"),
        (
            {},
            {"precision": "fp64"},
            r"fp32, fp16; to verify in fp64, cluster.gpu.peak_tflops.fp64=7.85 train.grad",
        ),
    ],
)
def test_other_refusals_of_the_planner(parallel, train, line):
    spec = configs.cluster()
    volta = structs.replace(
        spec, gpu=structs.replace(spec.gpu, peak_tflops={"fp32": 15.7, "fp16": 125})
    )
    with pytest.raises(OrchError, match=line) as caught:
        planned(
            shapes.llama3_70b(),
            {"tp": 8, "pp": 4} | parallel,
            volta,
            **({"precision": "fp16"} | train),
        )
    assert caught.value.exit == Exit.CONFIG
