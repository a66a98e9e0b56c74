"""The techniques of the papers, and where each is in this repository: the list from which
`docs/make_techniques.py` writes docs/techniques.md.

`tests/docs/test_techniques.py` holds every row against the code. The words of a technique must give
a plan that the bundled trainer runs; where the row says that it is not there, they must be refused,
so the row fails as soon as the technique is added.
"""

from __future__ import annotations

from typing import NamedTuple

DENSE = "cluster=h100x8 model=llama32_1b"


class Technique(NamedTuple):
    """A technique of a paper.

    One in the code has cells, `verify` or `shown_by`; one that is not there has a `reason`.
    """

    name: str  # as the paper names it
    section: str
    words: str = ""  # on the command line; empty: always on
    beside: str = ""  # further words that it requires, or with which it is an example
    cells: tuple[str, ...] = ()  # layouts of docs/parity.md
    verify: str = ""  # words of an `orch verify` that docs/parity.md does not contain
    shown_by: tuple[str, ...] = ()  # FILE::NAME of tests and results that show the same numbers
    memory: tuple[str, ...] = ()  # layouts of tests/trainer/test_planned_memory.py
    sent: tuple[str, ...] = ()  # layouts of tests/trainer/test_planned_bytes.py
    measured: tuple[str, ...] = ()  # FILE::NAME of further planned and measured bytes
    price: tuple[str, ...] = ()  # terms of a plan, which `--explain` describes in words
    pages: tuple[str, ...] = ()  # pages of docs/, with their anchors
    note: str = ""  # a sentence about what is different here
    reason: str = ""  # why it is not there
    setting: str = DENSE  # cluster and model with which the words are checked


ZERO = (
    Technique(
        "P_os: optimizer state partitioning (ZeRO-1)",
        "5.1",
        words="parallel.zero=1",
        beside="parallel=dp8",
        cells=("zero1", "dp4 zero1", "zero1 hybrid"),
        memory=("dp2 zero1",),
        sent=("tp2 dp2 zero1",),
        measured=("tests/trainer/test_zero_formulas.py::test_bytes_sent_and_held",),
        price=("dp", "optimizer"),
        pages=(
            "reproduce.md#zeros-memory-gb-of-model-states-per-gpu",
            "gpu.md#overlap",
        ),
    ),
    Technique(
        "P_g: gradient partitioning (ZeRO-2)",
        "5.2",
        words="parallel.zero=2",
        beside="parallel=dp8",
        cells=("zero2", "zero2 hybrid"),
        memory=("dp2 zero2",),
        sent=("ep2 dp2 zero2",),
        measured=("tests/trainer/test_zero_formulas.py::test_bytes_sent_and_held",),
        price=("dp", "optimizer"),
        pages=(
            "reproduce.md#zeros-memory-gb-of-model-states-per-gpu",
            "gpu.md#overlap",
        ),
    ),
    Technique(
        "P_p: parameter partitioning (ZeRO-3)",
        "5.3",
        words="parallel.zero=3",
        beside="parallel=dp8",
        cells=("zero3", "zero3 hybrid", "zero3 pp2 zb_h1 on the host"),
        memory=("dp2 zero3", "dp2 zero3 bf16", "pp2 dp2 zero3", "pp2 dp2 zero3 zb_h1"),
        sent=("ep2 dp2 zero3", "pp2 dp2 zb_h1, zero3"),
        measured=("tests/trainer/test_zero_formulas.py::test_bytes_sent_and_held",),
        price=("dp", "optimizer"),
        pages=(
            "reproduce.md#zeros-memory-gb-of-model-states-per-gpu",
            "gpu.md#overlap",
        ),
    ),
    Technique(
        "P_a: partitioned activation checkpointing",
        "6.1",
        words="train.partition_activations=true",
        beside="parallel=tp8_sp0 train.recompute=full",
        cells=("tp2 pp2 selective, inputs shared", "tp2 pp2 full, inputs shared"),
        sent=(
            "tp2 without sp, full, shares of inputs",
            "tp2 without sp, selective, shares",
        ),
        measured=(
            "tests/trainer/test_kept_inputs.py::test_half_the_inputs_and_the_same_gradients",
        ),
        price=("inputs",),
        pages=("offload.md#activations",),
    ),
    Technique(
        "P_a+cpu: partitioned checkpoints on the CPU",
        "6.1",
        words="train.partition_activations=true train.offload_activations=host",
        beside="parallel=tp8_sp0 train.recompute=full",
        cells=("tp2 pp2 full, inputs shared and on the host",),
        measured=(
            "tests/trainer/test_offload_activations.py"
            "::test_the_same_gradients_and_the_planned_bytes",
        ),
        price=("activations", "inputs"),
        pages=("offload.md#activations",),
    ),
    Technique(
        "C_B: constant size buffers",
        "6.2",
        words="train.comm_buffer_mib=32",
        beside="parallel=dp8_zero2",
        cells=(
            "dp2, constant buffers",
            "zero1, constant buffers",
            "zero2, constant buffers",
            "zero2 hybrid, constant buffers",
        ),
        measured=(
            "tests/trainer/test_constant_buffers.py"
            "::test_a_model_four_times_as_large_takes_the_same_buffers",
        ),
        price=("dp",),
        pages=("offload.md#constant-buffers",),
    ),
    Technique(
        "C_B under P_p",
        "6.2",
        words="train.comm_buffer_mib=32",
        beside="parallel=dp8_zero3",
        reason="ZeRO-3 gathers whole layers, as torch's fully_shard does",
        pages=("offload.md#constant-buffers",),
    ),
    Technique(
        "M_D: memory defragmentation",
        "6.3",
        words="train.contiguous_activations=true",
        beside="parallel=dp8 train.recompute=full",
        cells=(
            "selective, inputs in a buffer",
            "pp2 zb_h1 full, inputs in a buffer",
            "tp2 pp2 full, inputs shared and in a buffer",
        ),
        measured=(
            "tests/trainer/test_reserved_inputs.py::test_the_same_gradients_in_the_planned_bytes",
            "benchmarks/results/fragmentation.json::in a reserved buffer",
        ),
        price=("checkpoints",),
        pages=("offload.md#defragmentation",),
        note="Gradients are in flat buckets with or without the key, but for ZeRO-3's.",
    ),
)

OFFLOAD = (
    Technique(
        "Offload strategy: gradients, fp32 parameters and moments on the CPU",
        "3, 4.1",
        words="train.offload=host",
        beside="parallel=dp8",
        cells=("zero0 on the host", "zero1 on the host"),
        memory=("on the host", "dp2 zero1 bf16, on the host"),
        price=("optimizer",),
        pages=("offload.md#optimizer-on-the-host",),
    ),
    Technique(
        "Scaling to many GPUs, with ZeRO-2",
        "4.2",
        words="parallel.zero=2 train.offload=host",
        beside="parallel=dp8",
        cells=("zero2 on the host", "zero2 hybrid on the host"),
        memory=("dp2 zero2, on the host",),
        price=("optimizer", "dp"),
        pages=("offload.md#optimizer-on-the-host",),
    ),
    Technique(
        "Scaling to many GPUs, with model parallelism",
        "4.2",
        words="parallel=tp2_pp2_zero1 train.offload=host",
        cells=("tp2 sp + zero1 on the host", "pp2 1f1b + zero1 on the host"),
        memory=("tp2 pp2, on the host",),
        price=("optimizer", "tp", "pp"),
        pages=("offload.md#optimizer-on-the-host",),
    ),
    Technique(
        "CPU-Adam: the optimizer computed by the CPU",
        "5.1",
        words="train.offload=host",
        beside="parallel=dp8",
        cells=("zero1 on the host", "zero3 on the host", "zero3 pp2 zb_h1 on the host"),
        shown_by=(
            "tests/trainer/test_offload.py::test_weights_and_states_are_those_of_the_device",
            "benchmarks/results/gpu_parity_h200.json::optimizer on the host",
        ),
        memory=("dp2 zero3, on the host",),
        price=("optimizer",),
        pages=("offload.md#optimizer-on-the-host", "offload.md#measured"),
        note="The kernel is torch's fused AdamW for CPUs.",
    ),
    Technique(
        "One-step delayed parameter update",
        "5.2",
        words="train.offload=host train.offload_delayed=true",
        beside="parallel=dp8",
        cells=(
            "zero0 on the host, delayed",
            "zero1 on the host, delayed",
            "zero2 on the host, delayed",
            "zero3 on the host, delayed",
            "zero1 tp2 pp2, delayed",
        ),
        measured=(
            "tests/trainer/test_offload_delayed.py::test_one_more_gradient_is_kept_on_the_host",
        ),
        price=("optimizer",),
        pages=("offload.md#delayed-updates",),
        note="Equal to one process with the same delay, which is another training than without.",
    ),
)

_SHARDS_AWAY = "offload.md#shards-of-zero-3-outside-the-device"

INFINITY = (
    Technique(
        "Infinity offload engine: optimizer state on NVMe",
        "5.1.1, 6.3",
        words="train.offload=disk",
        beside="parallel=dp8",
        cells=("zero1 on a disk", "zero2 on a disk", "zero3 on a disk"),
        measured=(
            "tests/trainer/test_offload.py"
            "::test_memory_of_the_host_is_what_was_asked_for_whatever_the_model",
        ),
        price=("optimizer",),
        pages=("offload.md#optimizer-on-the-disk",),
    ),
    Technique(
        "Infinity offload engine: parameters and gradients on NVMe, of a computation on CPUs",
        "5.1.1, 6.3",
        words="train.offload=disk train.offload_weights=true",
        beside="cluster=local parallel=dp8_zero2",
        shown_by=(
            "tests/trainer/test_offload.py::test_weights_and_states_are_those_of_the_device",
        ),
        price=("optimizer",),
        pages=("offload.md", "offload.md#measured"),
        note="In mapped pages of the disk, whole; with ZeRO-3 shards of them.",
        setting="model=tiny",
    ),
    Technique(
        "Infinity offload engine: partitioned parameters (P_p) and gradients in CPU memory",
        "5.1.1, 6.3",
        words="train.offload=host train.offload_weights=true",
        beside="parallel=dp8_zero3",
        cells=("zero3, weights on the host", "zero3 hybrid, weights on the host"),
        memory=("dp2 zero3, weights on the host",),
        price=("optimizer",),
        pages=(_SHARDS_AWAY,),
    ),
    Technique(
        "Infinity offload engine: partitioned parameters (P_p) and gradients on NVMe, of CPUs",
        "5.1.1, 6.3",
        words="train.offload=disk train.offload_weights=true",
        beside="cluster=local parallel=dp8_zero3",
        cells=("zero3, weights on a disk", "zero3 hybrid, weights on a disk"),
        price=("optimizer",),
        pages=(_SHARDS_AWAY,),
        setting="model=tiny",
    ),
    Technique(
        "Infinity offload engine: parameters of GPUs on NVMe",
        "5.1.1, 6.3",
        words="train.offload=disk train.offload_weights=true",
        beside="parallel=dp8_zero3",
        reason="pages of a disk are not page-locked, so a GPU cannot copy from them",
        pages=(_SHARDS_AWAY,),
    ),
    Technique(
        "CPU offload of activations",
        "5.1.2",
        words="train.offload_activations=host",
        beside="parallel=tp8 train.recompute=full",
        cells=("selective, inputs on the host",),
        measured=(
            "tests/trainer/test_offload_activations.py"
            "::test_the_same_gradients_and_the_planned_bytes",
        ),
        price=("activations", "recompute"),
        pages=("offload.md#activations",),
    ),
    Technique(
        "Activations on NVMe",
        "5.1.2",
        words="train.offload_activations=disk",
        beside="parallel=dp8 train.recompute=full",
        cells=("full, inputs on the disk", "pp2 zb_h1 selective, inputs on the disk"),
        measured=(
            "tests/trainer/test_offload_activations.py"
            "::test_the_same_gradients_and_the_planned_bytes",
        ),
        price=("activations",),
        pages=("offload.md#activations",),
    ),
    Technique(
        "Memory-centric tiling of single layers",
        "5.1.3",
        reason=(
            "a layer's matrices are multiplied whole; tensor parallelism, which the technique"
            " replaces, cuts them"
        ),
        pages=("offload.md",),
    ),
    Technique(
        "Bandwidth-centric partitioning",
        "6.1",
        reason=(
            "it is for parameters outside the GPU, of which every rank fetches its share; the"
            " optimizer's state is fetched so, each rank its own"
        ),
        pages=("offload.md#optimizer-on-the-disk",),
    ),
    Technique(
        "Overlap-centric design, of the optimizer's state and of activations",
        "6.2",
        words="train.offload=disk train.offload_activations=disk",
        beside="parallel=dp8 train.recompute=full",
        cells=("pp2 zb_h1 selective, inputs on the disk",),
        shown_by=(
            "tests/trainer/test_offload.py::test_gradients_leave_bucket_by_bucket_during_backward",
            "tests/trainer/test_offload_activations.py"
            "::test_each_comes_back_while_the_one_before_is_used",
        ),
        price=("optimizer", "activations"),
        pages=("offload.md#activations", "offload.md#optimizer-on-the-disk"),
    ),
    Technique(
        "Automating model partitioning during initialization",
        "7.2",
        reason=(
            "a rank allocates the layers of its stages, cut by tp and ep, before ZeRO-3 shards them"
        ),
        pages=("reading.md#one-training-step-in-ten-files",),
    ),
)

ONE_GPU = (
    Technique(
        "Full recomputation",
        "Activation recomputation",
        words="train.recompute=full",
        beside="parallel=dp8",
        cells=("full",),
        shown_by=("benchmarks/results/gpu_parity_h200.json::full recomputation",),
        memory=("full",),
        price=("recompute",),
        pages=("accuracy.md#memory-against-the-trainers-own", "reference/configuration.md#train"),
    ),
    Technique(
        "Selective recomputation",
        "Activation recomputation",
        words="train.recompute=selective",
        beside="parallel=dp8",
        cells=("selective", "budget"),
        shown_by=("benchmarks/results/gpu_parity_h200.json::selective recomputation",),
        memory=("selective", "tp2 selective"),
        sent=("tp2, selective",),
        price=("recompute",),
        pages=("accuracy.md#memory-against-the-trainers-own", "reference/configuration.md#train"),
        note="`budget` recomputes, layer by layer, as little as fits.",
    ),
    Technique(
        "Gradient accumulation",
        "Gradient accumulation",
        words="parallel.micro_batch_size=1 train.global_batch_samples=64",
        beside="parallel=dp8",
        cells=("one process, our engine", "dp3 zero1 unequal"),
        measured=("tests/trainer/test_zero_formulas.py::test_bytes_sent_and_held",),
        price=("gemm",),
        pages=("decisions/sums.md", "reference/configuration.md#parallel"),
        note="Replicas may take unequal numbers of micro-batches.",
    ),
)

DATA = (
    Technique(
        "Overlap of gradient synchronization with the backward pass",
        "First optimization",
        beside="parallel=dp8",
        cells=("dp2",),
        shown_by=("tests/trainer/test_overlap.py::test_reductions_start_while_backward_computes",),
        measured=("benchmarks/results/exposed.json::ZeRO-0",),
        price=("dp",),
        pages=("gpu.md#overlap", "performance.md#overlap-and-memory"),
    ),
    Technique(
        "Bucketing gradients",
        "Second optimization",
        words="parallel.bucket_mib=25",
        beside="parallel=dp8",
        cells=("dp2",),
        shown_by=("tests/trainer/test_buckets_layout.py::test_one_bucket_and_many",),
        measured=("tests/trainer/test_zero_formulas.py::test_bytes_sent_and_held",),
        price=("dp",),
        pages=("offload.md#constant-buffers", "reference/configuration.md#parallel"),
        note="Cells have one bucket or many.",
    ),
    Technique(
        "Interplay with gradient accumulation: one synchronization a step",
        "Third optimization",
        beside="parallel=dp8 parallel.micro_batch_size=1 train.global_batch_samples=64",
        cells=("dp2", "zero1"),
        measured=("tests/trainer/test_zero_formulas.py::test_bytes_sent_and_held",),
        price=("dp",),
        pages=("performance.md#overlap-and-memory",),
        note="Under ZeRO-2 and -3 every micro-batch is reduced, as their definition requires.",
    ),
    Technique(
        "ZeRO-1, ZeRO-2, ZeRO-3 (FSDP)",
        "ZeRO",
        words="parallel.zero=3",
        beside="parallel=dp8",
        cells=("zero1", "zero2", "zero3"),
        memory=("tp2 pp2 dp2 zero1",),
        measured=(
            "tests/trainer/test_zero_formulas.py::test_bytes_sent_and_held",
            "benchmarks/results/exposed.json::ZeRO-3",
        ),
        price=("dp", "optimizer"),
        pages=("reproduce.md#zero-at-8b-on-64-gpus-gib", "gpu.md#overlap"),
    ),
)

TENSOR = (
    Technique(
        "Tensor parallelism in a Transformer block",
        "Tensor Parallelism",
        words="parallel=tp8_sp0",
        cells=("tp2", "tp4", "tp2, 4 pieces"),
        memory=("tp2 without sp", "tp2 without sp, selective"),
        sent=("tp2 without sp", "tp2 in pieces without sp, full"),
        price=("tp",),
        pages=("gpu.md#overlap", "performance.md"),
    ),
    Technique(
        "Sequence parallelism",
        "Tensor Parallelism",
        words="parallel.tp=8 parallel.sp=true",
        cells=("tp2 sp", "tp4 sp", "tp2 sp, 2 pieces", "tp2 sp full, 4 pieces"),
        memory=("tp2", "tp4, two key-value heads"),
        sent=("tp2", "tp2, full", "tp2 in pieces"),
        price=("tp",),
        pages=("gpu.md#overlap", "performance.md#overlap-and-memory"),
    ),
)

CONTEXT = (
    Technique(
        "Ring attention",
        "Discovering Ring Attention",
        words="parallel.cp_method=ring",
        beside="parallel=cp8",
        cells=("cp2 ring", "cp4 ring"),
        measured=("tests/trainer/test_context.py::test_bytes_sent_equal_the_formulas",),
        price=("cp",),
        pages=("performance.md", "gpu.md#overlap"),
    ),
    Technique(
        "Zig-zag ring attention",
        "Zig-Zag Ring Attention",
        words="parallel.cp_method=zigzag",
        beside="parallel=cp8",
        cells=("cp2 zigzag", "cp4 zigzag"),
        memory=("cp2 zigzag", "cp2 full"),
        sent=("cp2 ep2",),
        measured=("tests/trainer/test_context.py::test_bytes_sent_equal_the_formulas",),
        price=("cp",),
        pages=("performance.md", "gpu.md#overlap"),
    ),
    Technique(
        "Keys and values gathered at once (all-gather)",
        "Zig-Zag Ring Attention",
        words="parallel.cp_method=allgather",
        beside="parallel=cp8",
        cells=("cp2 allgather", "cp4 allgather"),
        memory=("cp2 all-gather",),
        measured=("tests/trainer/test_context.py::test_bytes_sent_equal_the_formulas",),
        price=("cp",),
        pages=("performance.md", "gpu.md#overlap"),
    ),
)


def _schedule(name: str, heading: str, schedule: str, spec: str, **fields: object) -> Technique:
    """Returns the row of a pipeline schedule, which has the same price and pages as the others."""
    return Technique(
        name,
        heading,
        words=f"parallel.schedule={schedule}",
        beside=f"parallel={spec}",
        price=("bubble", "pp"),
        pages=(
            "reproduce.md#the-bubble-at-few-and-at-many-micro-batches-idle-over-busy-time",
            "performance.md",
        ),
        **fields,  # type: ignore[arg-type]
    )


_SCHEDULES = "tests/schedules/test_schedules.py"
PIPELINE = (
    _schedule(
        "All forward, all backward (AFAB)",
        "Splitting layers on various nodes",
        "afab",
        "pp4",
        cells=("pp2 afab",),
        memory=("pp2 all forward first",),
        measured=(f"{_SCHEDULES}::test_memory_of_afab_and_1f1b",),
    ),
    _schedule(
        "One forward, one backward (1F1B)",
        "One-forward-one-backward and LLama 3.1 schemes",
        "1f1b",
        "pp4",
        cells=("pp2 1f1b", "pp4 1f1b"),
        memory=("pp2", "pp2 selective", "pp2 full"),
        sent=("tp2 pp2",),
        measured=(f"{_SCHEDULES}::test_memory_of_afab_and_1f1b",),
    ),
    _schedule(
        "Interleaving stages",
        "Interleaving stages",
        "interleaved",
        "pp4_vpp2",
        cells=("pp2 interleaved",),
        memory=("pp2 interleaved",),
        measured=(f"{_SCHEDULES}::test_bubble_and_memory_of_interleaved",),
    ),
    _schedule(
        "Zero bubble: ZB-H1",
        "Zero Bubble and DualPipe",
        "zb_h1",
        "pp4",
        cells=("pp2 zb_h1", "pp4 zb_h1"),
        memory=("pp2 zb_h1", "tp2 pp2 zb_h1"),
        sent=("ep2 pp2 zb_h1",),
        measured=(f"{_SCHEDULES}::test_zero_bubble_h1_h2",),
    ),
    _schedule(
        "Zero bubble: ZB-H2",
        "Zero Bubble and DualPipe",
        "zb_h2",
        "pp4",
        cells=("pp2 zb_h2", "pp4 zb_h2"),
        memory=("pp4 zb_h2",),
        measured=(f"{_SCHEDULES}::test_zero_bubble_h1_h2",),
    ),
    _schedule(
        "Zero bubble: ZB-V",
        "Zero Bubble and DualPipe",
        "zbv",
        "pp4_vpp2",
        cells=("pp2 zbv",),
        memory=("pp2 zbv",),
        measured=(f"{_SCHEDULES}::test_zbv",),
    ),
    _schedule(
        "DualPipe",
        "Zero Bubble and DualPipe",
        "dualpipe",
        "pp4",
        cells=("pp2 dualpipe", "pp4 dualpipe"),
        memory=("pp2 dualpipe",),
        sent=("ep2 pp2 dualpipe, zero1",),
        measured=(f"{_SCHEDULES}::test_memory_of_dualpipe",),
    ),
)

EXPERT = (
    Technique(
        "Expert parallelism",
        "Expert parallelism",
        words="parallel=ep8",
        beside="model=mixtral_8x7b",
        cells=("ep2", "ep4", "ep2 deepseek", "tp2 etp1 ep2"),
        memory=("experts ep2", "deepseek ep2", "deepseek, tp2 etp1"),
        sent=("ep2", "tp2 etp1"),
        price=("ep", "experts"),
        pages=("experts.md#expert-parallelism",),
        setting="cluster=h100x8",
    ),
    Technique(
        "Tokens sent to few nodes (DeepSeek-V3's limit)",
        "Expert parallelism",
        words="parallel.expert_all_to_all=hierarchical",
        beside="model=deepseek_v3 parallel=ep16_pp4_zero1",
        cells=("ep4 hierarchical", "ep4 hierarchical deepseek, dp2 zero2"),
        memory=("many choices, by domain",),
        sent=("ep4 by domain", "ep2 tp2 by domain"),
        measured=("tests/trainer/test_experts.py::test_bytes_by_level_are_those_of_the_plan",),
        price=("ep",),
        pages=("experts.md#dispatch-and-placement",),
        setting="cluster=h100x64",
    ),
)

COMBINED = (
    Technique(
        "5D parallelism: data, tensor, context, pipeline and expert",
        "5D parallelism in a nutshell",
        words="parallel=tp2_cp2_ep2_pp2_dp2_zero1",
        beside="model=mixtral_8x7b",
        cells=(
            "tp2 cp2 ep2 pp2 dp2, 1f1b, zero1",
            "tp2 cp2 ep2 pp2 dp2 deepseek, zb_h1, zero2",
            "tp2 cp2 ep2 pp2 dp2 deepseek, dualpipe",
        ),
        sent=("ep2 tp2 pp2 zb_h1",),
        price=("tp", "cp", "ep", "pp", "dp", "bubble"),
        pages=("architecture.md#decisions-worth-knowing", "guides/layout.md#plan-one"),
        note="`parallel=auto` searches the degrees.",
        setting="cluster=h100x64 cluster.nodes=4",
    ),
)

KERNELS = (
    Technique(
        "Fused kernels",
        "Fused Kernels",
        words="train.compile=true",
        beside="parallel=dp8",
        cells=("compile",),
        shown_by=("benchmarks/results/gpu_parity_h200.json::bf16",),
        measured=("benchmarks/results/kernels.json::compiled",),
        price=("elementwise",),
        pages=("gpu.md#kernels",),
        note="On by default on GPUs; plans count blocks as they are without it.",
    ),
    Technique(
        "FlashAttention",
        "Flash Attention 1-3",
        beside="parallel=dp8",
        shown_by=("benchmarks/results/gpu_parity_h200.json::attention",),
        memory=("one process",),
        measured=("tests/planner/test_memory.py::test_fused_attention_keeps_only_statistics",),
        price=("attention",),
        pages=("gpu.md#every-technique-against-float64",),
        note="The kernels are those that torch brings.",
    ),
    Technique(
        "Memory coalescing, tiling, thread coarsening, control divergence",
        "How to improve performance with Kernels",
        reason=(
            "there is no CUDA kernel of our own to which they apply; kernels are torch's, or its"
            " compiler generates them"
        ),
        pages=("gpu.md#kernels",),
    ),
)

PRECISION = (
    Technique(
        "BF16 mixed precision",
        "FP16 and BF16 training",
        words="train.precision=bf16",
        beside="parallel=dp8",
        verify="parallel=dp2_zero1 train.precision=bf16",
        shown_by=("benchmarks/results/gpu_parity_h200.json::bf16",),
        memory=("bf16", "dp2 zero3 bf16"),
        measured=("benchmarks/results/gpu_run_h200.json::memory",),
        price=("gemm",),
        pages=(
            "architecture.md#how-the-trainer-is-proven",
            "gpu.md#every-technique-against-float64",
        ),
    ),
    Technique(
        "FP16 with loss scaling",
        "FP16 and BF16 training",
        words="train.precision=fp16",
        beside="parallel=dp8",
        verify="parallel=dp2_zero1 train.precision=fp16",
        shown_by=(
            "benchmarks/results/gpu_parity_h200.json::fp16",
            "tests/trainer/test_fp16.py::test_all_ranks_skip_together",
        ),
        price=("gemm",),
        pages=("verify.md#definitions", "gpu.md#every-technique-against-float64"),
    ),
    Technique(
        "FP8 with a scale per tensor",
        "FP8 pretraining",
        words="train.matmul=fp8_tensor",
        beside="parallel=dp8",
        cells=("fp8_tensor", "fp8_tensor dp2 zero3", "fp8_tensor tp4 sp", "fp8_tensor cp2 zigzag"),
        memory=("8 bits", "tp2, 8 bits"),
        price=("cast",),
        pages=("precision.md#products-in-8-bits",),
        note="From its current largest value. Emulated on CPUs; no card has run it.",
    ),
    Technique(
        "FP8 with a scale per tile (DeepSeek-V3)",
        "FP8 pretraining",
        words="train.matmul=fp8_block",
        beside="cluster=local parallel=dp8",
        cells=("fp8_block", "fp8_block dp2 zero3", "fp8_block ep2 pp2 dualpipe deepseek, mtp"),
        verify="experiment=deepseek_v3",
        memory=("bf16, 8 bits in blocks", "deepseek, full, 8 bits in blocks"),
        price=("cast",),
        pages=("precision.md#products-in-8-bits",),
        note="On CPUs, emulated.",
        setting="model=tiny",
    ),
    Technique(
        "FP8 with a scale per tile, on GPUs",
        "FP8 pretraining",
        words="train.matmul=fp8_block",
        beside="cluster=h100x8 parallel=dp8",
        reason="torch's kernel that the trainer uses takes one scale per tensor",
        pages=("precision.md#products-in-8-bits",),
        setting="model=llama32_1b",
    ),
    Technique(
        "FP8 with delayed scaling (Transformer Engine)",
        "FP8 pretraining",
        words="train.matmul=fp8_delayed",
        beside="cluster=h100x8 parallel=dp8",
        cells=(
            "fp8_delayed",
            "fp8_delayed dp2 zero3",
            "fp8_delayed tp2 sp selective",
            "fp8_delayed ep2 pp2 dualpipe deepseek, mtp",
        ),
        shown_by=(
            "tests/trainer/test_loop_techniques.py"
            "::test_scales_of_earlier_steps_follow_a_run_to_another_layout",
        ),
        price=("cast",),
        pages=("precision.md#products-in-8-bits",),
        note="From the largest values of 16 steps. Emulated on CPUs; no card has run it.",
        setting="model=llama32_1b",
    ),
    Technique(
        "FP8 weights, gradients and master weights",
        "FP8 pretraining",
        words="train.grad_dtype=fp8",
        beside="parallel=dp8",
        reason="sums stay wide, so that every layout equals one process",
        pages=("precision.md#products-in-8-bits",),
    ),
    Technique(
        "Moments in 16 or 8 bits",
        "FP8 pretraining",
        words="optim.state=bf16",
        beside="parallel=dp8",
        verify="parallel=dp2_zero1 optim.state=bf16",
        shown_by=("benchmarks/results/gpu_parity_h200.json::moments in 8 bits",),
        measured=(
            "tests/trainer/test_narrow_state.py::test_planned_bytes_are_those_that_are_kept",
        ),
        price=("optimizer",),
        pages=("precision.md#optimizer-state-in-fewer-bits",),
        note="`optim.state=8bit` has blocks of 64 elements with a scale each.",
    ),
)

#: Title of a table -> what its column of sections names, and its rows.
PAPERS: dict[str, tuple[str, tuple[Technique, ...]]] = {
    "ZeRO (arXiv 1910.02054)": ("section", ZERO),
    "ZeRO-Offload (arXiv 2101.06840)": ("section", OFFLOAD),
    "ZeRO-Infinity (arXiv 2104.07857)": ("section", INFINITY),
    "Ultra-Scale Playbook: one GPU": ("heading", ONE_GPU),
    "Ultra-Scale Playbook: data parallelism": ("heading", DATA),
    "Ultra-Scale Playbook: tensor parallelism": ("heading", TENSOR),
    "Ultra-Scale Playbook: context parallelism": ("heading", CONTEXT),
    "Ultra-Scale Playbook: pipeline parallelism": ("heading", PIPELINE),
    "Ultra-Scale Playbook: expert parallelism": ("heading", EXPERT),
    "Ultra-Scale Playbook: all of them": ("heading", COMBINED),
    "Ultra-Scale Playbook: kernels": ("heading", KERNELS),
    "Ultra-Scale Playbook: precision": ("heading", PRECISION),
}
