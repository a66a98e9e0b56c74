"""From words, or from an entry of the matrix, to cells: plans of the real planner, cut to what
takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from msgspec import structs

from orchestrator.cluster.build import build_cluster
from orchestrator.config.schema import ClusterSpec, Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.parity import Cell, Verdict
from orchestrator.plan.trained import problems

from . import scale
from .matrix import BUCKET_MIB, Entry

SEQ_LEN = 32  # tokens, at least: what a batch is cut to unless the user says otherwise
MOST_SAMPLES = 3  # of a micro-batch
#: Below the norm of a new model's gradient, so that clipping does something.
CLIP = 0.1
#: Recompute "budget" gets this share of what activations take without it, so that layers differ.
BUDGET_SHARE = 0.6
GIB = 1 << 30


def of_words(overrides: Sequence[str], config_dir: str | Path | None) -> Iterator[Cell | Verdict]:
    """Cells for each word of `parallel=word,word,...`, or for an experiment; other words hold for
    all. A layout is one cell, or several small ones where the machine does not run it. The model is
    `tiny` unless one is named. Other words say more: data.isolate_documents, model.dropout,
    train.precision. Raises OrchError."""
    from orchestrator.config.compose import load

    rest = [override for override in overrides if not override.lstrip("+").startswith("parallel=")]
    lists = [
        override.split("=", 1)[1]
        for override in overrides
        if override.lstrip("+").startswith("parallel=")
    ]
    keys = {override.lstrip("+").split("=", 1)[0] for override in rest}
    if not lists and "experiment" not in keys:
        raise OrchError(
            "`orch verify` needs a layout (parallel=tp2_pp2_zero1, or several: parallel=tp2,pp2) or"
            " --matrix"
        )
    if not keys & {"model", "experiment"}:
        rest = ["model=tiny", *rest]
    for name in [name.strip() for name in lists[-1].strip("[]").split(",")] if lists else [""]:
        config = load([*rest, *[f"parallel={name}"] * bool(name)], config_dir)
        if config.parallel.auto:
            raise OrchError(f"parallel={name}: verify needs degrees, not a search", Exit.USAGE)
        yield from _of_layout(name, config, keys)


def _of_layout(name: str, config: Config, keys: set[str]) -> Iterator[Cell | Verdict]:
    degrees = scale.asked(config)
    requested = scale.layout(config.parallel, degrees)
    settings: dict[str, Any] = {
        "packed": config.data.isolate_documents,
        "precision": config.train.precision if "train.precision" in keys else "",
    }
    for small_degrees in scale.smaller(config, degrees):
        small_config = small(config, degrees, small_degrees, keys)
        par = small_config.parallel
        count = (small_config.train.global_batch_samples or 0) // (
            (par.micro_batch_size or 1) * small_degrees["dp"] * small_degrees["ep"]
        )
        if small_config.model == config.model and small_degrees == degrees:
            yield make(name or requested, small_config, **settings)
            continue
        label = scale.layout(par, small_degrees)
        model = small_config.model
        note = (
            f"{requested}, {scale.ranks(degrees):,} ranks, {config.model.name}; as {label},"
            f" {scale.ranks(small_degrees)} ranks, {count} micro-batches; the model with {model.layers}"
            f" layers, {model.heads} heads, {model.kv_heads} key-value heads, hidden {model.hidden}"
        )
        yield make(
            f"{name or requested} as {label}" if small_degrees != degrees else name or requested,
            small_config,
            note=note,
            **settings,
        )


def of_entries(entries: Sequence[Entry], config_dir: str | Path | None) -> Iterator[Cell | Verdict]:
    from orchestrator.config.compose import load

    base = load(["cluster=local", "train.precision=fp32"], config_dir)
    for entry in entries:
        packed = entry.variation.text == "packed"
        empty = entry.variation.masks == "empty"
        yield make(entry.name, of_entry(base, entry), packed=packed, empty=empty)


def make(name: str, config: Config, note: str = "", **settings: Any) -> Cell | Verdict:
    """The cell, or the planner's refusal. Raises OrchError for a model too large to hold whole."""
    from orchestrator.planner.build import build_plan

    try:
        plan = build_plan(config, build_cluster(config.cluster))
    except OrchError as error:
        return Verdict(name=name, note=note, refused=error.message)
    reason = next(problems(plan), "")
    if reason:
        return Verdict(name=name, note=note, refused=reason)
    if plan.model.parameters > scale.MOST_PARAMETERS:
        raise OrchError(
            f"model {plan.model.name} has {plan.model.parameters / 1e6:,.0f} million parameters,"
            f" verify holds several whole float64 copies: at most {scale.MOST_PARAMETERS / 1e6:.0f}"
            " million; leave out model=, or shrink it with model.layers and model.hidden"
        )
    return Cell(name=name, plan=plan, note=note, **settings)


def of_entry(base: Config, entry: Entry) -> Config:
    model = structs.replace(base.model, name=entry.variation.model, **entry.model)
    bucket = BUCKET_MIB[entry.variation.buckets]
    parallel = structs.replace(base.parallel, **entry.degrees, bucket_mib=bucket)
    parallel = structs.replace(parallel, micro_batch_size=entry.variation.size)
    train = structs.replace(
        base.train,
        global_batch_samples=entry.samples,
        seq_len=16,
        steps=4,
        recompute=entry.recompute,
        compile=entry.compile,
        clip_grad_norm=CLIP if entry.variation.size != 2 else 0.0,
        **entry.train,
    )
    optim = structs.replace(base.optim, warmup_steps=0)
    cluster = few_nodes(base.cluster, entry.processes, entry.nodes)
    config = structs.replace(
        base, cluster=cluster, model=model, parallel=parallel, train=train, optim=optim
    )
    return _with_budget(config) if entry.recompute == "budget" else config


def _with_budget(config: Config) -> Config:
    from orchestrator.planner.build import build_plan

    free = structs.replace(config, train=structs.replace(config.train, recompute="none"))
    budget = BUDGET_SHARE * build_plan(free, build_cluster(free.cluster)).memory.activations / GIB
    return structs.replace(config, train=structs.replace(config.train, recompute_budget_gib=budget))


def small(
    config: Config, degrees: scale.Degrees, small_degrees: scale.Degrees, keys: set[str]
) -> Config:
    """The job at the degrees `one`, with a batch that one process computes in a second. Keys that
    the user gave stay where the layout does. Raises OrchError."""
    fits = small_degrees == degrees
    named = any(key.split(".")[0] in ("model", "experiment") for key in keys)
    own_batch = bool(keys & {"train.global_batch_samples", "train.global_batch_tokens"})
    count = scale.micro_batches(config, degrees, small_degrees, own_batch or "experiment" in keys)
    config = scale.scaled(config, degrees, small_degrees, named)
    par = config.parallel
    train = config.train
    nodes = (
        2
        if config.parallel.expert_all_to_all == "hierarchical"
        and scale.ranks(small_degrees) % 2 == 0
        else 1
    )
    config = structs.replace(
        config, cluster=few_nodes(config.cluster, scale.ranks(small_degrees), nodes), nodes=None
    )
    if not fits or "train.seq_len" not in keys:
        piece = 2 * small_degrees["cp"] * small_degrees["tp"]
        train = structs.replace(train, seq_len=piece * ceil(SEQ_LEN / piece))
    par = structs.replace(par, order=None if not fits else par.order, allow_tp_across_nvlink=True)
    if not fits or not own_batch:
        par = structs.replace(par, micro_batch_size=min(par.micro_batch_size or 1, MOST_SAMPLES))
        replicas = small_degrees["dp"] * small_degrees["ep"]
        count = (
            replicas * (count - 1) + 1
            if par.uneven and replicas > 1 and count > 1
            else replicas * count
        )
        samples = count * (par.micro_batch_size or 1)
        train = structs.replace(train, global_batch_samples=samples, global_batch_tokens=None)
    # What is compared in fp64 and fp32 has no precision of its own; a ramp only says how many
    # samples a step has.
    if "train.precision" not in keys:
        train = structs.replace(train, precision="fp32", grad_dtype="fp32")
    clip = train.clip_grad_norm if "train.clip_grad_norm" in keys else CLIP
    train = structs.replace(train, batch_ramp=None, clip_grad_norm=clip)
    # A full learning rate from the first of the two steps: weights that hardly move prove little.
    optim = structs.replace(config.optim, warmup_steps=0)
    config = structs.replace(config, parallel=par, train=train, optim=optim)
    budget = train.recompute == "budget" and "train.recompute_budget_gib" not in keys
    return _with_budget(config) if budget else config


def few_nodes(cluster: ClusterSpec, gpus: int, nodes: int = 1) -> ClusterSpec:
    """The same hardware as `gpus` in one node: what is verified is the arithmetic, not the
    placement. In several, each an NVLink domain, where the arithmetic depends on them."""
    return structs.replace(
        cluster,
        nodes=nodes,
        gpus_per_node=gpus // nodes,
        nvlink=structs.replace(cluster.nvlink, domain_nodes=1),
        nic=structs.replace(cluster.nic, per_node=1, rails=1),
        levels=[structs.replace(cluster.levels[0], nodes_per_switch=nodes)],
    )
