"""Fractions of data-sheet rates that hardware reaches: the only measured constants of the planner.

Each number names its measurement: a row of the calibration tables (`gemm_mamf`, `comm`) by id or accelerator. A later
calibration replaces the values of this module, not the formulas that use them.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from orchestrator.plan.document import Cluster


class Profile(Struct, frozen=True, kw_only=True):
    """Fractions of the cluster description's rates that a training job reaches; fields in bytes or seconds say so."""

    gemm: dict[str, float]  # best matmul / peak FLOP/s, by precision
    gemm_default: float
    attention: float  # fused attention core / peak FLOP/s
    hbm: float  # memory-bound kernels / memory bandwidth
    nvlink: float  # ring collective bus bandwidth / link rate
    fabric: float
    contention: float  # collectives inside a training step / the same collectives alone
    kernel_launch_s: float  # fixed time of one operator on the critical path
    context_bytes: int  # device context, communicators and workspaces
    source: str


#: gemm_mamf rows, BF16 and FP8, by the longest prefix of the GPU's name.
_GEMM: dict[str, dict[str, float]] = {
    "A100": {"bf16": 0.869, "fp16": 0.869},
    "H100": {"bf16": 0.803, "fp16": 0.803, "fp8": 0.709},
    "H200": {"bf16": 0.803, "fp16": 0.803, "fp8": 0.734},
    "GH200": {"bf16": 0.838, "fp16": 0.838, "fp8": 0.776},
    "B200": {"bf16": 0.776, "fp16": 0.776, "fp8": 0.763},
    "GB200": {"bf16": 0.729, "fp16": 0.729, "fp8": 0.723},
    "B300": {"bf16": 0.786, "fp16": 0.786, "fp8": 0.745},
}

_GPU_SOURCE = (
    "gemm: gemm_mamf by accelerator, 0.75 where it has no row (assumed); nvlink 0.80: comm-0364 ring 370 of 450 GB/s;"
    " fabric 0.93: comm-0236 373 of 400 GB/s; contention 0.77: collectives in training about 30 % slower than alone"
    " (vTrain, MICRO 2024); attention, hbm, launch, context: assumed"
)


_GPU = Profile(
    gemm={},
    gemm_default=0.75,
    attention=0.5,
    hbm=0.8,
    nvlink=0.80,
    fabric=0.93,
    contention=0.77,
    kernel_launch_s=3e-6,
    context_bytes=2 << 30,
    source=_GPU_SOURCE,
)


def profile_for(gpu_name: str, device: str) -> Profile:
    """The profile of a GPU by its name ("H100-SXM5-80GB"), or of a CPU core."""
    if device == "cpu":  # the memory share of a CPU rank does not include the process itself: context_bytes=0
        rates = {"gemm_default": 0.6, "attention": 0.2, "hbm": 0.6, "nvlink": 0.8, "fabric": 0.8, "contention": 1.0}
        return replace(_GPU, **rates, kernel_launch_s=2e-5, context_bytes=0, source="assumed")
    matches = [name for name in _GEMM if gpu_name.upper().startswith(name)]
    return replace(_GPU, gemm=_GEMM[max(matches, key=len)] if matches else {})


def profile_of(cluster: Cluster) -> Profile:
    """The profile of a cluster's GPU, or what `orch bench` measured on the cluster."""
    found, measured = profile_for(cluster.gpu.name, cluster.device), cluster.measured
    if measured is None:
        return found
    peak = cluster.gpu.peak_flops
    trains_in = ("fp32", "bf16") if cluster.device == "cpu" else ("bf16", "fp32")  # one fraction for all precisions
    core = [measured.attention_flops[name] / peak[name] for name in trains_in if name in measured.attention_flops]
    return replace(
        found,
        gemm={name: flops / peak[name] for name, flops in measured.matmul_flops.items() if name in peak},
        attention=core[0] if core else found.attention,
        hbm=measured.memory_bytes_per_s / cluster.gpu.hbm_bytes_per_s,
        nvlink=1.0,  # links were measured with collectives, under the load of all ranks
        fabric=1.0,
        contention=1.0,
        kernel_launch_s=measured.launch_s,
        source=measured.source,
    )
