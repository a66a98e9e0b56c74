"""Plans a user's own program: its ranks, groups and placement.

Nobody knows what such a program computes, so there is no memory, time or rate. The axes that the
user names nest in the order tp < cp < ep < pp < dp (or `parallel.order`), the innermost on the
fastest links. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan import SCHEMA, Exit, Plan, seal
from orchestrator.plan import document as doc
from orchestrator.plan.domains import domains_of
from orchestrator.plan.ranks import coords, degrees, nested_groups
from orchestrator.planner.placement.rank_assignment import assign_ranks

#: Keys of `parallel` that describe how a model is computed: they mean nothing without a model.
#: Other keys (zero, vpp, sp) are put into the plan, where the program can read them.
_OF_A_MODEL = (
    "schedule",
    "schedule_file",
    "cp_method",
    "etp",
    "expert_all_to_all",
    "micro_batch_size",
    "stage_layers",
)


def plan_program(config: Config, cluster: doc.Cluster) -> Plan:
    """Returns the plan of a program on `cluster`.

    It has as many ranks as `nproc` or the degrees give, else one per GPU. Raises OrchError (65) for
    more ranks than GPUs, for ranks that are not a multiple of the named axes, and for keys that
    need a model.
    """
    parallel = _parallel(config, cluster)
    checkpoint = config.checkpoint
    metrics = config.metrics
    job = doc.Job(
        checkpoint=doc.Checkpoint(
            dir=checkpoint.dir or "",
            every_steps=0,
            keep_last=checkpoint.keep_last,
        ),
        metrics=doc.Metrics(
            **{name: getattr(metrics, name) for name in doc.Metrics.__struct_fields__}
        ),
    )
    # The order of imported nodes has no meaning.
    compact = config.cluster.topology_file is not None
    return _sealed(_first_nodes(cluster, parallel) if compact else cluster, parallel, job)


def place_program(plan: Plan, cluster: doc.Cluster) -> Plan:
    """Places the same program on other nodes, in their order, and seals the plan.

    Raises OrchError (76) if there are too few nodes.
    """
    gpus = len(cluster.node_names) * cluster.gpus_per_node
    world = plan.parallel.world_size
    if world > gpus or cluster.gpus_per_node != plan.cluster.gpus_per_node:
        raise OrchError(
            f"the program has {world} ranks, {plan.cluster.gpus_per_node} per node; given:"
            f" {len(cluster.node_names)} nodes of {cluster.gpus_per_node}",
            Exit.CAPACITY,
        )
    return _sealed(cluster, plan.parallel, plan.job)


def _parallel(config: Config, cluster: doc.Cluster) -> doc.Parallel:
    """Returns the plan's `parallel` of a program. Raises OrchError (65)."""
    par = config.parallel
    gpus = len(cluster.node_names) * cluster.gpus_per_node
    if par.auto:
        raise OrchError(
            "parallel=auto needs a model to search for: add model=, or name the axes", Exit.CONFIG
        )
    for name in _OF_A_MODEL:
        if getattr(par, name) is not None:
            raise OrchError(
                f"parallel.{name} means nothing without a model: add model=, or leave it out",
                Exit.CONFIG,
            )
    inner: dict[str, Any] = {axis: getattr(par, axis) or 1 for axis in ("tp", "cp", "ep", "pp")}
    group = prod(inner.values())
    held = domains_of(cluster).filled(**inner, across=par.allow_tp_across_nvlink)
    world = config.nproc or (group * par.dp if par.dp else held)
    dp, rest = divmod(world, group)
    if rest or not dp:
        axes = " x ".join(f"{axis} {size}" for axis, size in inner.items() if size > 1)
        raise OrchError(f"{world} ranks are not a multiple of {axes} = {group}", Exit.CONFIG)
    if par.dp not in (None, dp):
        raise OrchError(
            f"nproc={world} is not what parallel gives: {group * (par.dp or 1)} ranks", Exit.CONFIG
        )
    if world > gpus:
        have = f"{len(cluster.node_names)} nodes x {cluster.gpus_per_node} = {gpus}"
        raise OrchError(
            f"{world} ranks need more than cluster {cluster.name} has ({have}); cluster.nodes= and"
            " cluster.gpus_per_node= describe another",
            Exit.CONFIG,
        )
    # The schema has no other values.
    zero: Literal[0, 1, 2, 3] = par.zero or 0  # type: ignore[assignment]
    return doc.Parallel(
        **inner,
        dp=dp,
        zero=zero,
        vpp=par.vpp or 1,
        sp=bool(par.sp),
        world_size=world,
        order=list(par.order or doc.AXES),
        schedule="",
        stage_layers=[],
        micro_batch_size=0,
        micro_batches=0,
        accumulation=0,
        global_batch_samples=0,
        global_batch_tokens=0,
        bucket_bytes=0,
    )


def _sealed(cluster: doc.Cluster, parallel: doc.Parallel, job: doc.Job) -> Plan:
    """Returns the sealed plan of a program with its ranks, groups and placement."""
    ranks = assign_ranks(cluster, coords(parallel.order, degrees(parallel)))
    groups = nested_groups(parallel.order, degrees(parallel))
    placement: dict[str, doc.AxisPlacement] = {
        axis: doc.AxisPlacement(
            worst_level=_worst(cluster, groups[axis]), bytes_per_step_by_level={}
        )
        for axis in doc.AXES
    }
    plan = Plan(
        schema=SCHEMA,
        hash="",
        cluster=cluster,
        parallel=parallel,
        job=job,
        ranks=ranks,
        groups=groups,
        placement=placement,
        warnings=[],
        certificate=None,
        program=True,
    )
    crossing = plan.placement["tp"].worst_level
    if crossing not in ("self", "nvlink"):
        warning = f"tensor-parallel groups cross {crossing}: slower than inside a node"
        plan = structs.replace(plan, warnings=[warning])
    return seal(plan)


def _worst(cluster: doc.Cluster, groups: Sequence[Sequence[int]]) -> str:
    """Returns the outermost tier that a group of ranks must cross.

    That is "self", "nvlink" or the name of a switch level.
    """
    if len(groups[0]) == 1:
        return "self"
    tiers = [
        ("nvlink", cluster.nvlink_domains),
        *((level.name, level.switches) for level in cluster.levels),
    ]
    spread = [{rank // cluster.gpus_per_node for rank in group} for group in groups]
    for name, blocks in tiers:
        block_of = {node: index for index, block in enumerate(blocks) for node in block}
        spread = [nodes for nodes in spread if len({block_of[node] for node in nodes}) > 1]
        if not spread:
            return name
    return cluster.levels[-1].name


def _first_nodes(cluster: doc.Cluster, parallel: doc.Parallel) -> doc.Cluster:
    """Returns the cluster with the nodes of the ranks first and spares last.

    The nodes are packed under as few switches as possible.
    """
    from orchestrator.planner.placement.node_placement import reorder

    need = -(-parallel.world_size // cluster.gpus_per_node)
    chosen = list(range(len(cluster.node_names)))
    # From the outermost level inwards, keep the smallest switch that holds all ranks.
    for level in reversed(cluster.levels):
        inside = [[node for node in switch if node in set(chosen)] for switch in level.switches]
        chosen = min(
            (nodes for nodes in inside if len(nodes) >= need),
            key=len,
            default=chosen,
        )
    by_switch = {
        node: index for index, switch in enumerate(cluster.levels[0].switches) for node in switch
    }
    size = {
        index: sum(by_switch[node] == index for node in chosen) for index in set(by_switch.values())
    }
    chosen.sort(key=lambda node: (-size[by_switch[node]], by_switch[node], node))
    return reorder(cluster, chosen[:need])
