"""Config -> degrees: every default filled in, as a `Case` to be judged and as the plan's `parallel`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.config.schema import Config, ParallelSpec
from orchestrator.config.validate import with_defaults
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan import document as doc
from orchestrator.plan.ranks import AXES
from orchestrator.plan.schedules import TABLE, ScheduleError, read_table
from orchestrator.plan.supported import Case

from .job import make_ramp
from .model.stages import balance_stages

MIB = 1 << 20


def make_case(config: Config, cluster: doc.Cluster, model: doc.Model) -> Case:
    """Degrees with every default filled in."""
    par, train = with_defaults(config.parallel), config.train
    gpus = len(cluster.node_names) * cluster.gpus_per_node
    dp, samples = par.dp or max(1, gpus // (par.tp * par.cp * par.ep * par.pp)), global_batch(config)
    return Case(
        tp=par.tp,
        cp=par.cp,
        ep=par.ep,
        pp=par.pp,
        dp=dp,
        vpp=par.vpp,
        zero=par.zero,
        sp=par.tp > 1 if par.sp is None else par.sp,
        schedule=TABLE if par.schedule_file else par.schedule,
        schedule_rows=_schedule_rows(par),
        cp_method=par.cp_method or "zigzag",
        zero_group=par.zero_group,
        allow_tp_across_nvlink=par.allow_tp_across_nvlink,
        micro_batch_size=par.micro_batch_size or _micro_batch(cluster, dp * par.ep, par.pp, samples, par.uneven),
        global_batch_samples=samples,
        uneven=par.uneven,
        batch_ramp=make_ramp(train.batch_ramp, train.seq_len) if train.batch_ramp else None,
        seq_len=train.seq_len,
        model=model,
        cluster=cluster,
    )


#: Where replicas take unequal numbers of micro-batches, the slowest has at most this many times an equal share.
MOST_SLOWER = 1.1


def _micro_batch(cluster: doc.Cluster, replicas: int, pp: int, samples: int, uneven: bool) -> int:
    """Samples of a micro-batch where the user names none. One sample fills a GPU; on CPU processes the cost of calls
    rules, so up to eight, as long as every stage still has two micro-batches to work on.
    """
    if cluster.device == "cuda":
        return 1

    def fits(size: int) -> bool:
        many, rest = divmod(samples, size)
        slowest = -(-many // replicas) * replicas / max(1, many)
        return not rest and many // replicas >= 2 * pp and slowest <= (MOST_SLOWER if uneven else 1.0)

    return next(filter(fits, (8, 4, 2)), 1)


def global_batch(config: Config) -> int:
    train = config.train
    if (train.global_batch_samples is None) == (train.global_batch_tokens is None):
        raise OrchError("train: set exactly one of global_batch_samples and global_batch_tokens", Exit.CONFIG)
    if train.global_batch_samples is not None:
        return train.global_batch_samples
    samples, rest = divmod(train.global_batch_tokens, train.seq_len)
    if rest or not samples:
        near = max(1, round(train.global_batch_tokens / train.seq_len)) * train.seq_len
        raise OrchError(
            f"train.global_batch_tokens={train.global_batch_tokens} is not a multiple of train.seq_len={train.seq_len};"
            f" nearest: {near}",
            Exit.CONFIG,
        )
    return samples


def make_parallel(config: Config, case: Case) -> doc.Parallel:
    par, stages = config.parallel, case.pp * case.vpp
    return doc.Parallel(
        tp=case.tp,
        cp=case.cp,
        ep=case.ep,
        pp=case.pp,
        dp=case.dp,
        zero=case.zero,
        vpp=case.vpp,
        sp=case.sp and case.tp > 1,
        world_size=case.gpus,
        order=list(AXES) if par.order is None else _order(par.order),
        schedule=case.schedule_name,
        stage_layers=_stage_layers(par.stage_layers, case, stages),
        micro_batch_size=case.micro_batch_size,
        micro_batches=case.micro_batches,
        accumulation=case.micro_batches,
        global_batch_samples=case.global_batch_samples,
        global_batch_tokens=case.global_batch_samples * case.seq_len,
        bucket_bytes=round(par.bucket_mib * MIB),
        cp_method=case.cp_method,
        zero_group=par.zero_group,
        schedule_rows=case.schedule_rows,
        replica_micro_batches=case.unequal,
    )


def _order(order: Sequence[doc.Axis]) -> list[doc.Axis]:
    if sorted(order) != sorted(AXES):
        raise OrchError(f"parallel.order={list(order)} must name each of {', '.join(AXES)} once", Exit.CONFIG)
    return list(order)


def _stage_layers(given: Sequence[int] | None, case: Case, stages: int) -> list[int]:
    if given is None:
        return balance_stages(case.model, stages, case.seq_len)
    if len(given) != stages or sum(given) != case.model.layers:
        raise OrchError(
            f"parallel.stage_layers={list(given)} must be pp x vpp = {stages} numbers that sum to {case.model.layers}"
            f" layers; balanced: {balance_stages(case.model, stages, case.seq_len)}",
            Exit.CONFIG,
        )
    return list(given)


def _schedule_rows(par: ParallelSpec) -> list[list[str]]:
    """The user's table, proven, as the plan carries it. Raises OrchError."""
    if par.schedule_file is None:
        return []
    if par.schedule not in (None, TABLE):
        raise OrchError(f"parallel.schedule={par.schedule} and parallel.schedule_file are both set", Exit.CONFIG)
    try:
        schedule = read_table(Path(par.schedule_file).read_text(), TABLE)
    except OSError as error:
        raise OrchError(f"parallel.schedule_file={par.schedule_file}: {error.strerror}", Exit.CONFIG) from None
    except (ScheduleError, UnicodeDecodeError) as error:
        raise OrchError(f"parallel.schedule_file={par.schedule_file}: {error}", Exit.CONFIG) from None
    if schedule.copies > 1:
        raise OrchError(f"parallel.schedule_file={par.schedule_file}: a table holds one copy of the model", Exit.CONFIG)
    return [[str(action) for action in order] for order in schedule.orders]
