"""The rates of one GPU, its links and its software, from the profile's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import Struct

from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster, Matmul, Measured

from .dual import Number
from .parameters import generation_of
from .software import Software

# The operators of a layer's forward on a CPU: 4 to 7 products, norms, rotary, activation, sums.
CPU_LAUNCHES = 14


#: The elements of a product that all multiprocessors of a GPU compute at a time, in tiles of 128 x
#: 256 (V100: 128 x 128).
WAVE = {
    "v100": 80 * 128 * 128,
    "a100": 108 * 32768,
    "hopper": 132 * 32768,
    "cpu": 0,
}
WAVE |= dict.fromkeys(("blackwell", "blackwell_ultra"), 148 * 32768)

#: Recipes of 8 bits whose time was not measured apart from that of another one.
_CAST_AS = {"fp8_delayed": "fp8_tensor"}


class Links(Struct, frozen=True):
    """The share of the links' rates that collectives reach in a step, and fixed times."""

    nvlink: Number
    nic: Number
    latency: Number  # factor of the hops' latencies
    launch_s: Number  # further seconds per operation


class AxisLinks(NamedTuple):
    """The links of each kind of parallelism."""

    tensor: Links
    tensor_outside: Links  # tensor parallelism across NVLink domains
    ring: Links


class Rates(Struct, frozen=True):
    """Seconds per unit of work on one GPU, and the software's traits as numbers."""

    peak: float  # data-sheet FLOP/s of the tensors' precision, the reference of MFU
    gemm_s: Number  # seconds per FLOP of the layers' matrix products
    gemm16_s: Number  # the same in the tensors' precision: router, head
    gemm_byte_s: Number  # seconds per byte that a matrix product reads or writes
    wave_s: Number  # seconds lost in a product's last wave of tiles, per element of its sums
    head: Number  # seconds of the output projection / seconds of its matrix product
    attention_s: Number  # seconds per FLOP of the attention core
    byte_s: Number  # seconds per byte of memory-bound kernels
    scores_bytes: Number  # bytes per score of unfused attention, forward; 0 when fused
    elementwise: Number  # bytes moved / bytes counted
    cast_bytes: Number  # bytes per element of a matrix product's input; 0 without fp8
    accumulate_bytes: Number
    logits_bytes: Number
    permute: Number
    host_dense_s: Number
    host_moe_s: Number
    host_gap_s: Number  # seconds per layer between kernels that are launched one by one
    recompute_ops: Number
    optimizer_bytes: Number
    step_host_s: Number
    # The share of weight-gradient products that are computed: 1; with LoRA a small share.
    weight_gradients: Number
    cp_attention: Number
    tensor: Links
    tensor_outside: Links  # tensor parallelism across NVLink domains
    ring: Links
    tp_exposed: Number
    pp_exposed: Number
    cp_exposed: Number
    ep_exposed: Number
    dp_exposed: Number  # share of gradient communication that nothing hides
    # the same with ZeRO-3, for software that hides it differently with other stages
    dp_sharded: Number
    slow_fabric_s: Number  # seconds per step on a cloud network, times the root of the replicas
    nodes: Number
    family: Number
    full_recompute: Number  # the share of a forward that full recomputation repeats
    #: The spread of experts' loads, relative to that of the plan's `expert_imbalance`.
    expert_spread: Number = 1.0


def rates(
    cluster: Cluster,
    values: Mapping[str, Number],
    precision: str,
    software: Software,
    matmul: Matmul = "",
    task: str = "pretrain",
    slow_fabric: bool = False,
    expert_spread: Number = 1.0,
) -> Rates:
    """Returns the rates for a cluster and job.

    `values` are those of the parameters by name. Raises OrchError (65) for a precision in which the
    GPU does not compute.
    """
    if cluster.device == "cpu":
        values = _on_a_cpu(values, cluster.measured)
    links = _links(values, cluster)
    weight_gradients = values["lora"] if task == "lora" else 1.0
    slow_fabric_s = values["latency.slow"] if slow_fabric else 0.0
    full_recompute = values["recompute.jax"] if software.dp_overlap == "jax" else 1.0
    return Rates(
        peak=_peak_flops(cluster, precision),
        **_products(cluster, values, precision, matmul),
        attention_s=_attention_s(cluster, values, precision, software, task),
        **_memory_bound(cluster, values, precision, software),
        **_host(values, software),
        recompute_ops=values["recompute.ops"],
        weight_gradients=weight_gradients,
        cp_attention=values["attention.cp"],
        tensor=links.tensor,
        tensor_outside=links.tensor_outside,
        ring=links.ring,
        **_exposed(values, software),
        slow_fabric_s=slow_fabric_s,
        nodes=values["nodes"],
        family=values[f"family.{software.name}"],
        full_recompute=full_recompute,
        expert_spread=expert_spread,
    )


def _peak_flops(cluster: Cluster, precision: str) -> float:
    """Returns the data-sheet FLOP/s of the GPU in this precision.

    Raises OrchError (65) if it does not compute in it.
    """
    gpu = cluster.gpu
    peak = gpu.peak_flops.get(precision)
    if peak is not None:
        return peak
    pinned = ", ".join(gpu.peak_flops)
    rate = (
        f"; to verify in fp64, {_fp64_of(gpu.peak_flops)} train.grad_dtype=fp64"
        if precision == "fp64"
        else ""
    )
    raise OrchError(
        f"train.precision {precision}: GPU {gpu.name} computes in {pinned}{rate}", Exit.CONFIG
    )


def _fp64_of(peak_flops: Mapping[str, float]) -> str:
    """Returns the override that gives a GPU a rate for fp64: half that of its widest precision.

    All GPUs compute in fp64, but few entries have a rate for it.
    """
    return f"cluster.gpu.peak_tflops.fp64={min(peak_flops.values()) / 2e12:g}"


def _products(
    cluster: Cluster,
    values: Mapping[str, Number],
    precision: str,
    matmul: Matmul,
) -> dict[str, Number]:
    """Returns the fields of `Rates` about matrix products."""
    measured = cluster.measured
    generation = generation_of(cluster.gpu.name, cluster.device)
    reached = measured.matmul_flops.get(precision) if measured else None
    share = _gemm(values, generation, "16")
    gemm16: Number = 1.0 / (reached or _peak_flops(cluster, precision) * share)
    narrow = matmul and cluster.device != "cpu"  # on a CPU, wide products emulate narrow ones
    gemm = _narrow_gemm(cluster, values, generation, matmul) if narrow else gemm16
    wave = values["gemm_wave.old" if generation in ("v100", "a100") else "gemm_wave"]
    return {
        "gemm_s": gemm,
        "gemm16_s": gemm16,
        "gemm_byte_s": values["gemm_bytes"] / cluster.gpu.hbm_bytes_per_s,
        "wave_s": wave * (2.0 * WAVE.get(generation, 4e6)) * gemm,
        "head": values["head"],
        "cast_bytes": values[f"cast.{_CAST_AS.get(matmul, matmul)}"] if matmul else 0.0,
    }


def _attention_s(
    cluster: Cluster,
    values: Mapping[str, Number],
    precision: str,
    software: Software,
    task: str,
) -> Number:
    """Returns the seconds per FLOP of the attention core."""
    measured = cluster.measured
    generation = generation_of(cluster.gpu.name, cluster.device)
    reached = measured.attention_flops.get(precision) if measured else None
    share = _attention(values, generation, software)
    attention: Number = 1.0 / (reached or _peak_flops(cluster, precision) * share)
    return attention if task == "pretrain" else attention * values["attention.packed"]


def _memory_bound(
    cluster: Cluster,
    values: Mapping[str, Number],
    precision: str,
    software: Software,
) -> dict[str, Number]:
    """Returns the fields of `Rates` about kernels that are bound by memory."""
    reached: Number = cluster.gpu.hbm_bytes_per_s * values["hbm"]
    if cluster.measured:
        reached = cluster.measured.memory_bytes_per_s
    unfused = software.attention == "unfused"
    return {
        "byte_s": 1.0 / reached,
        "scores_bytes": values["attention.scores"] * DTYPE_BYTES[precision] / 2 if unfused else 0.0,
        "elementwise": values[f"elementwise.{software.elementwise}"],
        "accumulate_bytes": values[f"accumulate.{software.accumulate}"],
        "logits_bytes": values["logits"],
        "permute": values["moe.permute"],
        "optimizer_bytes": values["optimizer"],
    }


def _host(values: Mapping[str, Number], software: Software) -> dict[str, Number]:
    """Returns the fields of `Rates` about the CPU that launches kernels."""
    dense = "host.modules" if software.elementwise == "modules" else "host.dense"
    moe = "host.moe" if software.host == "eager" else "host.moe_modern"
    one_by_one = software.elementwise != "fused" or software.dp_overlap in ("early", "zero_2021")
    return {
        "host_dense_s": values[dense],
        "host_moe_s": values[moe],
        "host_gap_s": values["host.gap"] if one_by_one else 0.0,
        "step_host_s": values["host.step"],
    }


def _exposed(values: Mapping[str, Number], software: Software) -> dict[str, Number]:
    """Returns the fields of `Rates` about communication that nothing hides."""
    tensor = "tp.exposed_overlap" if software.tp_overlap else "tp.exposed"
    pipeline = "pp.exposed_overlap" if software.pp_overlap else "pp.exposed"
    experts = "ep.exposed_overlap" if software.ep_overlap else "ep.exposed"
    return {
        "tp_exposed": values[tensor],
        "pp_exposed": values[pipeline],
        "cp_exposed": values["cp.exposed"],
        "ep_exposed": values[experts],
        "dp_exposed": values[f"dp.{software.dp_overlap}"],
        "dp_sharded": values["dp.fsdp_megatron"],
    }


def _on_a_cpu(values: Mapping[str, Number], measured: Measured | None) -> Mapping[str, Number]:
    """Returns the parameters for ranks on processors: no overlap, and a call per operator."""
    launch: Number = measured.launch_s if measured else values["host.cpu"]
    unit_names = (
        "head",
        "elementwise.fused",
        "elementwise.eager",
        "elementwise.modules",
        "tp.exposed",
        "tp.exposed_overlap",
        "pp.exposed",
        "pp.exposed_overlap",
        "cp.exposed",
        "ep.exposed",
        "ep.exposed_overlap",
        "attention.cp",
    )
    cpu_values: dict[str, Number] = dict.fromkeys(unit_names, 1.0)
    cpu_values |= {
        "hbm": values["hbm.cpu"],
        "host.gap": 0.0,
        "nodes": 0.0,
        "gemm_bytes": 1.0,
        "gemm_wave": 0.0,
        "host.dense": 3 * CPU_LAUNCHES * launch,
        "host.modules": 3 * CPU_LAUNCHES * launch,
        "host.step": 2 * launch,
    }
    return {**values, **cpu_values}


def _narrow_gemm(
    cluster: Cluster,
    values: Mapping[str, Number],
    generation: str,
    matmul: Matmul,
) -> Number:
    """Returns the seconds per FLOP of matrix products in 8 or 4 bits.

    Raises OrchError (65) if the GPU has no such products.
    """
    peaks = cluster.gpu.peak_flops
    fp8 = peaks.get("fp8")
    if fp8 is None:
        message = (
            f"train.matmul={matmul}: GPU {cluster.gpu.name} has no rate for fp8 in"
            " cluster.gpu.peak_tflops"
        )
        raise OrchError(message, Exit.CONFIG)
    if matmul == "nvfp4":
        return 1.0 / (peaks.get("fp4", 2 * fp8) * _gemm(values, generation, "nvfp4"))
    return 1.0 / (fp8 * _gemm(values, generation, "fp8"))


def _gemm(values: Mapping[str, Number], generation: str, kind: str) -> Number:
    """Returns the share of the peak that matrix products of this kind reach."""
    if generation == "cpu":
        return values["gemm.cpu"]
    return (
        values.get(f"gemm.{generation}.{kind}")
        or values.get(f"gemm.other.{kind}")
        or values["gemm.other.fp8"]
    )


def _attention(values: Mapping[str, Number], generation: str, software: Software) -> Number:
    """Returns the share of the peak that the attention core reaches."""
    if generation == "cpu":
        return values["attention.cpu"]
    if software.attention in ("unfused", "triton"):
        return values[f"attention.{software.attention}"]
    if generation == "hopper" and software.attention == "cudnn":
        return values["attention.cudnn.hopper"]
    return (
        values.get(f"attention.{generation}")
        or values.get(f"attention.flash.{generation}")
        or values["attention.other"]
    )


def _links(values: Mapping[str, Number], cluster: Cluster) -> AxisLinks:
    """Returns the links of tensor parallelism, inside and outside a domain, and of rings."""
    # These rates were measured with collectives, under the load of all ranks.
    if cluster.measured or cluster.device == "cpu":
        share: Number = 1.0 if cluster.measured else values["link.cpu"]
        links = Links(share, share, 1.0, 0.0)
        return AxisLinks(links, links, links)
    nvlink = values["nvlink"]
    latency = values["latency"]
    return AxisLinks(
        tensor=Links(nvlink, values["nic"], latency, values["tp.launch"]),
        tensor_outside=Links(nvlink, values["nic.tp"], latency, values["tp.launch"]),
        ring=Links(nvlink, values["nic"], latency, 0.0),
    )
