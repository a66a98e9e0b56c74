"""Finds the degrees, schedule and batch of a row: what the row states, what follows from its other
cells, and else what is usual."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from orchestrator.cost.model.layers import expert_params
from orchestrator.cost.model.stages import balance_stages
from orchestrator.cost.software import Software
from orchestrator.plan.document import AXES, Model, Parallel

from .batches import batch_of, tokens_that_fit
from .cells import MOST, MOST_GPUS, Row, RowError

#: (pattern of words in `pp_schedule`, in lower case without separators, the schedule that they
#: mean). The first match counts.
_SCHEDULES: tuple[tuple[str, str], ...] = (
    ("zbv|zeroblev|zerobubblev|vhalf|vmin", "zbv"),
    ("zb2p|zbh2|zb2", "zb_h2"),
    ("zb|zerobubble", "zb_h1"),
    ("dualpipev", "dualpipev"),
    ("dualpipe", "dualpipe"),
    ("notstated", ""),
    ("interleav|virtual|vpp|loop", "interleaved"),
    ("1f1b|onef|pipedream|default", "1f1b"),
    ("gpipe|afab|allforward|fillandrain|filldrain", "afab"),
)
#: Families whose recipes interleave pipeline stages by default.
_INTERLEAVE = ("nemo", "megatron")
#: Families that shard states over data parallelism if a row does not state a ZeRO stage.
_SHARDED = ("fsdp", "torchtitan", "fsdp_triton", "maxtext", "eager", "deepspeed_2021")
_STATE_BYTES = 18  # Bytes per parameter of weights, gradients and optimizer state.
_WEIGHT_BYTES = 6  # Bytes per parameter that remain if the optimizer state is sharded.
_FULL = 0.6  # Share of a GPU's memory that states may take in an assumed layout.


class Experts(NamedTuple):
    """The degrees of expert parallelism, with the names of `Parallel`."""

    ep: int
    etp: int | UnsetType
    fold_cp: bool | UnsetType


class Degrees(NamedTuple):
    tp: int
    cp: int
    pp: int
    replicas: int  # Replicas of the dense weights.
    gpus: int


def layout_of(
    row: Row, model: Model, software: Software, memory_bytes: int, per_node: int
) -> Parallel:
    """Returns the row's parallelism. `memory_bytes` is the memory of one GPU. Raises RowError for
    numbers that no job can have."""
    zero = stated_zero(row)
    degrees = _degrees(row, model, software, zero, memory_bytes, per_node)
    tp, cp, pp, replicas, gpus = degrees
    if zero is None:
        zero = _usual_zero(row, model, software, degrees, memory_bytes)
    if re.search(
        r"off-?load", f"{_words(row)} {row.text('zero_stage')} {row.text('recompute')}".lower()
    ):
        row.say("offloading is not modelled")
    ep, etp, fold_cp = _experts(row, model, degrees, zero)
    fully_recomputed = row.text("recompute").lower().startswith("full")
    token_limit = tokens_that_fit(model, tp, cp, ep, replicas, zero, memory_bytes, fully_recomputed)
    micro_batch_size, global_batch, micro_batches = batch_of(
        row, model, pp, replicas, token_limit, software.memory not in ("fsdp", "orch")
    )
    schedule, vpp = _schedule(row, model, software, pp)
    if schedule.startswith("dualpipe") and (pp % 2 or micro_batches % 2):
        row.say("pp_schedule=1f1b: dualpipe wants even numbers")
        schedule = "1f1b"
        vpp = 1
    return Parallel(
        tp=tp,
        cp=cp,
        ep=ep,
        pp=pp,
        dp=replicas // ep,
        zero=zero,  # type: ignore[arg-type]
        vpp=vpp,
        sp=_sequence_parallel(row, software, tp),
        world_size=gpus,
        order=list(AXES),
        schedule=schedule,
        stage_layers=_stage_layers(model, pp * vpp, software),
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        accumulation=micro_batches,
        global_batch_samples=global_batch,
        global_batch_tokens=global_batch * model.max_seq_len,
        bucket_bytes=_bucket_bytes(model, software, zero, tp, replicas),
        cp_method=(
            "ulysses"
            if cp > 1 and re.search(r"ulysses|all-?to-?all attention", _words(row))
            else "zigzag"
        ),
        zero_group=_zero_group(row, zero, replicas * cp, per_node),
        etp=etp,
        fold_cp=fold_cp,
    )


def _bucket_bytes(model: Model, software: Software, zero: int, tp: int, replicas: int) -> int:
    """Returns the bytes of gradients that one collective sums: PyTorch's 25 MiB, or one layer with
    ZeRO-3.

    Megatron-Core's buckets grow with the replicas (`DistributedDataParallelConfig.bucket_size`).
    """
    if zero == 3:
        return max(25 << 20, 4 * model.parameters // model.layers // tp)
    if software.growing_buckets:
        return (software.grad_bytes or 4) * max(40_000_000, 1_000_000 * replicas)
    return 25 << 20


def stated_zero(row: Row) -> int | None:
    """Returns the ZeRO stage that the row's own column states, or else the name of its software or
    its notes; None if none of them does. Raises RowError for a column that cannot be read."""
    zero = zero_of(row.text("zero_stage"))
    if zero is None and (match := re.search(r"zero[- _]?(?:stage)?[- _]?([1-3])\b", _words(row))):
        zero = int(match[1])
    return zero


def _words(row: Row) -> str:
    """Returns the free words of a row, in lower case."""
    return f"{row.text('framework')}; {row.text('notes')}".lower()


def zero_of(cell: str) -> int | None:
    """Returns the ZeRO stage of "3", "ZeRO-1", "FSDP" or "distributed optimizer"; None if the cell
    is blank. Raises RowError for other words."""
    if not cell:
        return None
    lower = cell.lower()
    if match := re.fullmatch(
        r"(?:zero|stage|zero stage)?[ _-]*([0-3])(?:\.0)?(?:\s*[(+;,].*)?", lower
    ):
        return int(match[1])
    for pattern, stage in (
        ("grad_op|grad-op", 2),
        ("fsdp|hsdp|full|hybrid", 3),
        ("dist|optim|\\bos\\b", 1),
        ("none|no|ddp|off", 0),
    ):
        if re.search(pattern, lower):
            return stage
    raise RowError(f"zero_stage={cell[:40]!r}: 0 to 3")


def _degrees(
    row: Row, model: Model, software: Software, zero: int | None, memory: int, per_node: int
) -> Degrees:
    tp, cp, pp, dp = (row.degree(name) for name in ("tp", "cp", "pp", "dp"))
    gpus = row.whole("num_gpus")
    nodes = row.whole("nodes")
    if gpus is None and nodes is not None:
        gpus = nodes * per_node
        row.say(f"num_gpus={gpus}: {nodes} nodes of {per_node}")
    cp = cp or 1
    sp_cell = row.text("sp")
    if cp == 1 and tp in (None, 1) and sp_cell.isdecimal() and 1 < int(sp_cell) <= MOST["cp"]:
        # DeepSpeed-Ulysses and others shard the sequence without tensor parallelism.
        cp = int(sp_cell)
        row.say(f"cp={cp}: from sp")
    # If one of tp and pp is stated, the other follows from the GPUs and dp.
    if gpus is not None and dp is not None and (tp is None) != (pp is None):
        remaining_degree, remainder = divmod(gpus, dp * cp * (tp or pp or 1))
        if remaining_degree and not remainder:
            tp = tp or remaining_degree
            pp = pp or remaining_degree
            row.say(f"tp={tp}, pp={pp}: from num_gpus and dp")
    if tp is None and pp is None:
        tp, pp = _usual_split(row, model, software, zero, memory, per_node, gpus)
        row.say(f"tp={tp}, pp={pp}")
    tp = tp or 1
    pp = pp or 1
    if gpus is None:
        if dp is None:
            dp = _usual_replicas(model, tp * pp, memory, per_node)
        gpus = tp * cp * pp * dp
        row.say(f"num_gpus={gpus}")
    requested_degrees = tp, cp, pp
    if pp > model.layers:
        pp = max(
            count
            for count in range(1, model.layers + 1)
            if gpus % (tp * cp * count) == 0 or count == 1
        )
    if tp * cp * pp > gpus:
        gpus = tp * cp * pp * (dp or 1)
        row.say(f"num_gpus={gpus}: tp {tp} x pp {pp} x cp {cp} need as many")
    replicas = max(1, round(gpus / (tp * cp * pp)))
    if replicas * tp * cp * pp != gpus:
        if dp is not None and dp % cp == 0 and dp * tp * pp == gpus:
            replicas = dp // cp
        gpus = replicas * tp * cp * pp
        row.say(f"num_gpus={gpus}: tp {tp} x pp {pp} x cp {cp} does not divide what the row says")
    if gpus > MOST_GPUS:
        raise RowError(
            f"num_gpus={gpus:,} is above {MOST_GPUS:,}: tp {tp} x pp {pp} x cp {cp} x dp {replicas}"
        )
    if requested_degrees != (tp, cp, pp):
        row.say(f"pp={pp} of {requested_degrees[2]}: the model has {model.layers} layers")
    return Degrees(tp, cp, pp, replicas, gpus)


def _usual_split(
    row: Row,
    model: Model,
    software: Software,
    zero: int | None,
    memory: int,
    per_node: int,
    gpus: int | None,
) -> tuple[int, int]:
    """Returns (tp, pp) for a row that states neither: (1, 1) with sharded states, else the fewest
    ranks that hold the states."""
    if software.memory in ("fsdp", "orch", "deepspeed") or (zero or 0) > 1:
        return 1, 1
    gpu_limit = gpus or 1 << 14
    held_parameters = float(model.parameters)
    if model.moe:  # Experts are spread over data parallelism first.
        experts = expert_params(model)
        held_parameters += experts / (row.degree("ep") or 8) - experts
    ranks_needed = (
        held_parameters
        * (_STATE_BYTES if software.memory == "megatron_fp16" else _WEIGHT_BYTES)
        / (memory * _FULL)
    )
    tp = pp = 1
    while tp * pp < ranks_needed and tp < min(per_node, gpu_limit):
        tp *= 2
    while tp * pp < ranks_needed and pp * 2 <= model.layers and tp * pp * 2 <= gpu_limit:
        pp *= 2
    return (tp, pp) if gpu_limit % (tp * pp) == 0 else (1, 1)


def _usual_replicas(model: Model, ranks: int, memory: int, per_node: int) -> int:
    """Returns the number of replicas that hold the sharded states; at least one node."""
    ranks_needed = model.parameters * _STATE_BYTES / (memory * _FULL)
    replicas = max(1, per_node // ranks)
    while replicas * ranks < ranks_needed:
        replicas *= 2
    return replicas


def _usual_zero(row: Row, model: Model, software: Software, degrees: Degrees, memory: int) -> int:
    """Returns the ZeRO stage of a family's recipes; for a family that shards everything or nothing,
    the one that fits."""
    description = _words(row)
    if re.search(r"\bddp\b", description) and "fsdp" not in description:
        zero = 0
    elif software.name in _SHARDED or re.search(r"fsdp|hsdp", description):
        fits = model.parameters * _STATE_BYTES / (degrees.tp * degrees.pp) < memory * _FULL / 2
        zero = 1 if software.name == "eager" and fits else 3
        zero = 1 if degrees.pp > 1 and not re.search(r"fsdp|hsdp", description) else zero
    else:
        zero = 0 if software.name == "megatron_2021" else 1
    if degrees.replicas * degrees.cp > 1:
        row.say(f"zero_stage={zero}")
    return zero


def _zero_group(row: Row, zero: int, ranks: int, per_node: int) -> int:
    """Returns the number of ranks that share one copy of what ZeRO-3 shards, if `notes` or
    `framework` state such a group; 0 for all ranks."""
    if zero < 3:
        return 0
    description = _words(row)
    group = 0
    if match := re.search(r"shard(?:ing)? group(?: of| size)?[ =:]*(\d{1,6})\b", description):
        group = int(match[1])
    elif re.search(r"hsdp|hybrid.?shard", description) and not re.search(
        r"fsdp over \d", description
    ):
        group = per_node
    return group if 1 < group < ranks and ranks % group == 0 else 0


def _experts(row: Row, model: Model, degrees: Degrees, zero: int) -> Experts:
    """Returns the row's degrees of expert parallelism.

    Tables count dp over all replicas of the dense weights, and ep on the experts' own mesh: over dp
    first, then over cp. An ep that is larger than both extends over tp as well, whose ranks then
    hold whole experts.
    """
    tp = degrees.tp
    replicas = degrees.replicas
    stated = row.degree("ep")
    if model.moe is None:
        return Experts(1, UNSET, UNSET)
    if stated is None:
        # With ZeRO-3, gathering experts would cost more than sending tokens.
        ep_limit = replicas if zero == 3 else min(replicas, 8)
        stated = math.gcd(model.moe.experts, ep_limit)
        row.say(f"ep={stated}")
    if stated > model.moe.experts:
        row.say(f"ep={model.moe.experts} of {stated}: as many as experts")
        stated = model.moe.experts
    match = re.search(r"\betp[ =:]*(\d{1,3})\b", row.text("notes").lower())
    for etp in [max(1, math.gcd(tp, int(match[1])))] if match else [tp, 1]:
        reduced_etp = etp if etp < tp else UNSET
        folded_tp = tp // etp
        if stated % folded_tp == 0 and replicas % (stated // folded_tp) == 0:
            return Experts(stated // folded_tp, reduced_etp, UNSET)
        if (
            degrees.cp > 1
            and stated % (folded_tp * degrees.cp) == 0
            and replicas % (stated // folded_tp // degrees.cp) == 0
        ):
            return Experts(stated // folded_tp // degrees.cp, reduced_etp, True)
    ep = math.gcd(max(1, stated // folded_tp), replicas)
    row.say(
        f"ep={ep * folded_tp} of {stated}: tp {tp} x cp {degrees.cp} x dp {replicas} have no more"
        " places"
    )
    return Experts(ep, reduced_etp, UNSET)


def _schedule(row: Row, model: Model, software: Software, pp: int) -> tuple[str, int]:
    """Returns (name of the plan's schedule, virtual stages per rank)."""
    stated_schedule = re.sub(r"[\s_\-]+", "", row.text("pp_schedule").lower())
    vpp = row.degree("vpp")
    if pp == 1:
        return "1f1b", 1
    name = next((name for pattern, name in _SCHEDULES if re.search(pattern, stated_schedule)), None)
    if stated_schedule and name is None and stated_schedule != "none":
        row.say(f"pp_schedule={stated_schedule[:20]!r}: unknown")
    if (
        name == "1f1b"
        and vpp is None
        and software.name == "nemo"
        and "lora" not in row.text("task").lower()
    ):
        # NeMo's recipes interleave by default; tables of runs without interleaving write vpp 1.
        name = "interleaved"
    if name in ("zb_h1", "zb_h2", "1f1b", "dualpipe") and "notstated" not in stated_schedule:
        if vpp is not None and vpp > 1:
            row.say(
                f"pp_schedule={name}: vpp={vpp} is not of it"
                if name != "1f1b"
                else "pp_schedule=interleaved"
            )
        if name != "1f1b" or vpp in (None, 1):
            return name, 1
    if name in ("zbv", "dualpipev"):
        if model.layers >= 2 * pp:
            return name, 2
        row.say("pp_schedule=zb_h1: too few layers for two stages per rank")
        return "zb_h1", 1
    if name == "afab":
        return "afab", min(vpp or 1, max(1, model.layers // pp))
    if vpp is not None:
        stage_limit = max(1, (model.layers + 2) // pp)
        if vpp > stage_limit:
            row.say(f"vpp={stage_limit} of {vpp}: the model has {model.layers} layers")
            vpp = stage_limit
        if vpp == 1 and name == "interleaved":
            row.say("pp_schedule=1f1b: one stage a rank")
        return ("interleaved" if vpp > 1 else "1f1b"), vpp
    if name == "interleaved" or (name is None and software.name in _INTERLEAVE):
        vpp = _most_stages(model.layers, pp)
        if software.memory in ("fsdp", "orch"):
            vpp = min(2, model.layers // pp)  # PyTorch's pipelines have two stages per rank.
        elif name is None:
            vpp = max((stages for stages in range(2, 13) if vpp % stages == 0), default=vpp)
        schedule = "interleaved" if vpp > 1 else "1f1b"
        row.say(f"vpp={vpp}" if name else f"pp_schedule={schedule}, vpp={vpp}")
        return schedule, vpp
    row.say("pp_schedule=1f1b")
    return "1f1b", 1


def _most_stages(layers: int, pp: int) -> int:
    """Returns the number of virtual stages per rank if each has one layer. If the layers do not
    divide evenly, the embedding and the head count as layers."""
    if layers % pp == 0:
        return layers // pp
    if (layers + 2) % pp == 0:
        return (layers + 2) // pp
    return 1


@lru_cache(maxsize=4096)
def _even(layers: int, stages: int) -> tuple[int, ...] | None:
    """Returns the layers of each stage of an even split, or None if there is none.

    As in the frameworks, the embedding and the head, or the head alone, count as layers if only
    then the layers divide evenly.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    if stages > 1 and (layers + 2) % stages == 0:
        layers_per_stage = (layers + 2) // stages
        return (layers_per_stage - 1, *(layers_per_stage,) * (stages - 2), layers_per_stage - 1)
    if (layers + 1) % stages == 0:
        layers_per_stage = (layers + 1) // stages
        return (*(layers_per_stage,) * (stages - 1), layers_per_stage - 1)
    return None


def _stage_layers(model: Model, stages: int, software: Software) -> list[int]:
    """Returns the number of decoder layers of each stage, split as evenly as frameworks do it.
    Nanotron balances the cost of the head against the layers."""
    balanced = software.name == "nanotron" and stages <= model.layers
    even = None if balanced else _even(model.layers, stages)
    return list(even or balance_stages(model, stages, model.max_seq_len))


def _sequence_parallel(row: Row, software: Software, tp: int) -> bool:
    cell = row.text("sp").lower()
    if tp == 1:
        return False
    if cell in ("1", "1.0", "true", "yes", "on", "y", str(tp)):
        return True
    if cell in ("0", "0.0", "false", "no", "off", "n", "none"):
        return False
    enabled = software.name not in (
        "megatron_2021",
        "megatron_deepspeed",
        "deepspeed_2021",
        "fsdp_triton",
    )
    row.say(f"sp={int(enabled)}" if not cell else f"sp={int(enabled)}: {cell[:20]!r} is not read")
    return enabled
