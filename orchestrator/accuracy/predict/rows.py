"""Reads one row of a table as a job: model, cluster, degrees and software. Missing values are
assumed, and each assumption is reported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from msgspec import structs

from orchestrator.cost.software import Selective, Software
from orchestrator.plan.document import Cluster, Matmul, Model, Parallel, Precision, Recompute, Train

from .cells import Row, RowError
from .family import Facts, named_in, software_of
from .hardware import GPUS, Network, cluster_of, gpu_of, network_of
from .layout import layout_of, stated_zero
from .shapes import model_of
from .table import PROBLEM

Task = Literal["pretrain", "sft", "lora"]


class Job(NamedTuple):
    """The job that a row describes."""

    cluster: Cluster
    model: Model
    parallel: Parallel
    train: Train  # `train.recompute` is "none" if the row does not state it.
    matmul: Matmul  # Precision of matrix products, if it is narrower than that of the tensors.
    software: Software
    task: Task
    mem_kind: str  # The way memory was measured, in the table's words.
    recompute: Recompute | None  # None if the row does not state it.
    recompute_share: float  # Share of the layers that are recomputed.
    slow_fabric: bool  # True for a cloud's network or Ethernet.
    group: str  # The row's source: its id without the number.
    assumed: list[str]


def read_row(cells: Mapping[str, str]) -> Job:
    """Returns the job of one row. Raises a RowError that names the column if it cannot be read."""
    if problem := cells.get(PROBLEM):
        raise RowError(problem)
    row = Row(cells)
    model = model_of(row)
    gpu, network, per_node = _hardware(row)
    matmul, precision = _precision(row, gpu, model)
    software = _software(row, model, gpu, precision)
    memory_bytes = int(GPUS[gpu].memory_gib * (1 << 30))
    parallel = layout_of(row, model, software, memory_bytes, per_node)
    gpus = parallel.world_size
    if network.gbit_per_gpu is None and gpus > max(per_node, network.domain_gpus or 0):
        row.say(f"network {GPUS[gpu].nic_gbit:g} Gb/s per GPU")
    recompute, share, selective = _recompute(row, software)
    if software.selective != selective:
        software = structs.replace(software, selective=selective)
    train = Train(
        steps=1,
        seq_len=model.max_seq_len,
        seed=0,
        precision=precision,
        grad_dtype=precision if software.grad_bytes == 2 else "fp32",
        recompute=recompute or "none",
        clip_grad_norm=1.0,
        log_every_steps=1,
    )
    return Job(
        cluster=cluster_of(gpu, gpus, per_node, network),
        model=model,
        parallel=parallel,
        train=train,
        matmul=matmul,
        software=software,
        task=_task(row),
        mem_kind=row.text("mem_kind"),
        recompute=recompute,
        recompute_share=share,
        slow_fabric=network.slow and gpus > per_node,
        group=group_of(cells),
        assumed=row.assumed,
    )


def _software(row: Row, model: Model, gpu: str, precision: Precision) -> Software:
    facts = Facts(
        framework=row.text("framework") or _framework_of(row),
        notes=row.text("notes"),
        gpu=gpu,
        gated=model.mlp == "gated",
        seq_len=model.max_seq_len,
        zero=stated_zero(row),
        source=row.text("source"),
    )
    software, assumption = software_of(facts)
    if assumption:
        row.say(assumption)
    return software


def _framework_of(row: Row) -> str:
    """Returns the software of a row whose `framework` is blank: the one that its other words name,
    else the one that usually has its parallelism."""
    framework = named_in(
        " ".join(
            (
                row.text("notes"),
                row.text("source"),
                row.text("id"),
            )
        )
    )
    if not framework:
        tp, pp, vpp = (row.degree(name) or 1 for name in ("tp", "pp", "vpp"))
        if stated_zero(row) == 3:
            framework = "FSDP" if pp == 1 else ""
        elif vpp > 1 or tp > 1:
            framework = "Megatron-LM"
    if framework:
        row.say(f"framework={framework}")
    return framework


def row_id(cells: Mapping[str, str]) -> str:
    """Returns the id of a row; an empty string if it has none."""
    return (cells.get("id") or "").strip()


def group_of(cells: Mapping[str, str]) -> str:
    """Returns the source of a row: its id without the number."""
    return (cells.get("id") or "").rpartition("-")[0] or "all"


def _hardware(row: Row) -> tuple[str, Network, int]:
    """Returns (name of the GPU, the network, GPUs per node)."""
    stated_gpu = row.text("gpu")
    interconnect = row.text("interconnect")
    name, is_known = gpu_of(stated_gpu or _gpu_of_network(interconnect))
    if not stated_gpu:
        row.say(f"gpu={name}")
    elif not is_known:
        row.say(f"gpu={name}: {stated_gpu[:30]!r} is not known")
    per_node, nodes, gpus = (row.whole(name) for name in ("gpus_per_node", "nodes", "num_gpus"))
    if per_node is None and nodes and gpus and gpus % nodes == 0:
        per_node = gpus // nodes
    network = network_of(interconnect, per_node or GPUS[name].per_node)
    if per_node is None:
        per_node = network.per_node or (4 if network.domain_gpus else GPUS[name].per_node)
        row.say(f"gpus_per_node={per_node}")
        network = network_of(interconnect, per_node)
    if name.startswith("GB") and network.domain_gpus is None:
        network = network._replace(domain_gpus=72)  # An NVL72 rack is one domain.
    return name, network, per_node


#: (pattern of words in `interconnect`, the generation of GPUs that they belong to).
_GENERATIONS = (
    ("nvl72", "GB200"),
    ("nvlink5|xdr", "B200"),
    ("nvlink4|ndr", "H100"),
    ("nvlink3|hdr|selene", "A100"),
)


def _gpu_of_network(interconnect: str) -> str:
    """Returns the GPU whose generation an interconnect's words imply; an empty string if they imply
    none."""
    compact_name = interconnect.lower().replace(" ", "")
    return next(
        (gpu for pattern, gpu in _GENERATIONS if re.search(pattern, compact_name)),
        "V100" if "dgx-2" in compact_name else "",
    )


_WIDE: tuple[tuple[str, Precision], ...] = (
    ("bf16|bfloat", "bf16"),
    ("fp16|float16|half|f16", "fp16"),
    ("32", "fp32"),
)


def _precision(row: Row, gpu: str, model: Model) -> tuple[Matmul, Precision]:
    """Returns (precision of the matrix products, if it is narrower, precision of the tensors)."""
    stated_precision = row.text("precision")
    matmul, tensor_precision, assumption = _precision_words(stated_precision.lower(), gpu)
    if assumption:
        row.say(assumption)
    if matmul == "fp8_tensor" and model.mla and stated_precision.lower() == "fp8":
        # DeepSeek-V3 was trained with scales per block (arXiv 2412.19437, section 3.3).
        matmul = "fp8_block"
    return matmul, tensor_precision


@lru_cache(maxsize=1024)
def _precision_words(stated_precision: str, gpu: str) -> tuple[Matmul, Precision, str]:
    usual_precision: Precision = "fp16" if gpu.startswith(("V100", "T4")) else "bf16"
    matmul: Matmul = ""
    if re.search(r"nvfp4|mxfp4|fp4", stated_precision):
        matmul = "nvfp4"
    elif re.search(r"mxfp8|fp8[-_ ]?mx|mx[-_ ]?fp8|microscal", stated_precision):
        matmul = "mxfp8"
    elif re.search(r"(fp8|float8|f8|e4m3).*row", stated_precision):
        matmul = "fp8_row"
    elif re.search(r"(fp8|float8|f8|e4m3).*(block|sub|sc\b|tile|128)", stated_precision):
        matmul = "fp8_block"
    elif re.search(r"fp8|float8|f8|e4m3|e5m2", stated_precision):
        matmul = "fp8_tensor"
    assumption = ""
    if matmul:
        if GPUS[gpu].fp8_tflops == GPUS[gpu].half_tflops:
            return "", usual_precision, f"precision={usual_precision}: {gpu} has no 8-bit products"
        if matmul == "nvfp4" and not GPUS[gpu].fp4_tflops:
            matmul = "fp8_tensor"
            assumption = f"precision=fp8: {gpu} has no 4-bit products"
        if matmul == "mxfp8" and not GPUS[gpu].fp4_tflops:
            matmul = "fp8_block"
            assumption = f"precision=fp8 in blocks: {gpu} has no microscaling"
        return matmul, "bf16", assumption
    for pattern, tensor_precision in _WIDE:
        if re.search(pattern, stated_precision):
            return "", tensor_precision, ""
    assumption = f"precision={usual_precision}"
    if stated_precision not in ("", "amp", "mixed", "16"):
        assumption += f": {stated_precision[:20]!r} is not read"
    return "", usual_precision, assumption


_TASKS: tuple[tuple[str, Task], ...] = (
    ("lora|peft|adapter", "lora"),
    ("sft|fine|instruct|dpo|align|rlhf|post", "sft"),
)


def _task(row: Row) -> Task:
    task_name = row.text("task").lower()
    description = f"{row.text('framework')}; {row.text('notes')}".lower()
    if not task_name and (match := re.search(r"\b(q?lora|sft|fine-?tun)", description)):
        task_name = match[1]
        row.say(f"task={task_name}")
    known_task = next(
        (task for pattern, task in _TASKS if re.search(pattern, task_name)),
        None,
    )
    if known_task:
        return known_task
    if task_name and "pre" not in task_name and task_name not in ("train", "training", "lm", "llm"):
        row.say(f"task=pretrain: {task_name[:20]!r} is not read")
    return "pretrain"


def _recompute(row: Row, software: Software) -> tuple[Recompute | None, float, Selective]:
    """Returns (mode, share of the layers, what selective means to this software). The mode is None
    if the row does not state it."""
    selective: Selective = "core"
    if not software.memory.startswith(("megatron", "deepspeed")):
        description = f"{row.text('framework')}; {row.text('notes')}".lower()
        alternate = "fms" in description or "fraction of" in description
        selective = "alternate" if alternate else "ops"
    stated_recompute = row.text("recompute").lower()
    mode, share, assumption = _recompute_words(stated_recompute)
    if assumption:
        row.say(assumption)
    if mode == "selective" and selective == "alternate" and share == 1.0:
        share = 0.5
    return mode, share, selective


@lru_cache(maxsize=1024)
def _recompute_words(stated_recompute: str) -> tuple[Recompute | None, float, str]:
    if not stated_recompute or stated_recompute == "not recorded":
        return None, 1.0, "recompute: not stated"
    share = 1.0
    if re.search(r"every (other|second|2nd)|alternat|half|1/2", stated_recompute):
        share = 0.5
    elif match := re.search(r"every (\d)(?:rd|th)|1 (?:in|of) (\d)\b|1/(\d)", stated_recompute):
        share = 1 / max(1, int(next(filter(None, match.groups()))))
    elif percent := re.search(r"(\d{1,3})\s*%", stated_recompute):
        share = min(100, int(percent[1])) / 100
    if re.search(
        r"selective|core|attn|attention|mlp|\bops?\b|partial|moe_act|layernorm|\bsel\b",
        stated_recompute,
    ):
        return "selective", share, ""
    if re.search(
        r"full|^(yes|true|on|1|y|ac|gc)\b|block|uniform|checkpoint|layer|all|remat",
        stated_recompute,
    ):
        return "full", share, ""
    if re.search(r"^(none|no|off|false|0|n|disabled|without)\b", stated_recompute):
        return "none", 1.0, ""
    return None, 1.0, f"recompute: {stated_recompute[:20]!r} is not read"
