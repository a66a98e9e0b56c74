"""Reproduces figures of the Ultra-Scale Playbook: memory by sequence length, ZeRO, tensor and
pipeline parallelism, and the bandwidth of an all-reduce by number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import structs

from orchestrator.accuracy.reproduce import published as pub
from orchestrator.cluster.build import build_cluster
from orchestrator.config.schema import ModelSpec
from orchestrator.cost.dual import value_of
from orchestrator.cost.numpy_import import np
from orchestrator.cost.profile import shipped
from orchestrator.cost.rates import Links
from orchestrator.cost.time import collective
from orchestrator.cost.time.fabric import Fabric
from orchestrator.plan import Plan
from orchestrator.plan.schedules import build, simulate

from .rows import Plans, Row, Section

GIB = 1 << 30
SIZES = {"1B": "llama32_1b", "8B": "llama3_8b", "70B": "llama3_70b"}
ONE_NODE = {"tp": 1, "pp": 1, "dp": 8, "micro_batch_size": 1}


def sections(plans: Plans) -> Iterator[Section]:
    yield _states(plans)
    yield _by_sequence_length(plans)
    yield _zero_bars(plans)
    yield _tensor_parallel(plans)
    yield _pipeline(plans)
    yield _bubble()
    yield _interleaving()
    yield _all_reduce(plans)


def _bubble() -> Section:
    rows = [
        Row(
            f"{stages} stages",
            simulate(build("1f1b", stages, micro_batches)).bubble_ratio,
            (stages - 1) / micro_batches,
            column=column,
            within=1e-6,
        )
        for stages in (2, 4, 8, 16, 32)
        for column, micro_batches in (("m = p - 1", stages - 1), ("m = 32", 32))
    ]
    return Section(
        "The bubble at few and at many micro-batches: idle over busy time",
        f"{pub.PLAYBOOK}, pipeline parallelism; Narayanan et al. (arXiv 2104.04473): (p - 1) / m",
        rows,
        "1F1B, simulated with equal stages and a backward of twice the forward.",
    )


def _interleaving() -> Section:
    rows = []
    for micro_batches in (8, 16, 32, 64):
        for vpp in (1, 2, 4, 8):
            schedule = "interleaved" if vpp > 1 else "1f1b"
            rows.append(
                Row(
                    f"{micro_batches} micro-batches",
                    simulate(build(schedule, 8, micro_batches, vpp)).bubble_ratio,
                    7 / (vpp * micro_batches),
                    column=f"v = {vpp}",
                    within=1e-6,
                )
            )
    return Section(
        "Interleaving: idle over busy time with 8 stages",
        f"{pub.PLAYBOOK}, interleaving stages; Narayanan et al. (arXiv 2104.04473): (p - 1) /"
        " (v m)",
        rows,
        "Interleaved 1F1B, simulated.",
    )


def _states(plans: Plans) -> Section:
    rows = []
    for index, (dtype, column, tolerance) in enumerate(
        (("bf16", "without fp32 gradients", 0.005), ("fp32", "with fp32 gradients", None))
    ):
        plan = plans.plan(f"cluster=h100x8 model=gpt2 train.grad_dtype={dtype}", **_one_node(1024))
        states = plan.memory.params + plan.memory.grads + plan.memory.optimizer
        bytes_per_parameter = states / plan.model.parameters
        for billions, published_gb in pub.PLAYBOOK_STATES.items():
            rows.append(
                Row(
                    f"{billions}B",
                    billions * bytes_per_parameter,
                    published_gb[index],
                    "GB",
                    column,
                    within=tolerance,
                )
            )
    return Section(
        "Parameters, gradients and optimizer state in mixed precision, GB",
        f"{pub.PLAYBOOK}, memory for weights, gradients and optimizer states",
        rows,
        "Bytes a parameter of a plan without sharding, times the playbook's number of parameters.",
        "With fp32 gradients the playbook keeps the 16-bit ones as well: 20 bytes a parameter; this"
        " trainer sums into fp32 alone: 18.",
    )


def _one_node(seq_len: int, zero: int = 0) -> dict[str, Any]:
    return {
        "parallel": ONE_NODE | {"zero": zero},
        "train": {"seq_len": seq_len, "global_batch_samples": 8, "recompute": "none"},
    }


def _by_sequence_length(plans: Plans) -> Section:
    rows = []
    for size, name in SIZES.items():
        for seq_len in (1024, 2048, 4096, 8192, 16384):
            overrides = f"cluster=h100x8 model={name} train.grad_dtype=bf16 model.max_seq_len=16384"
            plan = plans.plan(overrides, **_one_node(seq_len))
            model = plan.model
            memory = plan.memory
            formula_gib = (
                model.layers
                * seq_len
                * model.hidden
                * (34 + 5 * model.heads * seq_len / model.hidden)
                / GIB
            )
            for category, bytes_per_parameter in (
                ("params", 2),
                ("grads", 2),
                ("optimizer", 12),
            ):
                planned_gib = getattr(memory, category) / GIB
                rows.append(
                    Row(
                        f"{size}, {category}",
                        planned_gib,
                        model.parameters * bytes_per_parameter / GIB,
                        "GiB",
                        f"{seq_len}",
                        within=0.005,
                    )
                )
            unfused_activations = plans.plan(
                f"{overrides} cost.software=megatron_2021", **_one_node(seq_len)
            ).memory.activations
            rows.append(
                Row(
                    f"{size}, activations",
                    unfused_activations / GIB,
                    formula_gib,
                    "GiB",
                    f"{seq_len}",
                    within=0.12,
                )
            )
            rows.append(
                Row(
                    f"{size}, the same, fused attention",
                    memory.activations / GIB,
                    None,
                    "GiB",
                    f"{seq_len}",
                )
            )
    rows.sort(key=lambda row: list(SIZES).index(row.what.split(",")[0]))
    return Section(
        "Memory by category against sequence length, GiB of one sequence",
        f"{pub.PLAYBOOK}, memory for activations: L s h (34 + 5 a s / h); 16 bytes a parameter",
        rows,
        "A plan without sharding or recomputation. States do not depend on the sequence;"
        " activations overtake them. The first activations with `cost.software=megatron_2021`,"
        " whose attention keeps its scores, hence a square of the sequence; fused attention is"
        " linear.",
        "Llama's MLP is gated, its key-value heads are fewer and its logits are kept, which the"
        " formula does not know.",
    )


def _zero_bars(plans: Plans) -> Section:
    rows = []
    for zero in range(4):
        plan = plans.plan(
            "cluster=h100x64 model=llama3_8b train.grad_dtype=bf16",
            parallel={"tp": 1, "pp": 1, "dp": 64, "zero": zero, "micro_batch_size": 1},
            train={"seq_len": 4096, "global_batch_samples": 64, "recompute": "none"},
        )
        memory = plan.memory
        psi = plan.model.parameters / GIB
        for category, bytes_per_parameter, sharded_from in (
            ("params", 2, 3),
            ("grads", 2, 2),
            ("optimizer", 12, 1),
        ):
            ranks = 64 if zero >= sharded_from else 1
            rows.append(
                Row(
                    f"ZeRO-{zero}",
                    getattr(memory, category) / GIB,
                    bytes_per_parameter * psi / ranks,
                    "GiB",
                    category,
                    within=0.005 if zero < 3 else None,
                )
            )
        rows.append(
            Row(
                f"ZeRO-{zero}",
                memory.activations / GIB,
                None,
                "GiB",
                "activations",
            )
        )
    return Section(
        "ZeRO at 8B on 64 GPUs, GiB",
        f"{pub.PLAYBOOK}, ZeRO: 2, 2 and 12 Psi bytes, each over N_d where it is sharded;"
        " activations never are",
        rows,
        "A plan of Llama 3 8B at 4,096 tokens, one sequence a GPU, gradients in 16 bits.",
        "With ZeRO-3 this trainer's shard of the weights is the fp32 master copy (4 bytes), and is"
        " not held twice.",
    )


def _three_b(plans: Plans) -> ModelSpec:
    """Returns the playbook's 3B model, which has 3.57 billion parameters."""
    llama = plans.config("model=llama3_8b").model
    shape = {
        "layers": 28,
        "hidden": 3072,
        "ffn_hidden": 8192,
        "heads": 32,
        "kv_heads": 32,
        "head_dim": 96,
    }
    return structs.replace(
        llama,
        name="llama_3b",
        vocab=131072,
        tied_embeddings=True,
        **shape,
    )


def _tp_plan(plans: Plans, tp: int, sequences: int, sp: bool = True) -> Plan:
    return plans.plan(
        f"cluster=h100x64 cost.software=nanotron cluster.gpus_per_node={min(tp, 8)}",
        parallel={"tp": tp, "pp": 1, "dp": 1, "zero": 0, "sp": sp, "micro_batch_size": sequences}
        | {"allow_tp_across_nvlink": True},
        train={"seq_len": 4096, "global_batch_samples": sequences, "recompute": "none"},
        model=_three_b(plans),
        nodes=max(1, tp // 8),
    )


def _tensor_parallel(plans: Plans) -> Section:
    rows = []
    ours = {}
    for tp, (sequences, published) in pub.PLAYBOOK_TP.items():
        ours[tp] = _tp_plan(plans, tp, sequences).tokens_per_s_per_gpu
        rows.append(Row(f"TP {tp}", ours[tp], published, "", "tokens/s per GPU"))
        for column, sp in (("sequences that fit with SP", True), ("without SP", False)):
            rows.append(
                Row(
                    f"TP {tp}",
                    _most_sequences(plans, tp, sp),
                    sequences if sp else None,
                    "",
                    column,
                )
            )
    for tp in (4, 8, 16):
        published_tokens, published_tokens_doubled = (
            pub.PLAYBOOK_TP[degree][1] for degree in (tp, 2 * tp)
        )
        lost_share = 1 - ours[2 * tp] / ours[tp]
        rows.append(
            Row(
                f"lost from TP {tp} to {2 * tp}, %",
                100 * lost_share,
                100 * (1 - published_tokens_doubled / published_tokens),
                "",
                "tokens/s per GPU",
            )
        )
    return Section(
        "Tensor parallelism: throughput of a 3B model as TP grows past the node",
        f"{pub.PLAYBOOK}, tensor and sequence parallelism (4,096 tokens, the largest micro-batch"
        " that fits)",
        rows,
        "Plans with `cost.software=nanotron`, GPUs = TP, nodes of eight H100.",
        "Theirs ran on 32 x 100 Gb/s of EFA a node, ours on 8 x 400 Gb/s of InfiniBand: the same"
        " sum.",
    )


def _most_sequences(plans: Plans, tp: int, sp: bool) -> int:
    """Returns the number of sequences of 4,096 tokens in the largest micro-batch that fits."""
    low = 0
    high = 256
    while high - low > 1:
        middle = (low + high) // 2
        memory = _tp_plan(plans, tp, middle, sp).memory
        low, high = (middle, high) if memory.total <= memory.capacity else (low, middle)
    return low


def _pipeline(plans: Plans) -> Section:
    def tokens_per_s_per_gpu(axis: str, ranks: int) -> float:
        plan = plans.plan(
            "cluster=h100x64 model=llama3_70b cost.software=nanotron",
            parallel={
                "tp": 1,
                "pp": 1,
                "dp": 1,
                "zero": 0,
                "micro_batch_size": 1,
                "allow_tp_across_nvlink": True,
                axis: ranks,
            },
            train={"seq_len": 4096, "global_batch_samples": 32, "recompute": "none"},
            nodes=ranks // 8,
        )
        return plan.tokens_per_s_per_gpu

    def loss(axis: str) -> float:
        return 100 * (1 - tokens_per_s_per_gpu(axis, 16) / tokens_per_s_per_gpu(axis, 8))

    pipeline_loss = loss("pp")
    tensor_loss = loss("tp")
    tp_loss = 100 * (1 - pub.PLAYBOOK_TP[16][1] / pub.PLAYBOOK_TP[8][1])
    return Section(
        "From one node to two: throughput lost, %",
        f"{pub.PLAYBOOK}, pipeline parallelism, m = 32",
        [
            Row("8 to 16 pipeline stages", pipeline_loss, 100 * pub.PLAYBOOK_PP_LOSS, "%"),
            Row("8 to 16 tensor-parallel ranks", tensor_loss, tp_loss, "%"),
            Row(
                "tensor over pipeline",
                tensor_loss / pipeline_loss,
                1.0,
                "x",
                bound="more",
            ),
        ],
        "Plans of Llama 3 70B (whose head is small beside a stage) at 4,096 tokens with 32"
        " micro-batches of one sequence, `cost.software=nanotron`.",
        "The playbook does not print its model; crossing the node costs a pipeline less than tensor"
        " parallelism.",
    )


def _all_reduce(plans: Plans) -> Section:
    rows = []
    for nodes, published in pub.ALL_REDUCE.items():
        for size, published_gb_per_s, name in zip(
            (1 << 28, 1 << 30),
            published,
            ("256 MiB", "1 GiB"),
            strict=True,
        ):
            rows.append(
                Row(
                    f"{nodes} nodes",
                    bus_bandwidth(plans, nodes, size),
                    published_gb_per_s,
                    "GB/s",
                    name,
                    within=0.25,
                )
            )
        if nodes in pub.PLAYBOOK_ALL_REDUCE:
            ours = bus_bandwidth(plans, nodes, 1 << 28)
            rows.append(
                Row(
                    f"{nodes} nodes",
                    ours,
                    pub.PLAYBOOK_ALL_REDUCE[nodes],
                    "GB/s",
                    "256 MB, the playbook's cloud",
                )
            )
    return Section(
        "All-reduce by nodes: bus bandwidth of 8 H100 a node, GB/s",
        f"{pub.ALL_REDUCE_SOURCE}; the last column: {pub.PLAYBOOK}",
        rows,
        "The planner's ring over nodes with 8 x 400 Gb/s: NVLink at its data sheet's rate, the"
        " network at the share and latency of the shipped profile: fitted to training runs, from"
        " priors that know the spread of this chart.",
        "Inside a step NVLink is shared with compute, and the plan gives it less. The playbook's"
        " figures beyond a node are of a cloud fabric and an older stack: two to six times below"
        " what DGX H100 with InfiniBand reach, and p5 nodes of the same cloud (342 to 437); such a"
        " fabric is a cluster file or `orch bench`, not a constant.",
    )


def bus_bandwidth(plans: Plans, nodes: int, size: int) -> float:
    """Returns the bus bandwidth in GB/s while nothing else runs, counted as nccl-tests counts it:
    2 (n - 1) / n bytes per byte reduced."""
    cluster = build_cluster(plans.config("cluster=h100x64", nodes=nodes).cluster)
    gpus = 8 * nodes
    path = Fabric(cluster).path(np.arange(gpus).reshape(1, gpus), "ring")
    values = shipped().values
    links = Links(
        nvlink=1.0,
        nic=values["nic"],
        latency=values["latency"],
        launch_s=0.0,
    )
    seconds = value_of(collective.seconds("all_reduce", size, gpus, path, links))
    return 2 * (gpus - 1) / gpus * size / seconds / 1e9
