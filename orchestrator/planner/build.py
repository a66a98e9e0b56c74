"""Config -> sealed Plan: the one function that the rest of orch calls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan import SCHEMA, Exit, Plan, seal
from orchestrator.plan import document as doc
from orchestrator.plan.flops import model_flops_per_token
from orchestrator.plan.ranks import AXES, all_groups, coords, degrees

from . import advice, legality, memory, step_time
from .compute import rates
from .layout import balance_stages, seat_ranks
from .model_math import resolve
from .placement import Candidate, axis_placement, candidates, choose
from .profile import profile_for
from .topology import build_cluster
from .traffic import Traffic, step_traffic

MIB = 1 << 20


def build_plan(config: Config) -> Plan:
    """The plan of a job: degrees checked, ranks placed, memory and time predicted, sealed with its hash.

    Raises OrchError (exit 65) with one line when the cluster, the model or the degrees contradict each other.
    """
    cluster = build_cluster(config.cluster)
    model = resolve(config.model)
    job = _job(config)
    case = _case(config, cluster, model)
    legality.check(case)
    parallel = _parallel(config, case)
    parallel, best, traffic, time = _solve(config, case, job.train)
    alternative = None
    if best.outside_nvlink("tp"):
        if not case.allow_tp_across_nvlink:  # only an explicit order gets here: the rules refuse everything else
            raise OrchError(
                f"parallel.order={parallel.order} puts tp={parallel.tp} groups across {best.worst_level('tp')};"
                " put tp first, or set parallel.allow_tp_across_nvlink=true to see what it costs",
                Exit.CONFIG,
            )
        alternative = _inside_nvlink(config, case, job.train)

    places = coords(parallel.order, degrees(parallel))
    per_gpu = parallel.global_batch_tokens / time.step_s / parallel.world_size
    peak = cluster.gpu.peak_flops[job.train.precision]
    accounts = memory.accounts(cluster, model, parallel, job.train)
    worst = max(accounts, key=lambda account: account.total)
    worst_rank = next(rank for rank, place in enumerate(places) if place["pp"] == worst.worst_rank)
    plan = Plan(
        schema=SCHEMA,
        hash="",
        cluster=cluster,
        model=model,
        parallel=parallel,
        job=job,
        ranks=seat_ranks(cluster, places),
        groups=all_groups(places, parallel.pp),
        placement=axis_placement(best, traffic),
        memory=structs.replace(worst, worst_rank=worst_rank),
        time=time,
        mfu=per_gpu * model_flops_per_token(model, job.train.seq_len) / peak,
        tokens_per_s_per_gpu=per_gpu,
        warnings=[],
    )
    return seal(structs.replace(plan, warnings=advice.warnings(plan, alternative)))


class Solution(NamedTuple):
    """Degrees with the best nesting order for them, and what they cost."""

    parallel: doc.Parallel
    best: Candidate
    traffic: list[Traffic]
    time: doc.Time


def _solve(config: Config, case: legality.Case, train: doc.Train) -> Solution:
    cluster, parallel = case.cluster, _parallel(config, case)
    profile = profile_for(cluster.gpu.name, cluster.device)
    traffic = step_traffic(case.model, parallel, train)
    work = step_time.step_work(case.model, parallel, train, rates(cluster, profile, train.precision))
    found = candidates(cluster, profile, parallel, traffic, work, config.parallel.order)
    best = choose(found, [level.name for level in cluster.levels])
    parallel = structs.replace(parallel, order=list(best.order))
    outside = [axis for axis in AXES if best.outside_nvlink(axis)]
    return Solution(parallel, best, traffic, step_time.predict(work, best.exposed, parallel, outside))


def _inside_nvlink(config: Config, case: legality.Case, train: doc.Train) -> tuple[str, float] | None:
    """(word, step seconds) of the nearest degrees whose tensor-parallel groups stay inside NVLink, if there are any.

    Degrees that spread the model over as many GPUs come first: they need about as much memory.
    """
    legal = legality.nearest_legal(structs.replace(case, allow_tp_across_nvlink=False), limit=100)
    if not legal:
        return None
    near = min(legal, key=lambda other: (other.tp * other.pp != case.tp * case.pp, legal.index(other)))
    free = structs.replace(config, parallel=structs.replace(config.parallel, order=None, stage_layers=None))
    return near.word, _solve(free, near, train).time.step_s


# ---------------------------------------------------------------------------------------------- config -> plan parts


def _case(config: Config, cluster: doc.Cluster, model: doc.Model) -> legality.Case:
    """Degrees with every default filled in."""
    par, train = config.parallel, config.train
    gpus = len(cluster.node_names) * cluster.gpus_per_node
    dp, samples = par.dp or max(1, gpus // (par.tp * par.cp * par.ep * par.pp)), _global_batch(config)
    return legality.Case(
        tp=par.tp,
        cp=par.cp,
        ep=par.ep,
        pp=par.pp,
        dp=dp,
        vpp=par.vpp,
        zero=par.zero,
        sp=par.tp > 1 if par.sp is None else par.sp,
        schedule=par.schedule,
        allow_tp_across_nvlink=par.allow_tp_across_nvlink,
        micro_batch_size=par.micro_batch_size or _micro_batch(cluster, dp * par.ep, par.pp, samples),
        global_batch_samples=samples,
        seq_len=train.seq_len,
        model=model,
        cluster=cluster,
    )


def _micro_batch(cluster: doc.Cluster, replicas: int, pp: int, samples: int) -> int:
    """Samples of a micro-batch where the user names none. One sample fills a GPU; on CPU processes the cost of calls
    rules, so up to eight, as long as every stage still has two micro-batches to work on.
    """
    if cluster.device == "cuda":
        return 1
    share = samples // replicas
    fits = (size for size in (8, 4, 2) if share * replicas == samples and share % size == 0 and share // size >= 2 * pp)
    return next(fits, 1)


def _global_batch(config: Config) -> int:
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


def _parallel(config: Config, case: legality.Case) -> doc.Parallel:
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
    )


def _order(order: Sequence[doc.Axis]) -> list[doc.Axis]:
    if sorted(order) != sorted(AXES):
        raise OrchError(f"parallel.order={list(order)} must name each of {', '.join(AXES)} once", Exit.CONFIG)
    return list(order)


def _stage_layers(given: Sequence[int] | None, case: legality.Case, stages: int) -> list[int]:
    if given is None:
        return balance_stages(case.model, stages, case.seq_len)
    if len(given) != stages or sum(given) != case.model.layers:
        raise OrchError(
            f"parallel.stage_layers={list(given)} must be pp x vpp = {stages} numbers that sum to {case.model.layers}"
            f" layers; balanced: {balance_stages(case.model, stages, case.seq_len)}",
            Exit.CONFIG,
        )
    return list(given)


def _job(config: Config) -> doc.Job:
    train, data, checkpoint = config.train, config.data, config.checkpoint
    home = Path(os.environ.get("ORCH_HOME") or Path.home() / ".orch")
    return doc.Job(
        train=doc.Train(**{name: getattr(train, name) for name in doc.Train.__struct_fields__}),
        optim=doc.Optim(**{name: getattr(config.optim, name) for name in doc.Optim.__struct_fields__}),
        data=doc.Data(
            name=data.name,
            paths=list(data.paths),
            extensions=list(data.extensions),
            tokenizer=data.tokenizer,
            seed=train.seed if data.seed is None else data.seed,
            cache_dir=data.cache_dir or str(home / "data"),
            demo=data.demo,
        ),
        checkpoint=doc.Checkpoint(
            dir=checkpoint.dir or "", every_steps=checkpoint.every_steps, keep_last=checkpoint.keep_last
        ),
        metrics=doc.Metrics(**{name: getattr(config.metrics, name) for name in doc.Metrics.__struct_fields__}),
    )
