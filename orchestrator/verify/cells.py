"""The cells of `orch verify`: plans of the real planner for overrides or entries of the matrix, cut
to a size that takes seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from msgspec import structs

from orchestrator.cluster.build import build_cluster
from orchestrator.config.schema import ClusterSpec, Config, ParallelSpec, TrainSpec
from orchestrator.config.words import typed_values
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.batch import suited_pieces
from orchestrator.plan.parity import Cell, Verdict
from orchestrator.plan.rounding.wide import in_fewer_layers
from orchestrator.plan.trained import problems

from . import scale
from .matrix import BUCKET_MIB, Entry

SEQ_LEN = 32  # least tokens per sample, unless the user sets them
MOST_SAMPLES = 3  # samples of a micro-batch
#: A norm below that of a new model's gradient, so that the gradient is clipped.
CLIP = 0.1
#: The budget of recompute "budget", as a share of the activations without recomputation: some
#: layers recompute and others do not.
BUDGET_SHARE = 0.6
GIB = 1 << 30


def cells_of_overrides(
    overrides: Sequence[str], config_dir: str | Path | None
) -> Iterator[Cell | Verdict]:
    """Yields the cells of each layout of `parallel=layout,layout,...`, or of an experiment; other
    overrides apply to all. A layout is one cell, or several small ones if this machine cannot run
    it. The model is `tiny` unless one is named. The cells also follow data.isolate_documents,
    model.dropout and train.precision. Raises OrchError."""
    from orchestrator.config.compose import load

    rest = [override for override in overrides if not override.lstrip("+").startswith("parallel=")]
    typed = typed_values(overrides)
    keys = {*typed}
    if not keys & {"parallel", "experiment"}:
        raise OrchError(
            "`orch verify` needs a layout (parallel=tp2_pp2_zero1, or several: parallel=tp2,pp2) or"
            " --matrix"
        )
    if not keys & {"model", "experiment"}:
        rest = ["model=tiny", *rest]
    names = [""]
    if "parallel" in typed:
        names = [name.strip() for name in typed["parallel"].strip("[]").split(",")]
    for name in names:
        layout = [f"parallel={name}"] if name else []
        config = load([*rest, *layout], config_dir)
        if config.parallel.auto:
            raise OrchError(f"parallel={name}: orch verify needs degrees, not a search", Exit.USAGE)
        yield from _of_layout(name, config, keys)


def _of_layout(name: str, config: Config, keys: set[str]) -> Iterator[Cell | Verdict]:
    degrees = scale.requested_degrees(config)
    requested = scale.layout(config.parallel, degrees)
    settings: dict[str, Any] = {
        "packed": config.data.isolate_documents,
        "precision": config.train.precision if "train.precision" in keys else "",
    }
    for small_degrees in scale.small_layouts(config, degrees):
        small_config = small(config, degrees, small_degrees, keys)
        model = small_config.model
        cell_name = name or requested
        if model == config.model and small_degrees == degrees:
            yield make(cell_name, small_config, **settings)
            continue
        label = scale.layout(small_config.parallel, small_degrees)
        count = _micro_batches(small_config, small_degrees)
        if small_degrees != degrees:
            cell_name = f"{cell_name} as {label}"
        note = (
            f"{requested}, {scale.ranks(degrees):,} ranks, {config.model.name}; as {label},"
            f" {scale.ranks(small_degrees)} ranks, {count} micro-batches; the model with"
            f" {model.layers} layers, {model.heads} heads, {model.kv_heads} key-value heads, hidden"
            f" {model.hidden}"
        )
        yield make(cell_name, small_config, note=note, **settings)


def _micro_batches(config: Config, degrees: scale.Degrees) -> int:
    """Returns the number of micro-batches of a replica."""
    micro_batch_size = config.parallel.micro_batch_size or 1
    samples = config.train.global_batch_samples or 0
    return samples // (micro_batch_size * degrees["dp"] * degrees["ep"])


def cells_of_entries(
    entries: Sequence[Entry], config_dir: str | Path | None
) -> Iterator[Cell | Verdict]:
    """Yields the cell of each entry of the matrix, or the planner's refusal."""
    from orchestrator.config.compose import load

    base = load(["cluster=local", "train.precision=fp32"], config_dir)
    for entry in entries:
        packed = entry.variation.packing == "packed"
        empty = entry.variation.masks == "empty"
        yield make(
            entry.name,
            config_of_entry(base, entry),
            packed=packed,
            empty=empty,
        )


def make(name: str, config: Config, note: str = "", **settings: Any) -> Cell | Verdict:
    """Returns the cell, or the planner's refusal. Raises OrchError for a model that is too large
    for one process."""
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


def config_of_entry(base: Config, entry: Entry) -> Config:
    """Returns the configuration of an entry of the matrix."""
    model = structs.replace(
        base.model,
        name=entry.variation.model,
        **entry.model,
    )
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
    optim = structs.replace(base.optim, warmup_steps=0, **entry.optim)
    cluster = few_nodes(base.cluster, entry.processes, entry.nodes)
    config = structs.replace(
        base,
        cluster=cluster,
        model=model,
        parallel=parallel,
        train=train,
        optim=optim,
    )
    return _with_budget(config) if entry.recompute == "budget" else config


def _with_budget(config: Config) -> Config:
    from orchestrator.planner.build import build_plan

    stored = structs.replace(config, train=structs.replace(config.train, recompute="none"))
    plan = build_plan(stored, build_cluster(stored.cluster))
    budget = BUDGET_SHARE * plan.memory.activations / GIB
    return structs.replace(config, train=structs.replace(config.train, recompute_budget_gib=budget))


def small(
    config: Config,
    degrees: scale.Degrees,
    small_degrees: scale.Degrees,
    keys: set[str],
) -> Config:
    """Returns the job at small degrees, with a batch that one process computes in a second. The
    `keys` that the user has set are kept if the layout is unchanged. Raises OrchError."""
    fits = small_degrees == degrees
    named = any(key.split(".")[0] in ("model", "experiment") for key in keys)
    own_batch = bool(keys & {"train.global_batch_samples", "train.global_batch_tokens"})
    chosen = own_batch or "experiment" in keys
    micro_batches = scale.micro_batches(config, degrees, small_degrees, chosen)
    tp_pieces = _tensor_pieces(config, degrees)
    layers_before = config.model.layers
    config = scale.scaled(config, degrees, small_degrees, named)
    cluster = _small_cluster(config, small_degrees)
    par = structs.replace(config.parallel, allow_tp_across_nvlink=True, tp_pieces=tp_pieces)
    train = _judged_train(config.train, keys, config.model.layers, layers_before)
    if not fits:
        par = structs.replace(par, order=None)
    if not fits or "train.seq_len" not in keys:
        multiple = 2 * small_degrees["cp"] * small_degrees["tp"]
        train = structs.replace(train, seq_len=multiple * ceil(SEQ_LEN / multiple))
    if not fits or not own_batch:
        size = min(par.micro_batch_size or 1, MOST_SAMPLES)
        par = structs.replace(par, micro_batch_size=size)
        samples = size * _batch_micro_batches(par, small_degrees, micro_batches)
        train = structs.replace(train, global_batch_samples=samples, global_batch_tokens=None)
    # The full learning rate in both steps: weights that hardly change prove little.
    optim = structs.replace(config.optim, warmup_steps=0)
    config = structs.replace(
        config,
        cluster=cluster,
        nodes=None,
        parallel=par,
        train=train,
        optim=optim,
    )
    budget = train.recompute == "budget" and "train.recompute_budget_gib" not in keys
    return _with_budget(config) if budget else config


def _tensor_pieces(config: Config, degrees: scale.Degrees) -> int | None:
    """Returns the given pieces of tensor parallelism, or those that the planner chooses for the
    layout at its real size."""
    par = config.parallel
    if par.tp_pieces is not None or config.cluster.device == "cpu":
        return par.tp_pieces
    tokens = (par.micro_batch_size or 1) * config.train.seq_len // degrees["cp"]
    return suited_pieces(degrees["tp"], tokens, config.model.hidden)


def _batch_micro_batches(
    par: ParallelSpec,
    degrees: scale.Degrees,
    micro_batches: int,
) -> int:
    """Returns the number of micro-batches of all replicas; of uneven replicas, only the first takes
    all `micro_batches`."""
    replicas = degrees["dp"] * degrees["ep"]
    if par.uneven and replicas > 1 and micro_batches > 1:
        return replicas * (micro_batches - 1) + 1
    return replicas * micro_batches


def _small_cluster(config: Config, small_degrees: scale.Degrees) -> ClusterSpec:
    """Returns a cluster with a GPU for each rank: one node, or two for hierarchical all-to-alls,
    whose arithmetic depends on NVLink domains. Products in 8 bits are those of a CPU, which has all
    of them."""
    ranks = scale.ranks(small_degrees)
    by_domain = config.parallel.expert_all_to_all == "hierarchical" and ranks % 2 == 0
    cluster = few_nodes(config.cluster, ranks, 2 if by_domain else 1)
    return structs.replace(cluster, device="cpu") if config.train.matmul else cluster


def _judged_train(train: TrainSpec, keys: set[str], layers: int, before: int) -> TrainSpec:
    """Returns the training settings of a comparison: fp32 unless the user sets a precision (both
    fp64 and fp32 are compared), clipped gradients, no batch ramp, which only changes the number of
    samples, and wide linears of the layers that remain of `before`."""
    if "train.precision" not in keys:
        train = structs.replace(train, precision="fp32", grad_dtype="fp32")
    clip = train.clip_grad_norm if "train.clip_grad_norm" in keys else CLIP
    wide = in_fewer_layers(train.matmul_wide, layers, before)
    return structs.replace(
        train,
        batch_ramp=None,
        clip_grad_norm=clip,
        matmul_wide=wide,
    )


def few_nodes(cluster: ClusterSpec, gpus: int, nodes: int = 1) -> ClusterSpec:
    """Returns the same hardware as one node of `gpus`: verification judges the arithmetic, not the
    placement. Layouts whose arithmetic depends on NVLink domains get several nodes, each a
    domain."""
    return structs.replace(
        cluster,
        nodes=nodes,
        gpus_per_node=gpus // nodes,
        nvlink=structs.replace(cluster.nvlink, domain_nodes=1),
        nic=structs.replace(cluster.nic, per_node=1, rails=1),
        levels=[structs.replace(cluster.levels[0], nodes_per_switch=nodes)],
    )
