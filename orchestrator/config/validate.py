"""Checks rules between several fields, and fills in derived ones."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from orchestrator.errors import did_you_mean
from orchestrator.plan.batch import nearest_divisors
from orchestrator.plan.document import AXES
from orchestrator.plan.layer import KINDS
from orchestrator.plan.worker import PRINTED

from .node_range import canonical
from .schema import LIVE, ClusterSpec, Config, ModelSpec, ParallelSpec, TrainSpec

if TYPE_CHECKING:
    from .config_errors import Origin


def validate(config: Config, origin: Origin) -> Config:
    """Returns the config with `run.name` filled in. Raises OrchError with the rule that is
    broken."""
    train = config.train
    if (train.global_batch_samples is None) == (train.global_batch_tokens is None):
        both = "both are" if train.global_batch_tokens is not None else "neither is"
        raise origin.error(
            "train.global_batch_samples",
            f"set it or train.global_batch_tokens, exactly one; {both} set",
        )
    if train.global_batch_tokens is not None and train.global_batch_tokens % train.seq_len:
        near = max(1, round(train.global_batch_tokens / train.seq_len)) * train.seq_len
        raise origin.error(
            "train.global_batch_tokens",
            f"must be a multiple of train.seq_len {train.seq_len}; the nearest is {near}",
        )
    order = config.parallel.order
    if order is not None and sorted(order) != sorted(AXES):
        raise origin.error(
            "parallel.order", f"must name each of {', '.join(AXES)} once, innermost first"
        )
    if not config.cluster.gpu.peak_tflops:
        raise origin.error("cluster.gpu.peak_tflops", "needs the rate of at least one precision")
    if not config.cluster.levels:
        raise origin.error("cluster.levels", "needs at least one level, innermost first")
    _check_parts(config.model, origin)
    _check_pattern(config.metrics.pattern, origin)
    if config.nodes is not None:
        config = msgspec.structs.replace(config, nodes=canonical(config.nodes))
    config = msgspec.structs.replace(config, cluster=_with_topology_nodes(config.cluster, origin))
    config = msgspec.structs.replace(
        config, parallel=with_defaults(config.parallel), train=_with_recompute(config)
    )
    if config.run.name is not None:
        return config
    run = msgspec.structs.replace(config.run, name=default_name(config))
    return msgspec.structs.replace(config, run=run)


def _with_topology_nodes(cluster: ClusterSpec, origin: Origin) -> ClusterSpec:
    """Returns the cluster with the number of nodes to take from its topology file: `cluster.nodes`,
    if that was typed.

    A shipped number describes the shipped cluster, not the file's. Raises OrchError for a key
    without its file.
    """
    file = cluster.topology_file
    has_file = file is not None and not file.startswith(LIVE)
    for key in ("topology_name", "topology_nodes"):
        if getattr(cluster, key) not in (None, msgspec.UNSET) and not has_file:
            hint = "; cluster.nodes says how many" if key == "topology_nodes" else ""
            raise origin.error(
                f"cluster.{key}", f"needs a file that cluster.topology_file names{hint}"
            )
    typed_keys = {override.key for override in origin.overrides if not override.group}
    is_typed = "cluster.nodes" in typed_keys
    if not is_typed or not has_file or cluster.topology_nodes is not msgspec.UNSET:
        return cluster
    return msgspec.structs.replace(cluster, topology_nodes=cluster.nodes)


def _check_parts(model: ModelSpec, origin: Origin) -> None:
    """Raises OrchError for experts, latent attention, stretched positions or further predictions
    that cannot work."""
    may_be_zero = [
        "shared_ffn_hidden",
        "first_dense_layers",
        "q_lora_rank",
        "mscale_all_dim",
        "balance_loss",
        "z_loss",
    ]
    may_be_zero += ["depth", "weight", "bias_update", "jitter"]
    for group in ("moe", "mla", "yarn", "mtp"):
        spec = getattr(model, group)
        for name, value in msgspec.structs.asdict(spec).items() if spec else ():
            zero = "0 or " if name in may_be_zero else ""
            if isinstance(value, int | float) and not (
                value > 0 or (value == 0 and name in may_be_zero)
            ):
                raise origin.error(f"model.{group}.{name}", f"must be {zero}positive, not {value}")
    if model.block is not None and model.block not in KINDS:
        problem = f"{model.block!r} is not a kind of layer; {did_you_mean(model.block, KINDS)}"
        raise origin.error("model.block", problem)
    if (moe := model.moe) is None:
        return
    if moe.jitter is not None and moe.jitter >= 1:
        raise origin.error(
            "model.moe.jitter", f"must be below 1, not {moe.jitter}; Switch takes 0.01"
        )
    if moe.top_k > moe.experts:
        problem = f"{moe.top_k} is more than the {moe.experts} experts; legal: up to that"
        raise origin.error("model.moe.top_k", problem)
    if moe.first_dense_layers >= model.layers:
        problem = (
            f"leaves no layer for the experts: the model has {model.layers}; legal: 0 to"
            f" {model.layers - 1}"
        )
        raise origin.error("model.moe.first_dense_layers", problem)
    if moe.experts % moe.groups:
        legal = " or ".join(map(str, nearest_divisors(moe.experts, moe.groups)))
        problem = f"{moe.groups} groups do not divide {moe.experts} experts; nearest: {legal}"
        raise origin.error("model.moe.groups", problem)
    if moe.top_groups > moe.groups:
        problem = f"{moe.top_groups} is more than the {moe.groups} groups; legal: up to that"
        raise origin.error("model.moe.top_groups", problem)
    eligible = moe.experts // moe.groups * moe.top_groups
    if moe.top_k > eligible:
        choices = f"the {eligible} experts of {moe.top_groups} groups"
        problem = f"{moe.top_k} is more than {choices}; legal: up to that"
        raise origin.error("model.moe.top_k", problem)


def _check_pattern(pattern: str | None, origin: Origin) -> None:
    """Raises OrchError for a pattern that is not a regular expression, or has no group for the
    step."""
    if pattern is None:
        return
    try:
        groups = re.compile(pattern).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        raise origin.error("metrics.pattern", f"is not a regular expression: {error}") from None
    if "step" not in groups:
        raise origin.error(
            "metrics.pattern", r"needs a group for the step, as in step (?P<step>\d+)"
        )
    if unknown := next((name for name in groups if name not in PRINTED), None):
        raise origin.error(
            "metrics.pattern", f"has an unknown group {unknown!r}; {did_you_mean(unknown, PRINTED)}"
        )


def with_defaults(parallel: ParallelSpec) -> ParallelSpec:
    """Fills in the degrees that nobody set, unless they are to be searched: 1, and no ZeRO."""
    if parallel.auto:
        return parallel
    degrees = {
        name: 1 for name in ("tp", "cp", "ep", "pp", "vpp") if getattr(parallel, name) is None
    }
    return msgspec.structs.replace(parallel, **degrees, zero=parallel.zero or 0)


def _with_recompute(config: Config) -> TrainSpec:
    """Returns `train` with `recompute` filled in, unless the planner searches it."""
    if config.train.recompute is not None or config.parallel.auto:
        return config.train
    return msgspec.structs.replace(config.train, recompute="none")


def default_name(config: Config) -> str:
    """Returns `<model>-<parallel choice>` within the rule for run names."""
    stem = f"{config.model.name}-{config.choices.get('parallel', 'custom')}".lower()
    return re.sub(r"[^a-z0-9]+", "-", stem)[:40].strip("-") or "run"
