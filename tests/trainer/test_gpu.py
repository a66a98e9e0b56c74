"""The engine on GPUs that compute nothing: torch's own CUDA code and NCCL groups run, every call is
noted."""

from __future__ import annotations

import pytest
from msgspec import UNSET, to_builtins

from orchestrator.plan import Plan
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.model import Moe, Mtp, Yarn
from orchestrator.plan.offload import offload_of
from tests.beds import fakegpu
from tests.trainer import gpu_steps, test_twin
from tests.trainer import test_planned_memory as planned
from tests.trainer.test_planned_memory import PIPE

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs"),
]

QUICK = test_twin.QUICK | {
    "cp2 gqa bf16": {"cp": 2, "precision": "bf16"},
    "cp4 ring": {"cp": 4, "cp_method": "ring"},
}
#: Kernels that give the same bits every time: torch refuses the others by itself.
QUICK["deterministic"] = {"deterministic": True, "isolate_documents": True}
#: A card showed that the host waited here, for a copy of frequencies, in every stage and
#: micro-batch.
STRETCHED = Yarn(factor=4.0, original_seq_len=32, mscale_all_dim=0.0)
#: All that a model of DeepSeek's has: latent attention, experts, shared ones, a dense first layer.
DEEPSEEK = planned.DEEPSEEK | {"yarn": STRETCHED, "mtp": Mtp(depth=1)}
EXPERTS = {"model": planned.MIXTURE}
FP16 = {"precision": "fp16"}
QUICK |= {
    "YaRN": {"model": planned.LLAMA | {"yarn": STRETCHED}},
    "deepseek": {"model": DEEPSEEK},
    "deepseek, tp2 ep2": {"model": DEEPSEEK, "tp": 2, "ep": 2},
    "experts by domain": {"model": planned.MANY, "ep": 4} | planned.BY_DOMAIN,
    "experts fp16, ep2": EXPERTS | FP16 | {"ep": 2},
    "tied pp4": {"pp": 4, "micro_batches": 8, "model": planned.GPT},
    "pp2": PIPE,
    "tp2 in pieces": {"tp": 2, "tp_pieces": 4},
    "8 bits": {"matmul": "fp8_tensor"},
    "8 bits, latents, tp2 pp2 zb_h1": PIPE
    | {"matmul": "fp8_tensor", "model": planned.LATENT, "tp": 2, "schedule": "zb_h1"},
    "activations on the host": {"recompute": "full", "offload": {"activations": "host"}},
}
MORE = {
    "deterministic fp32": {"deterministic": True, "precision": "fp32"},
    "deterministic, dropout": {"deterministic": True, "model": test_twin.GPT | {"dropout": 0.1}},
    "deterministic tp2 zero1": {"deterministic": True, "tp": 2, "dp": 2, "zero": 1},
    "deterministic cp2": {"deterministic": True, "cp": 2, "cp_method": "allgather"},
    "predicts two tokens further": {"model": planned.LLAMA | {"mtp": Mtp(depth=2)}},
    "experts fp16": EXPERTS | FP16,
    "tp2 in pieces, full": {"tp": 2, "tp_pieces": 2, "recompute": "full", "micro_batch_size": 2},
    "tp2 in pieces without sp": {"tp": 2, "tp_pieces": 4, "sp": False, "model": planned.GPT},
    "experts too narrow for one kernel": {
        "model": planned.LLAMA | {"moe": Moe(experts=8, top_k=2, ffn_hidden=12)}
    },
    "experts dp2 zero3": EXPERTS | {"dp": 2, "zero": 3},
    "experts that drop, by domain": (
        {"model": planned.LLAMA | {"layers": 2, "moe": test_twin.DROPPING}, "ep": 4}
        | planned.BY_DOMAIN
    ),
    "dp2 zero1, updates delayed": (
        {"dp": 2, "zero": 1, "offload": {"optimizer": "host", "delayed": True}}
    ),
    "dp2 zero3, weights on the host": {"dp": 2, "zero": 3, "offload": planned.AWAY},
    "pp2 dp2 zero3, weights on the host": PIPE | {"dp": 2, "zero": 3, "offload": planned.AWAY},
    "dp4 zero3 hybrid, weights on the host": (
        {"dp": 4, "zero": 3, "zero_group": 2, "offload": planned.AWAY}
    ),
}
#: Products in 8 bits are emulated, on CPUs alone.
ON_CPUS = {name for name, case in test_twin.MORE.items() if "matmul" in case}
MORE |= {
    name: case for name, case in test_twin.MORE.items() if name not in QUICK and name not in ON_CPUS
}
#: Of MORE, those whose twin is compared too; the others with `make verify`.
FULL = {
    name: layout
    for name, layout in MORE.items()
    if name in test_twin.MORE and name not in test_twin.KINDS
}
MORE = {name: layout for name, layout in MORE.items() if name not in FULL}


def recorded(layouts: dict[str, dict]) -> dict[str, list[dict]]:
    strict = [name for name, layout in layouts.items() if not may_wait(layout)]
    return fakegpu.call(gpu_steps.steps, layouts, strict)


@pytest.fixture(scope="module")
def quick():
    return recorded(QUICK)


@pytest.fixture(scope="module")
def more_records():
    return recorded(MORE)


@pytest.fixture(scope="module")
def full():
    return recorded(FULL)


@pytest.mark.parametrize("name", QUICK)
def test_a_layout_runs_on_gpus(quick, name):
    runs(quick[name], QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_run_on_gpus(more_records, name):
    runs(more_records[name], MORE[name])


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", FULL)
def test_all_layouts_run_on_gpus(full, name):
    runs(full[name], FULL[name])


#: Where an optimizer on the host waits for the device.
OF_OFFLOAD = (
    "sharded.py:decide",
    "zero2.py:expect",
    "zero2.py:_arrive",
    "clip.py:grad_norm",
    "memory.py:settle",
    "fsdp_offload.py:finish",
)
#: The one place where the host waits for what routers chose.
OF_EXPERTS = ("permutation.py:read_counts",)
SYNCHRONISED = "cudaStreamSynchronize"


def may_wait(layout: dict) -> tuple[str, ...]:
    """The places where the host may wait in a step: for gradients that it updates with, and for
    what routers chose."""
    plan = gpu_steps.gpu_plan(to_builtins(layout))
    places = ()
    if offload_of(plan.job.train).optimizer:
        places += OF_OFFLOAD
    if reads_of_layer(plan):
        places += OF_EXPERTS
    return places


def reads_of_layer(plan: Plan) -> int:
    """How often the host reads counts in a pass of a layer's experts."""
    moe = plan.model.moe
    if moe is None:
        return 0
    par = plan.parallel
    mesh = expert_mesh(par)
    by_domain = par.expert_all_to_all == "hierarchical"
    to_slices = mesh.ep > 1 and mesh.etp > 1 and par.sp
    drops = moe.capacity_factor is not UNSET
    whole_16_bytes = moe.ffn_hidden // mesh.etp * 2 % 16 == 0
    by_kernel = plan.job.train.precision == "bf16" and whole_16_bytes
    reasons = (mesh.ep > 1, by_domain, to_slices, drops and not by_domain, not by_kernel)
    return sum(reasons)


def reads_of_step(plan: Plan) -> int:
    """How often the host reads counts in a step of a rank without a pipeline."""
    model = plan.model
    per_layer = reads_of_layer(plan)
    if not per_layer:
        return 0
    further = 0 if model.mtp is UNSET else model.mtp.depth
    layers = model.layers - model.moe.first_dense_layers + further
    passes = 2 if plan.job.train.recompute == "full" else 1
    return per_layer * layers * passes * plan.parallel.micro_batches


def runs(ranks: list[dict], layout: dict) -> None:
    places = may_wait(layout)
    plan = gpu_steps.gpu_plan(to_builtins(layout))
    for rank in ranks:
        assert rank["kernels"] > 100, "it computes on the device"
        waits = [
            wait for wait in map(str, rank["waits"]) if not any(place in wait for place in places)
        ]
        assert waits == [], "the host enqueues a step without waiting for the device"
        reads = [wait for wait in rank["waits"] if SYNCHRONISED in wait and OF_EXPERTS[0] in wait]
        assert plan.parallel.pp > 1 or len(reads) == reads_of_step(plan)
        assert rank["counted"] == rank["sent"], (
            "what the counter counts is what NCCL is given, to the byte"
        )


LOOPS = {
    "alone fp16": {"precision": "fp16"},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "cp2": {"cp": 2},
    "pp2 zero3": {"pp": 2, "dp": 2, "zero": 3},
}


def test_the_training_loop_waits_for_a_step_when_the_next_one_is_enqueued(tmp_path):
    """A steady step reads the device once, and late: the numbers of the step before. Measured every
    other step."""
    for ranks in fakegpu.call(gpu_steps.loops, str(tmp_path), LOOPS).values():
        for rank in ranks:
            assert (
                rank["waits"]
                == [["cudaEventSynchronize", "train.py:_finish > metrics/step_result.py:wait"]] * 4
            )
            assert min(rank["ahead"][1:]) > 100, (
                "kernels of the next step, enqueued before the host waits"
            )
            steps = rank["steps"]
            assert [step["step"] for step in steps] == list(range(1, 11))
            measured = [step["step"] for step in steps if step["own_s"] is not None]
            assert measured == [2, 4, 6, 8, 10]
            for step in steps:
                assert ("forward" in step["phase_s"]) == (step["step"] in measured)


def test_a_background_save_copies_on_a_stream_of_its_own():
    """The copy goes into page-locked memory; the host waits nowhere, the next
    update's stream does, the writer's thread too."""
    record = fakegpu.call(gpu_steps.background_copy)
    assert record["copies"] == ["DtoH"] and record["bytes"] and record["locked"]
    assert record["streams"][0] == 1 and record["apart"]
    assert record["waits"] == [] and record["reader"] == ["cudaEventSynchronize"]
    at = record["order"].index("W")
    assert record["order"][:at].count("C") == 1 and "K" in record["order"][at:], (
        "no kernel of the update before the wait"
    )


def test_the_work_of_batched_products_is_recorded_whole():
    assert fakegpu.call(gpu_steps.batched_products) == [3 * 4 * 8 * 16] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_of_one_block_to_another_passes_torchs_checks(dtype):
    blocks = ((32, 32), (32, 64), (48, 16))
    dims = (8, 64, 72, 128, 256)
    sizes = [[2, 4, heads, *block, dim] for heads in (4, 2, 1) for block in blocks for dim in dims]
    assert fakegpu.call(gpu_steps.attention_blocks, dtype, sizes) == []
