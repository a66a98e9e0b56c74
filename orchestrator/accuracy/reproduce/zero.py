"""Reproduces ZeRO (arXiv 1910.02054) and DeepSpeed's BERT: memory, the largest models, traffic and
throughput on V100."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.accuracy.reproduce import published as pub
from orchestrator.plan import Plan
from orchestrator.plan.flops import hardware_flops_per_token

from .rows import Plans, Row, Section

STAGES = ("P_os", "P_os+g", "P_os+g+p")
V100 = "cluster=v100x400 train=pretrain_fp16 train.grad_dtype=fp16 cost.software"
MEGATRON, ZERO, ZERO_3 = (
    f"{V100}={name}" for name in ("megatron_2021", "deepspeed_2020", "deepspeed_2021")
)


def sections(plans: Plans) -> Iterator[Section]:
    state_bytes = _state_bytes(plans)
    yield _states(state_bytes)
    yield _largest_in_theory(state_bytes[64])
    yield Section(
        "The largest model that runs: billions of parameters",
        f"{pub.ZERO}, table 2, measured",
        [
            Row(
                f"model parallelism {mp}",
                _largest(plans, mp, zero),
                published,
                "B",
                name,
            )
            for mp, published_by_stage in pub.ZERO_LARGEST_MEASURED.items()
            for name, published, zero in zip(
                ("baseline", "P_os"),
                published_by_stage,
                (0, 1),
                strict=True,
            )
        ],
        "Layers are added (hidden 1,920 to 8,192 as in the paper's runs) until the plan of a"
        " micro-batch of one, all activations recomputed, no longer fits.",
        "The paper's batches are larger than one, and it grew hidden sizes and layers in steps of"
        " its own.",
    )
    yield _traffic(plans)
    yield _throughput(plans)
    yield _bert(plans)


def _states(state_bytes: dict[int, list[float]]) -> Section:
    rows = []
    for size, published_by_ranks in pub.ZERO_STATES.items():
        billions = float(size[:-1]) * (1000 if size[-1] == "T" else 1)
        for gpus, published_by_stage in published_by_ranks.items():
            for stage, published, bytes_per_parameter in zip(
                STAGES,
                published_by_stage,
                state_bytes[gpus][1:],
                strict=True,
            ):
                rows.append(
                    Row(
                        f"{size}, {gpus} GPUs",
                        billions * bytes_per_parameter,
                        published,
                        "GB",
                        stage,
                        within=0.006 if published > 1 else 0.03,  # The paper prints two digits.
                    )
                )
    return Section(
        "ZeRO's memory: GB of model states per GPU",
        f"{pub.ZERO}, table 1",
        rows,
        "Parameters, gradients and optimizer state of a plan with dp = N_d, fp16 weights and"
        " gradients, per parameter of the model, times the paper's number of parameters.",
        "The paper truncates some digits.",
    )


def _largest_in_theory(bytes_per_parameter: list[float]) -> Section:
    """Compares the largest models by stage. `bytes_per_parameter` are those of states with ZeRO-0
    to ZeRO-3 on 64 replicas."""
    rows = []
    for mp, published_by_stage in pub.ZERO_LARGEST.items():
        for stage, published, state_bytes in zip(
            ("baseline", *STAGES),
            published_by_stage,
            bytes_per_parameter,
            strict=True,
        ):
            rows.append(
                Row(
                    f"model parallelism {mp}, {64 * mp} GPUs",
                    32 * mp / state_bytes,
                    published,
                    "B",
                    stage,
                    within=0.03,
                )
            )
    return Section(
        "The largest model by stage: billions of parameters on GPUs of 32 GB, 64 replicas",
        f"{pub.ZERO}, table 2, theoretical",
        rows,
        "32 GB times model parallelism over the bytes a parameter of the table above.",
        "The paper writes 1T for 1,024 and 2T for 2,048 billion.",
    )


def _state_bytes(plans: Plans) -> dict[int, list[float]]:
    """Returns a map N_d -> bytes of states per parameter with ZeRO-0 to ZeRO-3."""
    bytes_by_ranks = {}
    for ranks in (1, 4, 16, 64, 256, 1024):
        bytes_by_stage = []
        for zero in range(4):
            plan = plans.plan(
                f"{ZERO_3} model=gpt2 cluster.gpus_per_node={min(ranks, 16)}",
                parallel={"tp": 1, "pp": 1, "dp": ranks, "zero": zero},
                train={"global_batch_samples": ranks},
                nodes=max(1, ranks // 16),
            )
            states = plan.memory.params + plan.memory.grads + plan.memory.optimizer
            bytes_by_stage.append(states / plan.model.parameters)
        bytes_by_ranks[ranks] = bytes_by_stage
    return bytes_by_ranks


def _largest(plans: Plans, mp: int, zero: int) -> float:
    """Returns the size, in billions of parameters, of the deepest model that fits with 64 replicas
    of `mp` V100 each."""
    if mp > 1:
        shape = (8192, 64)
    elif zero:
        shape = (4096, 32)
    else:
        shape = (1920, 16)
    hidden, heads = shape

    def fits(layers: int) -> Plan | None:
        plan = plans.plan(
            ZERO if zero else MEGATRON,
            parallel={
                "tp": mp,
                "pp": 1,
                "dp": 64,
                "zero": zero,
                "sp": False,
                "micro_batch_size": 1,
            },
            train={"global_batch_samples": 64},
            model=plans.gpt(layers, hidden, heads),
            nodes=4 * mp,
        )
        return plan if plan.memory.total <= plan.memory.capacity else None

    low = 1
    high = 512
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    largest_plan = fits(low)
    return largest_plan.model.parameters / 1e9 if largest_plan else 0.0


def _traffic(plans: Plans) -> Section:
    rows = []
    for zero, published in pub.ZERO_TRAFFIC.items():
        plan = plans.plan(
            ZERO_3,
            parallel={"tp": 1, "pp": 1, "dp": 64, "zero": zero},
            train={"global_batch_samples": 64},
            model=plans.gpt(36, 4096, 32),
            nodes=4,
        )
        sent_bytes = sum(plan.placement["dp"].bytes_per_step_by_level.values())
        ring_pass_bytes = plan.model.parameters * 2 * 63 / 64
        rows.append(
            Row(f"ZeRO-{zero}", sent_bytes / ring_pass_bytes, published, "Psi", within=0.03)
        )
    return Section(
        "Communication of a step: multiples of Psi, the model's size",
        f"{pub.ZERO}, section 7",
        rows,
        "Bytes that the busiest rank sends in a plan (`placement.dp`), over those of one ring pass"
        " over all weights, 2 Psi (n - 1) / n bytes in 16 bits. The trainer's own counter gives the"
        " same to the byte: tests/trainer/test_zero_formulas.py.",
        "With ZeRO-3 embedding, last norm and head stay gathered from forward to backward: 2 Psi of"
        " those.",
    )


def _throughput(plans: Plans) -> Section:
    plan = plans.plan("experiment=zero_100b")
    tflops = plan.mfu * plan.cluster.gpu.peak_flops["fp16"] / 1e12
    two_node_plan = plans.plan(
        MEGATRON,
        parallel={"tp": 32, "pp": 1, "dp": 1, "zero": 0, "sp": False, "micro_batch_size": 8}
        | {"allow_tp_across_nvlink": True},
        train={"global_batch_samples": 8},
        model=plans.gpt(50, 8192, 32),
        nodes=2,
    )
    two_node_tflops = (
        two_node_plan.tokens_per_s_per_gpu
        * hardware_flops_per_token(two_node_plan.model, 1024, "full")
        / 1e12
    )
    small, large = (_sixty(plans, nodes) for nodes in (4, 25))
    speed_up = large.tokens_per_s_per_gpu * 400 / (small.tokens_per_s_per_gpu * 64)
    micro_batch_sizes = (
        f"micro-batches of {small.parallel.micro_batch_size} on 64 and"
        f" {large.parallel.micro_batch_size} on 400 GPUs"
    )
    return Section(
        "ZeRO's throughput",
        f"{pub.ZERO}, sections 1 and 10",
        [
            Row(
                "100B on 400 V100, a GPU",
                tflops,
                pub.ZERO_100B_TFLOPS,
                "TFLOP/s",
                within=0.10,
                sd=plan.time.sd,
            ),
            Row(
                "100B on 400 V100, together",
                tflops * 0.4,
                pub.ZERO_100B_PFLOPS,
                "PFLOP/s",
                within=0.12,
                sd=plan.time.sd,
            ),
            Row(
                "40B, tensor parallel across two DGX-2, a GPU",
                two_node_tflops,
                pub.ZERO_ACROSS_TFLOPS,
                "TFLOP/s",
                sd=two_node_plan.time.sd,
            ),
            Row(
                "60B, speed-up from 64 to 400 GPUs",
                speed_up,
                pub.ZERO_SUPER_LINEAR,
                "x",
                bound="more",
            ),
        ],
        "The preset `zero_100b`; 60B as 75 layers of hidden 8,192, tensor parallel in a node, with"
        f" the largest power-of-two micro-batch that fits: {micro_batch_sizes}. More replicas shard"
        " the states further, which leaves room for larger micro-batches: super-linear.",
        "Whether 38 TFLOP/s count recomputation is not said; model FLOPs are assumed. Eight NICs of"
        " 100 Gb/s could carry far more than 5 TFLOP/s need; how the collectives of that time used"
        " them is not said.",
    )


def _sixty(plans: Plans, nodes: int) -> Plan:
    """Plans the 60B model with the largest micro-batch that fits."""
    fitting_plan = None
    micro_batch_size = 1
    while True:
        plan = plans.plan(
            ZERO,
            parallel={
                "tp": 16,
                "pp": 1,
                "dp": nodes,
                "zero": 2,
                "sp": False,
                "micro_batch_size": micro_batch_size,
            },
            train={"global_batch_samples": micro_batch_size * nodes},
            model=plans.gpt(75, 8192, 32),
            nodes=nodes,
        )
        if fitting_plan is not None and plan.memory.total > plan.memory.capacity:
            return fitting_plan
        fitting_plan = plan
        micro_batch_size = micro_batch_size * 2


def _bert(plans: Plans) -> Section:
    rows = []
    total_s = 0.0
    for seq_len, (batch, steps) in pub.BERT_PHASES.items():
        plan = _bert_phase(plans, seq_len, batch)
        total_s += steps * plan.time.step_s
        samples_per_s = plan.tokens_per_s_per_gpu / seq_len
        rows.append(
            Row(
                f"samples/s a V100, {seq_len} tokens",
                samples_per_s,
                pub.BERT_SAMPLES_PER_S[seq_len],
                "/s",
                sd=plan.time.sd,
            )
        )
    rows.append(
        Row(
            "pre-training on 1,024 V100",
            total_s / 60,
            pub.BERT_MINUTES,
            "min",
            sd=plan.time.sd,
        )
    )
    return Section(
        "BERT-large in 44 minutes on 1,024 V100",
        pub.BERT_SOURCE,
        rows,
        "The preset `bert_large_44min`: 64 DGX-2, data parallel; batches of 65,536 for 7,038 steps"
        " at 128 tokens, then 32,768 for 1,563 at 512.",
        "Theirs are hand-fused kernels and logits of the masked tokens alone; ours computes logits"
        " of every token.",
    )


def _bert_phase(plans: Plans, seq_len: int, batch: int) -> Plan:
    largest_micro_batch = max(size for size in (16, 32, 64) if size * seq_len <= 8192)
    return plans.plan(
        "experiment=bert_large_44min",
        parallel={"micro_batch_size": min(largest_micro_batch, batch // 1024)},
        train={"seq_len": seq_len, "global_batch_samples": batch},
    )
