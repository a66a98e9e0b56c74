"""The parameters of the cost model, each with a prior.

They describe how much of their data sheets hardware and software reach. A parameter is positive;
its uncertainty is that of its logarithm. `PRIOR` holds the beliefs before any run of the
calibration table is seen; a profile (`profile`) holds the values after a fit. Sources of the
priors: accuracy.md, sections 1 and 2, which name the measurements; `gemm_mamf` and `comm` are the
tables of planning.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from orchestrator.cluster.gpu_models import gpu_model

#: GPU generations that share kernels, by the beginning of the GPU's model; the longest match
#: counts.
GENERATIONS: dict[str, str] = {
    **dict.fromkeys(("V100",), "v100"),
    **dict.fromkeys(("A100", "A800", "A10", "A30", "A40"), "a100"),
    **dict.fromkeys(("H100", "H200", "H800", "H20", "GH200"), "hopper"),
    **dict.fromkeys(("B100", "B200", "GB200"), "blackwell"),
    **dict.fromkeys(
        ("B300", "GB300"), "blackwell_ultra"
    ),  # more power, twice the exponentials per clock
}


def generation_of(gpu: str, device: str) -> str:
    """Returns the generation of a GPU by its name.

    It is "other" for unknown GPUs and "cpu" for processors.
    """
    if device == "cpu":
        return "cpu"
    model = gpu_model(gpu).upper()
    matches = [generations for generations in GENERATIONS if model.startswith(generations)]
    return GENERATIONS[max(matches, key=len)] if matches else "other"


class Parameter(NamedTuple):
    """One parameter of the cost model, with its prior."""

    name: str
    value: float
    sd: float  # standard deviation of the logarithm
    unit: str
    source: str


def _share(
    names: dict[str, float],
    stem: str,
    sd: float,
    unit: str,
    source: str,
) -> Iterator[Parameter]:
    """Yields parameters `stem.name` that share a standard deviation, a unit and a source."""
    for name, value in names.items():
        yield Parameter(f"{stem}.{name}", value, sd, unit, source)


_GEMM = {
    "v100.16": 0.77,
    "a100.16": 0.80,
    "hopper.16": 0.73,
    "hopper.fp8": 0.63,
    "blackwell.16": 0.64,
}
_GEMM |= {"blackwell_ultra.16": 0.70, "blackwell_ultra.fp8": 0.70}
_GEMM |= {"blackwell.fp8": 0.63, "blackwell.nvfp4": 0.45}
_ATTENTION = {
    "unfused": 0.39,
    "triton": 0.34,
    "flash.v100": 0.40,
    "flash.a100": 0.48,
    "flash.hopper": 0.35,
}
_ATTENTION |= {"cudnn.hopper": 0.50, "blackwell": 0.42, "blackwell_ultra": 0.55, "other": 0.40}
_CAST = {"fp8_tensor": 4.0, "fp8_row": 9.0, "fp8_block": 5.0, "mxfp8": 5.5, "nvfp4": 5.5}
_FAMILY = {
    "orch": 1.0,
    "megatron_2021": 0.93,
    "megatron_deepspeed": 1.14,
    "megatron": 1.15,
    "nemo": 1.02,
}
_FAMILY |= {
    "torchtitan": 1.08,
    "fsdp": 1.0,
    "fsdp_compile": 0.97,
    "fsdp_triton": 1.0,
    "transformers": 1.0,
    "nanotron": 1.0,
    "deepspeed_2020": 1.0,
    "deepspeed_2021": 1.0,
    "deepseek": 1.0,
    # Its run on 8,192 GPUs (arXiv 2407.21783, table 4) took 5 % longer than a plan with 1.0.
    "llama3": 1.02,
}
_FAMILY |= {"maxtext": 1.0, "eager": 1.0}

PRIOR: tuple[Parameter, ...] = (
    *_share(
        _GEMM, "gemm", 0.06, "of peak", "sustained rate of a large matrix product: 0.9 of gemm_mamf"
    ),
    Parameter(
        "gemm.blackwell_ultra.nvfp4",
        0.50,
        0.15,
        "of peak",
        "as other 8-bit and 4-bit products, less sure",
    ),
    *_share(
        {"16": 0.62, "fp8": 0.55},
        "gemm.other",
        0.2,
        "of peak",
        "assumed for GPUs that no run of the table had",
    ),
    Parameter("gemm.cpu", 0.60, 0.5, "of peak", "assumed"),
    Parameter(
        "gemm_bytes",
        0.77,
        0.3,
        "s/byte over HBM's",
        "additive roofline: 0.6 of the bytes at 0.78 of HBM",
    ),
    Parameter(
        "gemm_wave.old",
        0.7,
        0.4,
        "waves",
        "of tiles that a product loses at its end, before Hopper: half or more",
    ),
    Parameter("gemm_wave", 0.3, 0.5, "waves", "the same where kernels split the last wave's sums"),
    *_share(_ATTENTION, "attention", 0.12, "of peak", "accuracy.md 2.2 and 2.3; layer_times"),
    Parameter("attention.cpu", 0.20, 0.5, "of peak", "assumed"),
    Parameter(
        "attention.packed",
        0.30,
        0.3,
        "of attention",
        "samples of an SFT set are much shorter than seq_len",
    ),
    Parameter(
        "attention.scores", 13.0, 0.2, "bytes", "unfused: of one score, forward; twice in backward"
    ),
    Parameter("attention.cp", 1.15, 0.2, "of attention", "blocks, merged by their log-sum-exp"),
    Parameter("hbm", 0.78, 0.1, "of HBM", "memory-bound kernels"),
    Parameter("hbm.cpu", 0.60, 0.5, "of memory", "assumed"),
    Parameter(
        "elementwise.fused", 1.0, 0.15, "of bytes", "bytes of norms, residuals, activation, rotary"
    ),
    Parameter("elementwise.eager", 1.9, 0.2, "of bytes", "the same, one kernel an operation"),
    # Counted by operations of transformers' Llama: 155 bytes per token and hidden feature, of which
    # fused kernels move 44.
    Parameter(
        "elementwise.modules",
        3.5,
        0.25,
        "of bytes",
        "the same, norms and rotary in fp32, as transformers does",
    ),
    *_share(
        _CAST,
        "cast",
        0.3,
        "bytes",
        "fp8: to scale, cast and transpose an input of a matrix product",
    ),
    Parameter(
        "accumulate.fused",
        2.5,
        0.3,
        "bytes",
        "fp32 sum of a weight gradient, mostly in the product's epilogue",
    ),
    Parameter(
        "accumulate.separate",
        8.0,
        0.5,
        "bytes",
        "the same in a kernel of its own: two are read, one is written",
    ),
    Parameter(
        "head", 0.82, 0.15, "of the product", "output projection: larger than the layers' products"
    ),
    Parameter(
        "logits", 10.0, 0.3, "bytes", "loss, of a logit, forward; one and a half times in backward"
    ),
    Parameter(
        "lora",
        0.05,
        0.5,
        "of forward",
        "backward of weights that are not trained, beyond the inputs'",
    ),
    Parameter(
        "recompute.ops", 0.35, 0.3, "of forward", "selective recomputation operation by operation"
    ),
    Parameter("recompute.jax", 0.47, 0.3, "of forward", "XLA's rematerialisation"),
    Parameter(
        "moe.spread.bias",
        0.10,
        0.7,
        "of the mean",
        "loads of experts, sd; arXiv 2408.15664 table 2, and more a step",
    ),
    Parameter(
        "moe.spread.loss",
        0.25,
        0.4,
        "of the mean",
        "the same; the same table: 0.22 and 0.31; tiny_moe: 0.23",
    ),
    Parameter(
        "moe.spread.none",
        0.60,
        0.6,
        "of the mean",
        "nothing balances: tiny_moe from the start 1.3; fine-tuned: less",
    ),
    Parameter("moe.permute", 1.6, 0.4, "of bytes", "permute and unpermute routed tokens"),
    Parameter("host.dense", 0.6e-3, 0.6, "s", "CPU time of a layer, forward and backward"),
    Parameter(
        "host.modules",
        2.5e-3,
        0.6,
        "s",
        "the same of transformers' modules: 60 kernels, twice in backward",
    ),
    Parameter(
        "host.gap",
        0.3e-3,
        1.0,
        "s",
        "of a layer: gaps between kernels that are launched one by one",
    ),
    Parameter(
        "host.moe", 7e-3, 0.6, "s", "the same for an MoE layer, whose dispatch waits for the CPU"
    ),
    Parameter(
        "host.moe_modern", 2.5e-3, 0.6, "s", "the same with CUDA graphs or in the newest releases"
    ),
    Parameter("host.step", 16e-3, 0.7, "s", "CPU time of an optimizer step"),
    Parameter("host.cpu", 2e-5, 0.5, "s", "one operator on a CPU: assumed"),
    Parameter("optimizer", 36.0, 0.2, "bytes", "of a parameter: 30, and what is not fused"),
    Parameter(
        "nvlink",
        0.59,
        0.12,
        "of the link",
        "collectives in a step, about 30 % slower than alone; comm-0364",
    ),
    Parameter(
        "nic", 0.79, 0.06, "of the link", "NCCL alone at 256 MiB to 1 GiB: 0.55 to 0.88; comm-0236"
    ),
    Parameter("nic.tp", 0.5, 0.3, "of the link", "tensor parallelism across nodes"),
    Parameter("link.cpu", 0.80, 0.5, "of the link", "assumed"),
    Parameter(
        "latency",
        1.0,
        0.5,
        "of the hops'",
        "rings: 0.37 (3.7 us a rank); NCCL on 4 to 1,024 nodes: 1.2 to 1.8",
    ),
    Parameter(
        "latency.slow", 2.5e-3, 0.7, "s", "cloud networks: a step, times the root of the replicas"
    ),
    Parameter("tp.launch", 18e-6, 0.5, "s", "one collective of tensor parallelism"),
    Parameter(
        "tp.exposed",
        1.0,
        0.15,
        "times the time",
        "no overlap; above 1, what waits for the slowest rank",
    ),
    Parameter(
        "tp.exposed_overlap",
        0.48,
        0.4,
        "of the time",
        "communication overlaps with the matrix product",
    ),
    Parameter("pp.exposed", 0.70, 0.3, "of the time", "sends wait"),
    Parameter("pp.exposed_overlap", 0.27, 0.5, "of the time", "sends overlap with compute"),
    Parameter("cp.exposed", 0.5, 0.4, "of the time", "keys and values of the others"),
    Parameter(
        "ep.exposed", 0.56, 0.4, "times the time", "all-to-all, and what waits for the slowest rank"
    ),
    Parameter(
        "ep.exposed_overlap",
        0.25,
        0.5,
        "of the time",
        "all-to-all that overlaps with other tokens' compute",
    ),
    Parameter(
        "dp.modern", 0.28, 0.4, "of the time", "Megatron-Core: the rest hides behind a micro-batch"
    ),
    Parameter("dp.early", 0.80, 0.2, "of the time", "before 2023: gradients after backward"),
    Parameter(
        "dp.fsdp",
        0.30,
        0.4,
        "of the time",
        "FSDP, ZeRO-3: never hidden; the rest hides behind compute",
    ),
    Parameter(
        "dp.fsdp_megatron",
        0.50,
        0.3,
        "of the time",
        "the same in Megatron-Core's own sharding of weights",
    ),
    Parameter("dp.jax", 0.10, 0.5, "of the time", "XLA's latency-hiding scheduler"),
    Parameter("dp.zero_2021", 6.0, 0.4, "of the time", "DeepSpeed's ZeRO-3 of 2021"),
    Parameter("nodes", 0.006, 0.5, "of the step", "jitter: for each doubling of the nodes"),
    *_share(_FAMILY, "family", 0.08, "of the step", "what is left of a family's software"),
)
NAMES: tuple[str, ...] = tuple(parameter.name for parameter in PRIOR)
PRIOR_VALUES: dict[str, float] = {parameter.name: parameter.value for parameter in PRIOR}
INDEX: dict[str, int] = {name: index for index, name in enumerate(NAMES)}
