"""Memory by whose software it is: textbook numbers, published rows, and what every recipe must
obey."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.accuracy.predict.job_memory import job_memory, recomputed
from orchestrator.accuracy.predict.rows import read_row
from orchestrator.config.compose import load
from orchestrator.cost.memory.layer_activations import layer_activation_bytes
from orchestrator.cost.memory.rank_memory import as_measured, memory_by_pp_rank, rank_state_bytes
from orchestrator.cost.memory.recipe import (
    ORCH,
    RECIPES,
    adapters_only,
    kernels_of,
    measured_kind,
    recipe_for,
    recipe_of,
)
from orchestrator.cost.software import SOFTWARE, software_named
from orchestrator.cost.workload import Workload
from tests.beds.plans import make_plan

from . import configs, shapes

GIB = 1 << 30
H100 = make_plan().cluster
H100 = structs.replace(
    H100, device="cuda", gpu=structs.replace(H100.gpu, name="H100-80GB", memory_bytes=80 * GIB)
)
FOREIGN = sorted(name for name in RECIPES if name != "orch")


def fullest(
    model, recipe, matmul: str = "", precision: str = "bf16", recompute: str = "none", **layout
):
    """Memory of the fullest pipeline rank."""
    layout = {"stage_layers": None, "micro_batches": 8, **layout}
    layout["stage_layers"] = [model.layers // layout.get("pp", 1)] * layout.get("pp", 1)
    seq_len = layout.pop("seq_len", 4096)
    plan = make_plan(**{k: v for k, v in layout.items() if k != "stage_layers"})
    par = structs.replace(plan.parallel, stage_layers=layout["stage_layers"])
    train = structs.replace(
        plan.job.train, precision=precision, seq_len=seq_len, recompute=recompute
    )
    return max(
        memory_by_pp_rank(Workload(model, par, train), H100, recipe, matmul),
        key=lambda rank_memory: rank_memory.total,
    )


# ----------------------------------------------------------------------------------------------
#     textbook numbers


@pytest.mark.parametrize(("zero", "gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_table_of_the_zero_paper(zero, gb):
    """7.5 B parameters on 64 GPUs (arXiv 1910.02054, figure 1): 16-bit weights and gradients, 12
    bytes of optimizer."""
    plan = make_plan(dp=64, zero=zero)
    train = structs.replace(plan.job.train, precision="fp16", grad_dtype="fp16")
    states = rank_state_bytes(7.5e9, 0, plan.parallel, train, RECIPES["deepspeed"])
    assert (states.params + states.grads + states.optimizer) / 1e9 == pytest.approx(gb, abs=0.05)


@pytest.mark.parametrize(
    ("software", "precision", "grads", "replicated", "sharded"),
    [  # Megatron-LM's table of the distributed optimizer (memory.csv mem-031 to mem-038), d = 4
        ("megatron", "bf16", "fp32", 18, 6 + 12 / 4),
        ("megatron", "bf16", "bf16", 16, 4 + 12 / 4),
        ("megatron", "fp32", "fp32", 16, 8 + 8 / 4),
        ("nemo", "bf16", "fp32", 16, 4 + 12 / 4),  # its recipes sum gradients in 16 bits
        ("megatron_2021", "fp16", "fp32", 18, 6 + 12 / 4),
    ],
)
def test_bytes_a_parameter(software, precision, grads, replicated, sharded):
    for zero, expected in ((0, replicated), (1, sharded)):
        plan = make_plan(dp=4, zero=zero)
        train = structs.replace(plan.job.train, precision=precision, grad_dtype=grads)
        states = rank_state_bytes(1000, 0, plan.parallel, train, recipe_of(software))
        assert (states.params + states.grads + states.optimizer) / 1000 == expected


def test_fsdp_shards_everything_and_sums_whole_gradients_in_a_pipeline():
    plan = make_plan(dp=8, zero=3)
    recipe = recipe_of("torchtitan")
    train = structs.replace(plan.job.train, precision="bf16")
    states = rank_state_bytes(1000, 0, plan.parallel, train, recipe)
    assert states.params + states.grads + states.optimizer == 1000 * 16 / 8
    model = shapes.llama3_8b()
    layout = dict(dp=8, zero=3, pp=4, recompute="full")
    gradient_bytes = (
        fullest(model, recipe, **layout).buffers
        - fullest(model, structs.replace(recipe, whole_gradients=False), **layout).buffers
    )
    assert gradient_bytes > 3.5 * model.parameters / 4 * 0.8


# ----------------------------------------------------------------------------------------------
#     published rows

GPT = {
    "gpu": "A100-80GB",
    "precision": "fp16",
    "pp_schedule": "1f1b",
    "sp": "0",
    "tp": "8",
    "cp": "1",
    "seq_len": "2048",
}
KORTHIKANTI = {
    **GPT,
    "framework": "Megatron-LM",
    "sp": "1",
    "vocab": "51200",
    "recompute": "selective",
    "zero_stage": "0",
    "dp": "1",
    "mem_kind": "model state + activations of first stage",
    "source": "arXiv 2205.05198, figure 1",
    "micro_batch": "1",
}
BLOOM = {
    **GPT,
    "framework": "Megatron-DeepSpeed",
    "vocab": "250880",
    "recompute": "full",
    "zero_stage": "1",
    "hidden": "14400",
    "mem_kind": "max over first/last pipeline nodes as printed (GB)",
    "ffn_hidden": "57600",
    "global_batch": "2048",
    "source": "bigscience train/tr11-176B-ml/chronicles-prequel.md",
}
ZERO_BUBBLE = {
    **GPT,
    "framework": "Megatron-LM fork (zero bubble)",
    "tp": "1",
    "dp": "1",
    "seq_len": "1024",
    "recompute": "none",
    "zero_stage": "0",
    "mem_kind": "peak memory as printed (GB)",
    "source": "arXiv 2401.10241, table 4",
}
TITAN = {
    "framework": "torchtitan (FSDP2)",
    "layers": "32",
    "hidden": "4096",
    "ffn_hidden": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "8192",
    "gpu": "H100-96GB-HBM2e",
    "zero_stage": "3",
    "tp": "1",
    "micro_batch": "2",
    "recompute": "selective",
    "precision": "bf16",
    "pp": "1",
    "model": "Llama3.1-8B",
    "mem_kind": "max over ranks of peak reserved memory (GiB)",
    "source": "torchtitan llama3_h100_202412_torchtitan.md",
}
NANOTRON = {
    "framework": "nanotron 0.5",
    "vocab": "131072",
    "seq_len": "4096",
    "gpu": "H100-80GB",
    "precision": "bf16",
    "ffn_hidden": "8192",
    "heads": "32",
    "kv_heads": "32",
    "global_batch": "256",
    "cp": "1",
    "model": "Llama-3.57B",
    "params_b": "3.57",
    "mem_kind": "peak memory as printed (GB)",
    "source": "nanotron docs/benchmark_summary.svg",
}
SIMUMAX = {
    "framework": "Megatron-LM (measured side of SimuMax validation)",
    "layers": "12",
    "hidden": "8192",
    "sp": "1",
    "ffn_hidden": "28672",
    "heads": "64",
    "kv_heads": "8",
    "vocab": "128256",
    "seq_len": "4096",
    "gpu": "B200-180GB",
    "num_gpus": "8",
    "zero_stage": "1",
    "micro_batch": "1",
    "recompute": "none",
    "precision": "bf16",
    "cp": "1",
    "mem_kind": "max allocated (PyTorch), worst rank",
    "source": "SimuMax docs/b200 v1.2",
    "model": "Llama3-70B-L12",
}


def row(base: dict[str, str], **cells: object) -> dict[str, str]:
    return base | {name: str(value) for name, value in cells.items()}


PUBLISHED = [
    row(
        KORTHIKANTI,
        layers=96,
        hidden=12288,
        heads=96,
        num_gpus=64,
        pp=8,
        vpp=3,
        global_batch=64,
        peak_mem_gib=57.91,
    ),
    row(
        KORTHIKANTI,
        layers=128,
        hidden=25600,
        heads=160,
        num_gpus=512,
        pp=64,
        global_batch=512,
        peak_mem_gib=59.52,
    ),
    row(BLOOM, layers=80, heads=96, num_gpus=160, pp=10, dp=2, micro_batch=1, peak_mem_gib=51),
    row(BLOOM, layers=80, heads=64, num_gpus=320, pp=10, dp=4, micro_batch=4, peak_mem_gib=55),
    row(
        ZERO_BUBBLE,
        layers=30,
        hidden=4096,
        heads=32,
        num_gpus=8,
        pp=8,
        pp_schedule="zb-2p",
        micro_batch=3,
    )
    | {"global_batch": "72", "peak_mem_gib": "70"},
    row(
        ZERO_BUBBLE,
        layers=62,
        hidden=6144,
        heads=48,
        num_gpus=32,
        pp=32,
        micro_batch=1,
        global_batch=96,
        peak_mem_gib=43,
    ),
    row(TITAN, num_gpus=8, dp=8, global_batch=16, peak_mem_gib=77),
    row(TITAN, num_gpus=128, dp=128, global_batch=256, peak_mem_gib=62),
    row(
        NANOTRON,
        layers=28,
        hidden=3072,
        num_gpus=256,
        tp=4,
        sp=1,
        pp=1,
        dp=64,
        zero_stage=0,
        micro_batch=4,
    )
    | {"peak_mem_gib": "38.98"},
    row(
        NANOTRON,
        layers=16,
        hidden=2048,
        num_gpus=32,
        tp=1,
        pp=2,
        dp=16,
        zero_stage=1,
        micro_batch=1,
    )
    | {"model": "Llama-1.34B", "params_b": "1.34", "peak_mem_gib": "16.39"},
    row(SIMUMAX, tp=1, pp=2, dp=4, global_batch=16, peak_mem_gib=66.55),
    row(SIMUMAX, tp=4, pp=1, dp=2, global_batch=8, peak_mem_gib=39.07),
]


@pytest.mark.parametrize(
    "cells", PUBLISHED, ids=lambda cells: f"{cells['framework'][:14]} {cells['peak_mem_gib']}"
)
def test_published_rows(cells):
    held = job_memory(read_row(cells))
    assert held.peak_bytes / GIB == pytest.approx(float(cells["peak_mem_gib"]), rel=0.09)
    assert held.fits, "it ran"


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "tp", "gpus", "micro_batch"),
    [(125, 8192, 64, 16, 400, 32), (62, 4096, 32, 1, 128, 2), (34, 1920, 16, 1, 128, 24)],
)
def test_what_zero_ran_fits(layers, hidden, heads, tp, gpus, micro_batch):
    """100 B with tensor parallelism, 13 B and 1.5 B without it on 32 GB (arXiv 1910.02054, figures
    2 and 4)."""
    cells = row(
        GPT,
        layers=layers,
        hidden=hidden,
        heads=heads,
        tp=tp,
        num_gpus=gpus,
        micro_batch=micro_batch,
    )
    cells |= {
        "gpu": "V100-32GB",
        "seq_len": "1024",
        "framework": "DeepSpeed ZeRO",
        "zero_stage": "2",
        "pp": "1",
    }
    held = job_memory(
        read_row(cells | {"recompute": "full", "global_batch": str(gpus // tp * micro_batch)})
    )
    assert held.fits and held.worst.total > 0.4 * held.worst.capacity


@pytest.mark.parametrize(
    "name", ["megatron_sc21_175b", "megatron_sc21_530b", "megatron_sc21_1t", "mt_nlg_530b"]
)
def test_published_layouts_fit(name):
    plan = configs.build_plan(load([f"experiment={name}"]))
    assert plan.memory.total <= plan.memory.capacity < plan.cluster.gpu.memory_bytes


# ----------------------------------------------------------------------------------------------
#     what all recipes obey


@given(
    st.sampled_from(FOREIGN),
    st.sampled_from(
        [dict(), dict(tp=4, sp=True), dict(pp=4), dict(dp=8, zero=3), dict(pp=2, schedule="zb_h1")]
    ),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["", "fp8_tensor", "fp8_block", "nvfp4"]),
)
@settings(max_examples=60, deadline=None)
def test_more_work_takes_more_memory(name, layout, recompute, matmul):
    """Memory grows with micro-batch, sequence and layers; and nothing is negative."""
    model = shapes.llama3_8b()
    recipe = RECIPES[name]
    base = fullest(model, recipe, matmul, recompute=recompute, **layout)
    assert min(base.params, base.grads, base.optimizer, base.activations, base.buffers) >= 0
    twice = fullest(model, recipe, matmul, recompute=recompute, micro_batch_size=2, **layout)
    longer = fullest(model, recipe, matmul, recompute=recompute, seq_len=8192, **layout)
    deeper = fullest(
        structs.replace(model, layers=64, parameters=0),
        recipe,
        matmul,
        recompute=recompute,
        **layout,
    )
    assert base.total < min(twice.total, longer.total, deeper.total)
    assert longer.total >= twice.total - 1 or recipe.kernels.fused_attention, (
        "unfused scores grow with the square"
    )


@given(
    st.sampled_from(FOREIGN),
    st.booleans(),
    st.sampled_from(["", "fp8_block"]),
    st.sampled_from([1, 4]),
)
@settings(max_examples=40, deadline=None)
def test_recomputation_keeps_less(name, moe, matmul, tp):
    model = shapes.mixtral_8x7b() if moe else shapes.llama3_8b()
    plan = make_plan(tp=tp)
    kernels = kernels_of(RECIPES[name], H100, model, plan.parallel, matmul)
    train = structs.replace(plan.job.train, precision="bf16", seq_len=4096)
    none, selective, full = (
        layer_activation_bytes(Workload(model, plan.parallel, train), 0, kernels, mode)
        for mode in ("none", "selective", "full")
    )
    assert none.stored >= selective.stored >= full.stored > 0 == none.recomputing
    assert full.stored + full.recomputing >= none.stored * (1 - 1e-9)


def test_gradients_in_16_bits_and_products_in_8_take_less():
    model = shapes.llama3_8b()
    layout = dict(tp=2, micro_batch_size=2)
    megatron, nemo = (fullest(model, recipe_of(name), **layout) for name in ("megatron", "nemo"))
    assert megatron.grads == 2 * nemo.grads and megatron.params == nemo.params
    narrow = fullest(model, recipe_of("nemo"), "fp8_tensor", **layout)
    assert (
        0.8 < narrow.activations / nemo.activations < 0.95
    )  # activations' and attention's own inputs stay wide
    assert fullest(model, recipe_of("torchtitan"), "fp8_tensor", **layout) == fullest(
        model, recipe_of("torchtitan"), **layout
    ), "torchao keeps wide inputs"


def test_frozen_weights_have_no_gradients():
    tuned = fullest(shapes.llama3_8b(), adapters_only(recipe_of("nemo")))
    assert (tuned.grads, tuned.optimizer) == (0, 0) and tuned.params > 0


def test_experts_on_their_own_ranks():
    model = shapes.mixtral_8x7b()
    plan = make_plan(tp=2, ep=2, dp=4, zero=1)
    train = structs.replace(plan.job.train, precision="bf16", seq_len=4096)
    par = structs.replace(plan.parallel, stage_layers=[model.layers])
    meshes = par, structs.replace(par, ep=4, dp=2, etp=1)
    four, eight = (
        memory_by_pp_rank(Workload(model, parallel, train), H100, recipe_of("megatron"), "")[0]
        for parallel in meshes
    )
    experts = 3 * model.hidden * model.moe.ffn_hidden * model.moe.experts * model.layers
    assert four.params - eight.params == pytest.approx(2 * experts * (1 / 4 - 1 / 8), rel=1e-6)
    assert four.optimizer == pytest.approx(eight.optimizer, rel=1e-6), (
        "sharded over the same ranks in the end"
    )


# ----------------------------------------------------------------------------------------------
#     measurements, fits


def test_kinds_of_measurement_nest():
    for name in RECIPES:
        memory = fullest(shapes.llama3_8b(), RECIPES[name], recompute="full", dp=8, zero=1)
        shown = [
            as_measured(memory, kind, RECIPES[name])
            for kind in ("model", "allocated", "reserved", "process")
        ]
        assert shown == sorted(shown) and shown[-1] == memory.total
        if name != "orch":
            assert RECIPES[name].process_bytes(shown[0]) == pytest.approx(memory.total)
            assert memory.sd > 0 and memory.capacity == int(0.97 * 80 * GIB)


@pytest.mark.parametrize(
    ("label", "kind"),
    [
        ("max allocated (PyTorch), worst rank", "allocated"),
        ("max over ranks of peak reserved memory (GiB)", "reserved"),
        ("max over first/last pipeline nodes as printed (GB)", "process"),
        ("model state + activations of first stage (analytic+measured bars of Fig. 1)", "model"),
        ("nvidia-smi memory.used", "process"),
        ("torch.cuda.max_memory_reserved", "reserved"),
        ("Max Memory Allocated [GB]", "allocated"),
        ("", "allocated"),
    ],
)
def test_words_for_what_was_measured(label, kind):
    assert measured_kind(label, recipe_of("megatron")) == (kind, bool(label))
    assert measured_kind("peak memory as printed (GB)", recipe_of("megatron_deepspeed")) == (
        "process",
        False,
    )


def test_least_recomputation_that_fits():
    model = shapes.llama3_8b()
    recipe = recipe_of("torchtitan")
    plan = make_plan(dp=8, zero=3)
    par = structs.replace(plan.parallel, stage_layers=[model.layers])
    for seq_len, mode in ((8192, "none"), (12288, "selective"), (16384, "full")):
        train = structs.replace(plan.job.train, precision="bf16", seq_len=seq_len)
        fits = []
        for tried in ("none", "selective", "full"):
            account = memory_by_pp_rank(
                Workload(model, par, structs.replace(train, recompute=tried)), H100, recipe
            )[0]
            fits += [tried] if account.total <= account.capacity else []
        assert fits[0] == mode


def test_a_share_of_the_layers():
    train = make_plan().job.train
    assert recomputed(train, "full", 1.0, False, 4).recompute == "full"
    assert recomputed(train, "full", 0.5, False, 4).recompute_layers == [
        "none",
        "full",
        "none",
        "full",
    ]
    assert recomputed(train, "selective", 0.5, True, 4).recompute_layers == [
        "none",
        "full",
        "none",
        "full",
    ]


def test_traits_of_a_row_change_its_recipe():
    nemo = software_named("nemo")
    early = recipe_for(structs.replace(nemo, attention="unfused"))
    assert recipe_of("nemo").kernels.fused_attention and not early.kernels.fused_attention
    assert (
        recipe_for(structs.replace(nemo, grad_bytes=4)).gradient == 4
        and recipe_of("nemo").gradient == 2
    )
    titan = software_named("torchtitan")
    eager, compiled = (
        fullest(shapes.llama3_8b(), recipe_for(structs.replace(titan, elementwise=kind)))
        for kind in ("eager", "fused")
    )
    assert 0.5 < compiled.activations / eager.activations < 0.75, (
        "norms and activations are computed again"
    )
    assert recipe_of("orch") is ORCH and {software.memory for software in SOFTWARE.values()} <= set(
        RECIPES
    )
