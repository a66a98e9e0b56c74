"""Derives the degrees of a job from its configuration, with every default filled in.

They become a `Case`, which the legality rules judge, and then the plan's `parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET, UnsetType

from orchestrator.config.schema import Config, OptimSpec, ParallelSpec
from orchestrator.config.validate import with_defaults
from orchestrator.cost.buckets import bucket_size
from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.cost.model.stages import balance_stages
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan import document as doc
from orchestrator.plan.domains import domains_of
from orchestrator.plan.schedules import TABLE, ScheduleError, read_table
from orchestrator.plan.supported import Case

from .job import comm_buffer_bytes, make_ramp, objective_of

MIB = 1 << 20


def make_case(config: Config, cluster: doc.Cluster, model: doc.Model) -> Case:
    """Returns the configuration's degrees with every default filled in. Raises OrchError (65)."""
    par = with_defaults(config.parallel)
    names = (
        "tp",
        "cp",
        "ep",
        "pp",
        "vpp",
        "zero",
        "zero_group",
        "allow_tp_across_nvlink",
        "uneven",
    )
    degrees: dict[str, Any] = {name: getattr(par, name) for name in names}
    tp = degrees["tp"]
    ep = degrees["ep"]
    pp = degrees["pp"]
    samples = global_batch(config)
    gpus = domains_of(cluster).filled(
        tp,
        degrees["cp"],
        ep,
        pp,
        par.allow_tp_across_nvlink,
    )
    dp = par.dp or max(1, gpus // (tp * degrees["cp"] * ep * pp))
    sp = tp > 1 if par.sp is None else par.sp
    etp = UNSET if par.etp is None else par.etp
    # The direct exchange is the default, which plans leave out.
    all_to_all: doc.AllToAll | UnsetType = UNSET
    if par.expert_all_to_all == "hierarchical":
        all_to_all = "hierarchical"
    schedule = TABLE if par.schedule_file else par.schedule
    return Case(
        **degrees,
        dp=dp,
        sp=sp,
        etp=etp,
        fold_cp=par.fold_cp or UNSET,
        expert_all_to_all=all_to_all,
        schedule=schedule,
        schedule_rows=_schedule_rows(par),
        cp_method=par.cp_method or "zigzag",
        micro_batch_size=par.micro_batch_size
        or _micro_batch(cluster, dp * ep, pp, samples, par.uneven),
        global_batch_samples=samples,
        model=model,
        cluster=cluster,
        **_training(config),
    )


def _training(config: Config) -> dict[str, Any]:
    """Returns the fields of a case that say how the job trains, whatever its layout."""
    train = config.train
    return {
        "batch_ramp": make_ramp(train),
        "seq_len": train.seq_len,
        "objective": objective_of(config),
        "matmul": train.matmul,
        "optim_state": _narrow_state(config.optim),
        "comm_buffer_bytes": comm_buffer_bytes(train) or 0,
        "offload": "" if train.offload == "none" else train.offload,
        "offload_weights": train.offload_weights,
        "precision": train.precision,
        "grad_dtype": train.grad_dtype,
        "grad_wire": train.grad_wire or UNSET,
    }


def unit_case(config: Config, cluster: doc.Cluster, model: doc.Model) -> Case:
    """Returns the legality case of one GPU, from which a search makes those of all meshes."""
    return Case(
        tp=1,
        cp=1,
        ep=1,
        pp=1,
        dp=1,
        vpp=1,
        micro_batch_size=1,
        zero=0,
        sp=False,
        schedule=None,
        zero_group=config.parallel.zero_group,
        allow_tp_across_nvlink=config.parallel.allow_tp_across_nvlink,
        global_batch_samples=global_batch(config),
        model=model,
        cluster=cluster,
        **_training(config),
    )


def _narrow_state(optim: OptimSpec) -> str:
    """Returns the format of the optimizer's state, or "" if the state is wide."""
    return "" if optim.state == "wide" else optim.state


#: If replicas take unequal numbers of micro-batches, the slowest may take this many times an equal
#: share.
MOST_SLOWER = 1.1


def _micro_batch(
    cluster: doc.Cluster,
    replicas: int,
    pp: int,
    samples: int,
    uneven: bool,
) -> int:
    """Returns the default number of samples per micro-batch.

    It is 1 on GPUs, which one sample fills, and up to 8 on CPUs, where calls cost most. Every stage
    must still have two micro-batches.
    """
    if cluster.device == "cuda":
        return 1

    def fits(size: int) -> bool:
        """Reports whether micro-batches of `size` samples divide the batch and fill every stage."""
        micro_batches, rest = divmod(samples, size)
        slowest = -(-micro_batches // replicas) * replicas / max(1, micro_batches)
        return (
            not rest
            and micro_batches // replicas >= 2 * pp
            and slowest <= (MOST_SLOWER if uneven else 1.0)
        )

    return next(filter(fits, (8, 4, 2)), 1)


def global_batch(config: Config) -> int:
    """Returns the samples per global batch. Raises OrchError (65) unless one valid key gives it."""
    samples = config.train.global_batch_samples
    tokens = config.train.global_batch_tokens
    seq_len = config.train.seq_len
    if samples is not None and tokens is None:
        return samples
    if tokens is None or samples is not None:
        raise OrchError(
            "train: set exactly one of global_batch_samples and global_batch_tokens", Exit.CONFIG
        )
    samples, rest = divmod(tokens, seq_len)
    if rest or not samples:
        nearest = max(1, round(tokens / seq_len)) * seq_len
        message = (
            f"train.global_batch_tokens={tokens} is not a multiple of train.seq_len={seq_len};"
            f" nearest: {nearest}"
        )
        raise OrchError(message, Exit.CONFIG)
    return samples


def make_parallel(config: Config, case: Case) -> doc.Parallel:
    """Returns the plan's `parallel` for the degrees of `case`.

    Raises OrchError (65) if other keys contradict them.
    """
    names = (
        "tp",
        "cp",
        "ep",
        "pp",
        "dp",
        "zero",
        "vpp",
        "cp_method",
        "schedule_rows",
        "etp",
        "fold_cp",
        "expert_all_to_all",
        "micro_batch_size",
        "micro_batches",
        "global_batch_samples",
    )
    case_fields: dict[str, Any] = {name: getattr(case, name) for name in names}
    par = config.parallel
    return doc.Parallel(
        **case_fields,
        sp=case.sp and case.tp > 1,
        world_size=case.ranks,
        order=list(doc.AXES) if par.order is None else _order(par.order),
        schedule=case.schedule_name,
        stage_layers=_stage_layers(par.stage_layers, case, case.pp * case.vpp),
        accumulation=case.micro_batches,
        global_batch_tokens=case.global_batch_samples * case.seq_len,
        bucket_bytes=_bucket_bytes(par.bucket_mib, case, comm_buffer_bytes(config.train)),
        zero_group=par.zero_group,
        replica_micro_batches=case.unequal,
        tp_pieces=par.tp_pieces or UNSET,
    )


def _bucket_bytes(bucket_mib: float | None, case: Case, most_bytes: int | None) -> int:
    """Returns the bytes of a gradient bucket: `parallel.bucket_mib`, or what suits the layout, but
    at most `most_bytes`."""
    if bucket_mib is None:
        return bucket_size(case.model, case, DTYPE_BYTES[case.grad_dtype], most_bytes).size
    size = round(bucket_mib * MIB)
    return size if most_bytes is None else min(size, most_bytes)


def _order(order: Sequence[doc.Axis]) -> list[doc.Axis]:
    """Returns the nesting order of the job. Raises OrchError (65) unless it has each axis once."""
    if sorted(order) != sorted(doc.AXES):
        raise OrchError(
            f"parallel.order={list(order)} must name each of {', '.join(doc.AXES)} once",
            Exit.CONFIG,
        )
    return list(order)


def _stage_layers(stage_layers: Sequence[int] | None, case: Case, stages: int) -> list[int]:
    """Returns the layers of each stage: the configured ones, or balanced ones if there are none.

    Raises OrchError (65) if the configured ones do not fit the stages and the model.
    """
    if stage_layers is None:
        return balance_stages(case.model, stages, case.seq_len)
    if len(stage_layers) != stages or sum(stage_layers) != case.model.layers:
        raise OrchError(
            f"parallel.stage_layers={list(stage_layers)} must be pp x vpp = {stages} numbers"
            f" that sum to {case.model.layers} layers; balanced:"
            f" {balance_stages(case.model, stages, case.seq_len)}",
            Exit.CONFIG,
        )
    return list(stage_layers)


def _schedule_rows(par: ParallelSpec) -> list[list[str]]:
    """Returns the user's validated schedule table as rows of the plan. Raises OrchError (65)."""
    if par.schedule_file is None:
        return []
    if par.schedule not in (None, TABLE):
        raise OrchError(
            f"parallel.schedule={par.schedule} and parallel.schedule_file are both set", Exit.CONFIG
        )
    try:
        schedule = read_table(Path(par.schedule_file).read_text(), TABLE)
    except OSError as error:
        raise OrchError(
            f"parallel.schedule_file={par.schedule_file}: {error.strerror}", Exit.CONFIG
        ) from None
    except (ScheduleError, UnicodeDecodeError) as error:
        raise OrchError(
            f"parallel.schedule_file={par.schedule_file}: {error}", Exit.CONFIG
        ) from None
    if schedule.copies > 1:
        raise OrchError(
            f"parallel.schedule_file={par.schedule_file}: a table holds one copy of the model",
            Exit.CONFIG,
        )
    return [[str(action) for action in order] for order in schedule.orders]
