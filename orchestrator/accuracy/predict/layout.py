"""Finds the parallel layout of a row: what the row states, what follows from its other cells, and
else what is usual."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from orchestrator.cost.model.layers import expert_params
from orchestrator.cost.software import Software
from orchestrator.plan.document import AXES, CpMethod, Model, Parallel

from .batches import Batch, batch_of, tokens_that_fit
from .cells import MOST, MOST_GPUS, Row, RowError
from .pipeline import pipeline_of, stage_layers

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
    row: Row,
    model: Model,
    software: Software,
    memory_bytes: int,
    per_node: int,
) -> Parallel:
    """Returns the row's parallelism. `memory_bytes` is the memory of one GPU. Raises RowError for
    numbers that no job can have."""
    zero = stated_zero(row)
    degrees = _degrees(
        row,
        model,
        software,
        zero,
        memory=memory_bytes,
        per_node=per_node,
    )
    tp, cp, pp, replicas, gpus = degrees
    if zero is None:
        zero = _usual_zero(row, model, software, degrees, memory_bytes)
    memory_words = f"{_words(row)} {row.text('zero_stage')} {row.text('recompute')}"
    if re.search(r"off-?load", memory_words.lower()):
        row.say("offloading is not modelled")
    experts = _experts(row, model, degrees, zero)
    batch = _batch(
        row,
        model,
        software,
        degrees,
        zero=zero,
        ep=experts.ep,
        memory_bytes=memory_bytes,
    )
    pipeline = pipeline_of(row, model, software, pp, batch.micro_batches)
    return Parallel(
        tp=tp,
        cp=cp,
        ep=experts.ep,
        pp=pp,
        dp=replicas // experts.ep,
        zero=zero,  # type: ignore[arg-type]
        vpp=pipeline.vpp,
        sp=_sequence_parallel(row, software, tp),
        world_size=gpus,
        order=list(AXES),
        schedule=pipeline.schedule,
        stage_layers=stage_layers(model, pp * pipeline.vpp, software),
        micro_batch_size=batch.micro_batch_size,
        micro_batches=batch.micro_batches,
        accumulation=batch.micro_batches,
        global_batch_samples=batch.global_batch,
        global_batch_tokens=batch.global_batch * model.max_seq_len,
        bucket_bytes=_bucket_bytes(model, software, zero, tp, replicas),
        cp_method=_cp_method(row, cp),
        zero_group=_zero_group(row, zero, replicas * cp, per_node),
        etp=experts.etp,
        fold_cp=experts.fold_cp,
    )


def _batch(
    row: Row,
    model: Model,
    software: Software,
    degrees: Degrees,
    zero: int,
    ep: int,
    memory_bytes: int,
) -> Batch:
    token_limit = tokens_that_fit(
        model,
        tp=degrees.tp,
        cp=degrees.cp,
        ep=ep,
        replicas=degrees.replicas,
        zero=zero,
        memory_bytes=memory_bytes,
        full=row.text("recompute").lower().startswith("full"),
    )
    return batch_of(
        row,
        model,
        pp=degrees.pp,
        replicas=degrees.replicas,
        most_tokens=token_limit,
        accumulates=software.memory not in ("fsdp", "orch"),
    )


def _cp_method(row: Row, cp: int) -> CpMethod:
    if cp > 1 and re.search(r"ulysses|all-?to-?all attention", _words(row)):
        return "ulysses"
    return "zigzag"


def _bucket_bytes(
    model: Model,
    software: Software,
    zero: int,
    tp: int,
    replicas: int,
) -> int:
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
    row: Row,
    model: Model,
    software: Software,
    zero: int | None,
    memory: int,
    per_node: int,
) -> Degrees:
    """Returns degrees that multiply to the number of GPUs. Raises RowError for more GPUs than are
    plausible."""
    tp, cp, pp, dp, gpus = _stated_degrees(row, per_node)
    if tp is None and pp is None:
        tp, pp = _usual_split(
            row,
            model,
            software,
            zero,
            memory=memory,
            per_node=per_node,
            gpus=gpus,
        )
        row.say(f"tp={tp}, pp={pp}")
    tp = tp or 1
    pp = pp or 1
    if gpus is None:
        if dp is None:
            dp = _usual_replicas(model, tp * pp, memory, per_node)
        gpus = tp * cp * pp * dp
        row.say(f"num_gpus={gpus}")
    stated_pp = pp
    if pp > model.layers:
        counts = range(1, model.layers + 1)
        pp = max(count for count in counts if gpus % (tp * cp * count) == 0 or count == 1)
    degrees = _divided(row, tp=tp, cp=cp, pp=pp, dp=dp, gpus=gpus)
    if degrees.gpus > MOST_GPUS:
        raise RowError(
            f"num_gpus={degrees.gpus:,} is above {MOST_GPUS:,}: tp {tp} x pp {pp} x cp {cp}"
            f" x dp {degrees.replicas}"
        )
    if pp != stated_pp:
        row.say(f"pp={pp} of {stated_pp}: the model has {model.layers} layers")
    return degrees


class StatedDegrees(NamedTuple):
    """The degrees that a row states, or that follow from its other cells."""

    tp: int | None
    cp: int
    pp: int | None
    dp: int | None
    gpus: int | None


def _stated_degrees(row: Row, per_node: int) -> StatedDegrees:
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
    return StatedDegrees(tp, cp, pp, dp, gpus)


def _divided(
    row: Row,
    tp: int,
    cp: int,
    pp: int,
    dp: int | None,
    gpus: int,
) -> Degrees:
    """Returns degrees whose product is the number of GPUs; if the row's numbers contradict each
    other, the number of GPUs changes."""
    ranks = tp * cp * pp
    if ranks > gpus:
        gpus = ranks * (dp or 1)
        row.say(f"num_gpus={gpus}: tp {tp} x pp {pp} x cp {cp} need as many")
    replicas = max(1, round(gpus / ranks))
    if replicas * ranks != gpus:
        if dp is not None and dp % cp == 0 and dp * tp * pp == gpus:
            replicas = dp // cp
        gpus = replicas * ranks
        row.say(f"num_gpus={gpus}: tp {tp} x pp {pp} x cp {cp} does not divide what the row says")
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


def _usual_zero(
    row: Row,
    model: Model,
    software: Software,
    degrees: Degrees,
    memory: int,
) -> int:
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
    possible_etps = [tp, 1]
    if match := re.search(r"\betp[ =:]*(\d{1,3})\b", row.text("notes").lower()):
        possible_etps = [max(1, math.gcd(tp, int(match[1])))]
    for etp in possible_etps:
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
    reason = f": {cell[:20]!r} is not read" if cell else ""
    row.say(f"sp={int(enabled)}{reason}")
    return enabled
