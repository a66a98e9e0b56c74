"""What a row of a table says, what is assumed where it is blank, and which rows are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from orchestrator.accuracy.predict.cells import number_of
from orchestrator.accuracy.predict.hardware import gpu_of, network_of
from orchestrator.accuracy.predict.known_models import listed_models
from orchestrator.accuracy.predict.predict import predict
from orchestrator.accuracy.predict.rows import Job, read_row
from orchestrator.accuracy.predict.shapes import _size
from orchestrator.plan.expert_mesh import expert_mesh

from .test_predict import GPT_1_7B

# NVIDIA NeMo container 26.04.01, performance summary, Llama 3 70B on 64 GB200: layout, without what
# was measured
LLAMA_70B = {
    "model": "Llama3-70B",
    "layers": "80",
    "hidden": "8192",
    "heads": "64",
    "seq_len": "8192",
    "gpu": "GB200",
    "num_gpus": "64",
    "gpus_per_node": "4",
    "interconnect": "NVL72 (NVLink domain 72)+400Gb/s per GPU",
    "framework": "Megatron-Bridge",
    "tp": "2",
    "pp": "4",
    "vpp": "5",
    "pp_schedule": "interleaved-1f1b",
    "zero_stage": "1",
    "micro_batch": "1",
    "global_batch": "256",
    "precision": "MXFP8",
    "notes": "NeMo container 26.04.01",
}
# Qi et al. (arXiv 2401.10241) table 4: 22 layers on 8 stages; virtual stages not recorded
ZERO_BUBBLE = {
    "model": "GPT-1.5B",
    "params_b": "1.5",
    "layers": "22",
    "hidden": "2304",
    "heads": "24",
    "seq_len": "1024",
    "gpu": "A100-80GB",
    "num_gpus": "8",
    "framework": "Megatron-LM fork (zero bubble)",
    "pp": "8",
    "precision": "fp16",
    "pp_schedule": "interleaved-1f1b",
    "micro_batch": "6",
    "global_batch": "144",
    "recompute": "none",
}
# Mixtral 8x22B of MoE Parallel Folding (arXiv 2504.14960): micro-batch and interleaving not stated
MIXTRAL = {
    "model": "Mixtral-8x22B",
    "gpu": "H100-80GB",
    "num_gpus": "128",
    "framework": "Megatron-Core",
    "tp": "2",
    "pp": "8",
    "dp": "8",
    "ep": "8",
    "global_batch": "256",
    "notes": "MCore w/ Folding; ETP 1",
    "seq_len": "4096",
}


def job_of(row: dict[str, str], **cells: str) -> Job:
    return read_row(row | cells)


def test_a_model_by_its_name_alone():
    job = job_of({"model": "deepseek-ai/DeepSeek-V3", "num_gpus": "2048", "gpu": "H800"})
    model = job.model
    assert (
        model.mla.kv_lora_rank == 512
        and model.moe.shared_ffn_hidden == 2048
        and model.moe.first_dense_layers == 3
    )
    assert model.parameters / 1e9 == pytest.approx(671, rel=0.01) and "layers=61" in job.assumed
    assert job_of({"model": "Qwen3-30B-A3B"}).model.head_dim == 128  # hidden / heads is 64
    assert job_of({"model": "qwen-32b"}).model.heads == 40  # not Qwen3 with a size of 2b
    assert job_of({"model": "Gemma 2B"}).model.kv_heads == 1
    assert not job_of({"model": "BERT-large"}).model.causal and model.causal
    assert job_of({"model": "DeepSeek-V2"}).model.layers == 60


def test_cells_win_over_the_name_and_another_width_is_another_model():
    reduced = job_of({"model": "Llama3-70B-L12", "layers": "12"}).model
    assert (reduced.layers, reduced.hidden, reduced.ffn_hidden, reduced.kv_heads) == (
        12,
        8192,
        28672,
        8,
    )
    assert job_of(
        {"model": "GPT-h14400-L80", "params_b": "202.7"}
    ).model.parameters / 1e9 == pytest.approx(202.7, rel=0.05)
    cut = {
        layers: job_of({"model": "DeepSeek-V3", "layers": layers}).model.moe
        for layers in ("3", "4")
    }
    assert cut["3"] is None and cut["4"].first_dense_layers == 3
    narrow = job_of(
        {"model": "Qwen3-30B-A3B", "layers": "8", "hidden": "1024", "heads": "16"}
    ).model
    assert narrow.head_dim == 64 and narrow.moe is None


def test_published_shapes_have_the_size_of_their_name():
    """Names round sizes, by 11 % at most."""
    for family, sizes, shape in listed_models():
        named = [float(size) for size in sizes if size != "?"]
        assert min(abs(_size(shape) / size - 1) for size in named) < 0.11, family.pattern


@pytest.mark.parametrize(
    ("cells", "billions"),
    [
        ({"params_b": "13"}, 13),
        ({"params_b": "6700"}, 6.7),
        ({"params_b": "1.3e9"}, 1.3),
        ({"model": "Foo-40B"}, 40),
        ({"params_b": "350M"}, 0.35),
    ],
)
def test_a_size_alone_is_a_usual_shape_of_that_size(cells, billions):
    model = job_of(cells).model
    assert (
        model.parameters / 1e9 == pytest.approx(billions, rel=0.12)
        and model.heads * model.head_dim == model.hidden
    )


def test_a_width_or_a_depth_alone_is_a_usual_shape_that_has_it():
    wide = job_of({"model": "mine", "hidden": "8192"})
    assert (
        wide.model.hidden == 8192 and 40 <= wide.model.layers <= 56 and "layers=48" in wide.assumed
    )
    assert job_of({"model": "mine", "hidden": "128"}).model.layers < 16
    deep = job_of({"model": "mine", "layers": "80"})
    assert deep.model.layers == 80 and 11264 <= deep.model.hidden <= 13312


def test_virtual_stages_that_a_row_does_not_record():
    parallel = job_of(ZERO_BUBBLE).parallel
    assert (parallel.schedule, parallel.vpp) == (
        "interleaved",
        3,
    )  # (22 + 2) / 8: one layer a stage
    assert parallel.stage_layers == [0, *[1] * 22, 0]  # embedding and head count as layers
    split = job_of(ZERO_BUBBLE, pp_schedule="zb-2p", vpp="1").parallel
    assert split.schedule == "zb_h2" and split.stage_layers == [2, 3, 3, 3, 3, 3, 3, 2]
    assert job_of(MIXTRAL).parallel.vpp == 7  # blank schedule, Megatron-Core: 56 layers on 8 stages
    assert (
        job_of(GPT_1_7B, pp="8", dp="4", pp_schedule="", vpp="").parallel.schedule == "1f1b"
    )  # software of 2021
    stated = {
        task: job_of(LLAMA_70B, pp_schedule="1f1b", vpp="", task=task).parallel.vpp
        for task in ("sft", "lora")
    }
    assert stated == {
        "sft": 20,
        "lora": 1,
    }  # NeMo interleaves, but for LoRA; vpp 1 would say that it does not
    titan = job_of(
        LLAMA_70B, framework="torchtitan", pp_schedule="Interleaved1F1B", vpp=""
    ).parallel
    assert (titan.schedule, titan.vpp) == ("interleaved", 2)


def test_experts_folded_over_tensor_parallelism():
    par = job_of(MIXTRAL).parallel  # 8 whole experts over tp x dp
    assert (par.ep, par.dp, par.etp) == (4, 2, 1)
    split = job_of(MIXTRAL, notes="").parallel
    assert (split.ep, split.etp) == (8, UNSET), (
        "cut over tp, as Megatron-Core does where nothing is said"
    )
    beyond = job_of(MIXTRAL, num_gpus="64", dp="4", notes="").parallel
    assert (beyond.ep, beyond.etp, expert_mesh(beyond).ep) == (4, 1, 8), (
        "more than dp has places: over tp"
    )
    sequence = job_of(MIXTRAL, num_gpus="64", tp="1", cp="8", pp="8", dp="1", notes="").parallel
    assert sequence.fold_cp is True and expert_mesh(sequence) == (1, 8, 1)
    assert expert_mesh(job_of(MIXTRAL, ep="16", notes="").parallel).ep == 8  # there are 8 experts
    few = job_of(MIXTRAL, num_gpus="48", tp="1", dp="6", notes="", ep="4")
    assert few.parallel.ep == 2 and any(
        assumption.startswith("ep=2 of 4") for assumption in few.assumed
    )


def test_nodes_and_their_gpus_are_gpus():
    four = {"model": "Llama-2-7b", "gpu": "A100", "tp": "2", "pp": "1", "nodes": "4"}
    assert job_of(four, gpus_per_node="4").parallel.world_size == 16
    job = job_of(four, num_gpus="16")
    assert (job.parallel.world_size, job.cluster.gpus_per_node) == (16, 4)


def test_degrees_follow_from_each_other():
    assert job_of(LLAMA_70B, dp="").parallel.dp == 8
    assert job_of(LLAMA_70B, tp="", dp="8").parallel.tp == 2
    assert job_of(LLAMA_70B, num_gpus="", dp="16").parallel.world_size == 128
    assert (
        job_of(LLAMA_70B, num_gpus="60").parallel.world_size == 64
    )  # tp 2 x pp 4 does not divide 60
    deep = job_of(GPT_1_7B, pp="32", dp="1")
    assert deep.parallel.pp == 16 and deep.parallel.world_size == 32  # 24 layers
    assert (
        job_of({"model": "GPT-13B", "framework": "DeepSpeed ZeRO-2", "zero_stage": "2"}).parallel.tp
        == 1
    )
    sharded = job_of(
        {"model": "Llama-2-70b", "framework": "PyTorch FSDP", "gpu": "A100-80GB"}
    ).parallel
    assert (sharded.tp, sharded.zero) == (1, 3) and sharded.world_size >= 32
    split = job_of({"model": "Llama-2-70b", "framework": "Megatron-LM", "num_gpus": "64"}).parallel
    assert split.tp * split.pp >= 8 and split.zero == 1


def test_sequences_sharded_without_tensor_parallelism():
    job = job_of(GPT_1_7B, tp="1", sp="8", framework="DeepSpeed-Ulysses", dp="", gpu="H100-80GB")
    assert (job.parallel.cp, job.parallel.dp, job.parallel.cp_method) == (8, 4, "ulysses")
    assert not job.parallel.sp and "cp=8: from sp" in job.assumed
    assert job_of(LLAMA_70B, sp="2").parallel.sp  # some tables repeat tp there


def test_batches():
    assert (
        job_of(LLAMA_70B, micro_batch="", notes="grad accumulation 16").parallel.micro_batch_size
        == 2
    )
    blank = {
        "model": "Qwen3-30B-A3B",
        "seq_len": "4096",
        "framework": "Megatron-Bridge",
        "ep": "8",
        "num_gpus": "8",
    }
    sizes = {
        gpu: job_of(blank, gpu=gpu, global_batch="512").parallel.micro_batch_size
        for gpu in ("H100", "GB300")
    }
    assert sizes == {"H100": 1, "GB300": 4}  # as memory allows
    assert job_of(blank, gpu="GB300", zero_stage="3").parallel.micro_batch_size == 1
    assert job_of(blank, framework="FSDP", micro_batch="1").parallel.micro_batches == 1
    assert job_of(blank, micro_batch="1").parallel.micro_batches == 64
    wide = job_of(
        LLAMA_70B, tp="8", pp="1", vpp="1", micro_batch="", global_batch="64", seq_len="4096"
    ).parallel
    assert wide.micro_batch_size == 4
    tokens = job_of(LLAMA_70B, global_batch="4M").parallel
    assert tokens.global_batch_samples == 512
    assert job_of(LLAMA_70B, global_batch="").parallel.global_batch_samples == 256  # 2 M tokens
    assert (
        job_of(LLAMA_70B, global_batch="", num_gpus="1024").parallel.micro_batches == 16
    )  # 4 a stage at least
    assert job_of(LLAMA_70B, micro_batch="64", global_batch="64").parallel.micro_batch_size == 8


@pytest.mark.parametrize(
    ("row", "name", "traits"),
    [
        (GPT_1_7B, "megatron_2021", {"attention": "unfused"}),
        (GPT_1_7B | {"notes": "FlashAttention"}, "megatron", {"attention": "flash"}),
        (LLAMA_70B, "nemo", {"attention": "cudnn", "host": "eager", "tp_overlap": True}),
        (LLAMA_70B | {"notes": "NeMo container 26.06"}, "nemo", {"host": "modern"}),
        (LLAMA_70B | {"notes": "max 28.29 GiB"}, "nemo", {"host": "eager"}),
        (LLAMA_70B | {"zero_stage": "3"}, "nemo", {"dp_overlap": "modern"}),
        (
            GPT_1_7B | {"framework": "NeMo-Megatron", "precision": "bf16"},
            "nemo",
            {"attention": "unfused"},
        ),
        (GPT_1_7B | {"framework": "DeepSpeed ZeRO-3", "zero_stage": "3"}, "deepspeed_2021", {}),
        (LLAMA_70B | {"framework": "DeepSpeed"}, "transformers", {}),
        (LLAMA_70B | {"framework": "HF PEFT"}, "transformers", {"elementwise": "modules"}),
        (LLAMA_70B | {"framework": "SageMaker (MiCS, ZeRO-3)"}, "fsdp", {}),
        (GPT_1_7B | {"framework": "PyTorch FSDP"}, "fsdp", {"attention": "unfused"}),
        (GPT_1_7B | {"framework": "llm.c", "notes": "flash attention"}, "fsdp_compile", {}),
        (LLAMA_70B | {"framework": "Megatron-Core 0.8", "notes": ""}, "nemo", {"grad_bytes": None}),
        (LLAMA_70B, "nemo", {"grad_bytes": 2}),
        (LLAMA_70B | {"framework": "Megatron-Core", "notes": ""}, "nemo", {"tp_overlap": False}),
        (
            LLAMA_70B | {"framework": "Megatron-Core", "notes": "TP comm overlap"},
            "nemo",
            {"tp_overlap": True},
        ),
        (
            LLAMA_70B | {"framework": "mcore", "notes": "", "source": "Megatron-LM README"},
            "nemo",
            {"tp_overlap": True},
        ),
        (
            LLAMA_70B | {"framework": "mcore", "notes": "", "source": "one/Megatron-LM#1"},
            "nemo",
            {"tp_overlap": False},
        ),
        (LLAMA_70B | {"framework": "HAI-LLM (internal)"}, "deepseek", {}),
        (GPT_1_7B | {"framework": "Megatron-Core"}, "nemo", {"attention": "flash"}),
        (LLAMA_70B | {"gpu": "V100-32GB"}, "nemo", {"attention": "unfused"}),
        (
            LLAMA_70B | {"framework": "torchtitan", "notes": "compile; async TP"},
            "torchtitan",
            {"elementwise": "fused"},
        ),
        (LLAMA_70B | {"framework": "MaxText (JAX)"}, "maxtext", {}),
        (
            LLAMA_70B | {"framework": "LLM-Foundry/Composer (FSDP)", "gpu": "A100-80GB"},
            "fsdp_triton",
            {},
        ),
        (LLAMA_70B | {"framework": "nobody's trainer"}, "eager", {}),
        (
            LLAMA_70B | {"notes": "no communication overlap"},
            "nemo",
            {"tp_overlap": False, "dp_overlap": "early"},
        ),
    ],
)
def test_software(row, name, traits):
    software = read_row(row).software
    assert software.name == name and {trait: getattr(software, trait) for trait in traits} == traits


@pytest.mark.parametrize(
    ("gpu", "precision", "matmul", "wide"),
    [
        ("GB200", "FP8-CS", "fp8_tensor", "bf16"),
        ("GB200", "FP8-MX", "mxfp8", "bf16"),
        ("GB200", "NVFP4", "nvfp4", "bf16"),
        ("H100-80GB", "fp8-tensorwise", "fp8_tensor", "bf16"),
        ("H100-80GB", "fp8-rowwise", "fp8_row", "bf16"),
        ("A100-80GB", "fp8", "", "bf16"),
        ("V100-32GB", "", "", "fp16"),
        ("A100-80GB", "BF16-mixed", "", "bf16"),
    ],
)
def test_precisions(gpu, precision, matmul, wide):
    job = job_of(LLAMA_70B, gpu=gpu, precision=precision)
    assert (job.matmul, job.train.precision) == (matmul, wide)


@pytest.mark.parametrize(
    ("framework", "recompute", "expected"),
    [
        ("torchtitan (FSDP2)", "full (every other layer)", ("full", 0.5, "ops")),
        ("torchtitan (FSDP2)", "selective", ("selective", 1.0, "ops")),
        ("fms-fsdp (PyTorch FSDP + compile)", "selective", ("selective", 0.5, "alternate")),
        ("Megatron-LM", "selective", ("selective", 1.0, "core")),
        ("Megatron-LM", "True", ("full", 1.0, "core")),
        ("Megatron-LM", "None", ("none", 1.0, "core")),
        ("Megatron-LM", "", (None, 1.0, "core")),
    ],
)
def test_recomputation(framework, recompute, expected):
    job = job_of(LLAMA_70B, framework=framework, recompute=recompute)
    assert (job.recompute, job.recompute_share, job.software.selective) == expected


def test_hardware_and_software_of_rows_that_name_none():
    blank = job_of(LLAMA_70B, gpu="", interconnect="NVLink3+IB HDR 8x200Gb/s")
    assert blank.cluster.gpu.name == "A100-80GB" and "gpu=A100-80GB" in blank.assumed
    assert job_of(LLAMA_70B, framework="").software.name == "nemo"  # notes name its container
    assert job_of(LLAMA_70B, framework="", notes="").software.name == "megatron"  # tp and pp
    assert job_of({"model": "gpt2", "zero_stage": "3"}).software.name == "fsdp"
    assert job_of({"model": "gpt2"}).software.name == "eager"
    named = job_of({"model": "GPT-13B", "framework": "DeepSpeed ZeRO-3", "gpu": "V100", "dp": "64"})
    assert named.software.name == "deepspeed_2021" and named.parallel.zero == 3


def test_tasks_and_sources():
    assert job_of(LLAMA_70B, framework="HF PEFT LoRA").task == "lora"
    tasks = [job_of(LLAMA_70B, task=task).task for task in ("pretrain", "SFT", "LoRA", "")]
    assert tasks == ["pretrain", "sft", "lora", "pretrain"]
    assert job_of(LLAMA_70B, id="bridge_nemo-078").group == "bridge_nemo"


@pytest.mark.parametrize(
    ("description", "per_gpu", "nics", "slow"),
    [
        ("NVLink3 (8 GPU)+Omni-Path 4x100Gb/s per node", 50, 4, False),
        ("NVLink4+EFA 3200Gb/s per node", 400, None, True),
        ("NVLink3+RoCE (rate not stated)", None, None, True),
        ("NVSwitch + 100GbE", 12.5, None, True),
        ("InfiniBand HDR", 200, None, False),
        ("8x NDR", 400, 8, False),
        ("NVLink + IB 4x200", 100, 4, False),
        ("3.2Tbps InfiniBand", 400, None, False),
        ("IB EDR, 4 NICs per node", 50, 4, False),
        ("25 Gb/s per GPU", 25, None, True),
        ("", None, None, False),
    ],
)
def test_networks(description, per_gpu, nics, slow):
    network = network_of(description, 8)
    assert (network.gbit_per_gpu, network.nics_per_node, network.slow) == (per_gpu, nics, slow)


def test_nodes_and_domains():
    assert (
        len(job_of(LLAMA_70B, interconnect="").cluster.nvlink_domains[0]) == 16
    )  # GB200 comes in racks
    assert job_of(LLAMA_70B, gpus_per_node="").cluster.gpus_per_node == 4
    assert (
        len(job_of(LLAMA_70B).cluster.nvlink_domains[0]) == 16
    )  # 16 nodes of 4 in one domain of 72
    pcie = job_of(LLAMA_70B, gpu="L40S", interconnect="PCIe4 + 100GbE").cluster
    assert pcie.nvlink.bytes_per_s == 32e9 and pcie.levels[0].bytes_per_s == 100e9 / 8 / 4
    assert (
        job_of(LLAMA_70B, gpu="A100", interconnect="no NVLink").cluster.nvlink.bytes_per_s == 32e9
    )


@pytest.mark.parametrize(
    ("gpu", "gpus_per_node", "num_gpus", "interconnect", "direct", "rate"),
    [
        ("GH200", "", "256", "Slingshot", True, 450),
        (
            "GH200",
            "4",
            "2",
            "",
            True,
            150,
        ),  # of a node's three links to each GPU those between the two
        ("H100", "4", "64", "NVLink", True, 450),
        ("A100 64GB", "", "64", "", True, 300),
        ("H100", "8", "64", "", False, 450),
        ("H100", "", "4", "", False, 450),  # half a DGX
        ("H100", "4", "64", "PCIe", False, 64),
        ("GB200", "4", "64", "", False, 900),
    ],
)
def test_four_gpus_of_a_node_are_joined_without_a_switch(
    gpu, gpus_per_node, num_gpus, interconnect, direct, rate
):
    node = {"gpus_per_node": gpus_per_node, "num_gpus": num_gpus, "interconnect": interconnect}
    degrees = {"tp": "2", "pp": "1", "vpp": "1", "dp": ""}
    cluster = job_of(LLAMA_70B, gpu=gpu, **node, **degrees).cluster
    assert (cluster.direct_nvlink is True, cluster.nvlink.bytes_per_s) == (direct, rate * 1e9)


@pytest.mark.parametrize(
    ("framework", "replicas", "bucket_bytes"),
    [
        ("Megatron-Core", 256, 4 * 256_000_000),
        ("Megatron-Core", 8, 4 * 40_000_000),
        ("NeMo", 64, 2 * 64_000_000),
        ("InternEvo", 256, 25 << 20),
        ("torchtitan", 256, 25 << 20),
    ],
)
def test_buckets_of_megatron_core_grow_with_the_replicas(framework, replicas, bucket_bytes):
    degrees = {
        "tp": "1",
        "pp": "1",
        "vpp": "1",
        "dp": "",
        "zero_stage": "1",
        "num_gpus": str(replicas),
    }
    row = LLAMA_70B | {"framework": framework, "notes": ""} | degrees
    assert read_row(row).parallel.bucket_bytes == bucket_bytes


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("8xA100-SXM4-40GB", "A100-40GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("H100 PCIe", "H100-PCIe"),
        ("AMD Instinct MI300X", "MI300X"),
        ("A10G", "A10G"),
        ("H20", "H20"),
        ("H200", "H200"),
        ("NVIDIA Ampere A100 80GB", "A100-80GB"),
        ("A100-SXM4-80GB 400W", "A100-80GB"),
        ("A100-40GB PCIe", "A100-40GB-PCIe"),
        ("NVIDIA RTX 6000 Ada", "RTX6000-Ada"),
        ("GB200 NVL72", "GB200"),
        ("p4d.24xlarge", "A100-40GB"),
        ("ND96amsr_A100_v4", "A100-80GB"),
        ("TPU v5p", "TPUv5p"),
        ("Hopper", "H100-80GB"),
        ("MI350X", "MI355X"),
        ("Ascend 910B2", "Ascend910B"),
    ],
)
def test_gpus(description, name):
    assert gpu_of(description) == (name, True)


@pytest.mark.parametrize(
    "description",
    [
        "RTX PRO 6000 Blackwell",
        "Quadro RTX 6000",
        "A1000",
        "RTX A4000",
        "T400",
        "P1000",
        "P5000",
        "DGX 10",
    ],
)
def test_a_gpu_that_only_begins_like_another_is_not_that_one(description):
    assert gpu_of(description) == ("H100-80GB", False)


@pytest.mark.parametrize(
    ("name", "cell", "value"),
    [
        ("vocab", "51,200", 51200),
        ("num_gpus", "8x", 8),
        ("num_gpus", "16x8", 128),
        ("num_gpus", "64 GPUs (8 nodes)", 64),
        ("seq_len", "128k", 131072),
        ("vocab", "32k", 32000),
        ("layers", "32.0", 32),
        ("layers", "N/A", None),
    ],
)
def test_numbers(name, cell, value):
    assert number_of(name, cell) == value


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": "", "hidden": "", "model": "mine", "params_b": ""}, "layers is blank"),
        ({"tp": "many"}, "tp='many' is not a number"),
        ({"zero_stage": "9"}, "zero_stage='9'"),
        ({"hidden": "-1"}, "hidden='-1' must be at least 1"),
        ({"hidden": "1e9"}, "hidden='1e9' is above"),
        ({"layers": "2.5"}, "layers='2.5' is not a whole number"),
        ({"params_b": "-7"}, "params_b='-7'"),
        ({"params_b": "7e18"}, "params_b='7e18'"),
        ({"vocab": "9" * 5000}, "5000 characters"),
    ],
)
def test_a_row_that_cannot_be_predicted_says_why_and_the_rest_go_on(change, reason):
    first, bad, last = predict([GPT_1_7B, GPT_1_7B | change, GPT_1_7B])
    assert (
        bad.status.startswith("error: row 2: ") and reason in bad.status and bad.step_time_s is None
    )
    assert first.status == last.status == "ok"


TEXT = st.one_of(
    st.text(max_size=8),
    st.from_regex(r"-?[0-9]{1,7}(\.[0-9])?[kMB]?", fullmatch=True),
    st.sampled_from(
        [
            "",
            "0",
            "1",
            "2",
            "3",
            "7",
            "8",
            "64",
            "1e6",
            "zb-v",
            "interleaved",
            "dualpipe",
            "gpipe",
            "FSDP",
        ]
    ),
    st.sampled_from(
        [
            "nan",
            "full",
            "selective",
            "Megatron-LM",
            "NeMo",
            "Qwen3-30B-A3B",
            "DeepSeek-V3",
            "NVL72",
            "PCIe",
        ]
    ),
)


@given(
    st.dictionaries(
        st.sampled_from(sorted(GPT_1_7B | {"experts": "", "topk": "", "notes": ""})), TEXT
    ),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_text_in_any_column_is_a_prediction_or_a_reason(change, blank):
    """A reason names the row and a column."""
    (prediction,) = predict([change if blank else GPT_1_7B | change])
    if prediction.status in ("ok", "oom"):
        assert 0 < prediction.step_time_s < float("inf") and prediction.peak_mem_gib > 0
    else:
        column = prediction.status.removeprefix("error: row 1: ").split("=")[0].split()[0]
        assert column in GPT_1_7B or column in ("layers", "experts", "topk")
