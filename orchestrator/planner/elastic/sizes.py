"""Elastic world sizes: the numbers of nodes in `nodes=A..B` that a job can run on, and their plans.

Sizes differ in data parallelism and accumulation, never in the global batch. So every size computes
the same steps and continues the checkpoints of the others. For each size, three layouts are tried
in this order (reliability.md 4):

- equal replicas, with another micro-batch size if the job leaves that open;
- replicas that take unequal numbers of micro-batches, if this is faster than the next smaller
  size with the remaining nodes as spares;
- another pipeline depth, for fewer nodes than any of these.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from math import prod
from typing import NamedTuple

import msgspec
from msgspec import structs

from orchestrator.cache import cached, code, content
from orchestrator.config.node_range import node_range
from orchestrator.config.schema import LIVE, ClusterSpec, Config
from orchestrator.cost.profile import SHIPPED_FILE, Profile
from orchestrator.errors import OrchError
from orchestrator.plan import Exit, Plan, from_json
from orchestrator.plan.batch import taken
from orchestrator.plan.document import Cluster
from orchestrator.plan.domains import domains_of

#: Rooms whose code decides what a plan contains: a change in one of them invalidates cached plans.
ROOMS_OF_A_PLAN = ("config", "plan", "cluster", "cost", "planner")

# Resolves a cluster entry, with the nodes of one size, to the cluster of that size.
Resolve = Callable[[ClusterSpec], Cluster]


class Size(NamedTuple):
    """One legal size. `config` is the job's configuration with exactly these nodes."""

    nodes: int
    config: Config
    plan: Plan


class Sizes(NamedTuple):
    """The legal sizes of a job, and the reasons that exclude the others."""

    legal: list[Size]  # largest first; never empty
    refused: dict[int, str]  # node count -> the reason, largest first


class _Site(NamedTuple):
    """The inputs that the plans of all sizes share."""

    resolve: Resolve
    profile: Profile | None
    any_memory: bool  # sizes whose plan does not fit the memory are legal too


def plan_of(
    config: Config,
    cluster: Cluster,
    any_layout: bool = False,
    profile: Profile | None = None,
) -> Plan:
    """Returns the plan that `build_plan` makes, from the cache if it was made before.

    A cached plan is read without importing numpy. Raises OrchError (65) as `build_plan` does.
    """

    def compute() -> Plan:
        """Makes the plan."""
        from orchestrator.planner import build

        return build.build_plan(config, cluster, any_layout, profile)

    # msgspec.json keeps the planner's order of keys, which pages follow; to_json would sort them.
    inputs = _inputs(config, cluster, any_layout, profile)
    plan: Plan = cached("plan", inputs, compute, msgspec.json.encode, from_json)
    return plan


def _inputs(
    config: Config,
    cluster: Cluster,
    any_layout: bool,
    profile: Profile | None,
) -> Iterator[bytes]:
    """Yields everything that a plan depends on: its arguments, the files behind them, and code."""
    yield msgspec.json.encode(config)
    yield msgspec.json.encode(cluster)
    yield b"any" if any_layout else b""
    yield content(SHIPPED_FILE)
    yield profile.digest.encode() if profile else b""
    if (file := config.parallel.schedule_file) is not None:
        yield content(file)
    yield from code(*ROOMS_OF_A_PLAN)
    yield msgspec.__version__.encode()
    if (numpy := PathFinder.find_spec("numpy")) and numpy.origin:
        status = os.stat(numpy.origin)
        yield f"numpy {status.st_size} {status.st_mtime_ns}".encode()


def plan_sizes(
    config: Config,
    resolve: Resolve,
    any_memory: bool = False,
    any_layout: bool = False,
    profile: Profile | None = None,
    program: bool = False,
) -> Sizes:
    """Returns every legal size of `config.nodes`, largest first.

    Without a range, that is the one plan of the cluster. `any_memory` also accepts sizes whose plan
    does not fit the memory. `any_layout` is for a program of the user's own (`build_plan`).
    `profile` applies to all sizes, as in `build_plan`. `program` is true if that program has no
    model.

    Raises OrchError (65) with the problem of the largest size if no size is legal, and OrchError
    (64) if the range contradicts another key.
    """
    if program:
        return _program_sizes(config, resolve)
    if config.nproc is not None:
        reason = (
            f"nproc={config.nproc} is for a program of your own, without a model: orch submit"
            " nproc=N -- program"
        )
        raise OrchError(reason, Exit.USAGE)
    if config.nodes is None:
        plan = plan_of(config, resolve(config.cluster), any_layout, profile)
        return Sizes([Size(config.cluster.nodes, config, plan)], {})
    first, last = node_range(config.nodes)
    _check_range(config)
    # All sizes share one layout: a checkpoint of one layout would be of no use to another.
    if config.parallel.auto:
        from orchestrator.planner.search.auto import settled

        largest = _at(config, last)
        config = _with_layout(
            config,
            settled(largest, resolve(largest.cluster), any_layout, profile),
        )
    site = _Site(resolve, profile, any_memory)
    legal, refused = _data_parallel_sizes(config, site, first, last)
    if not legal:
        raise OrchError(
            f"nodes={config.nodes}: no legal size; with {last}: {refused[last]}", Exit.CONFIG
        )
    for nodes in range(first, min(legal)):
        repiped = _other_pipeline(config, site, nodes)
        if repiped is not None and repiped.nodes == nodes:
            legal[nodes] = repiped
            del refused[nodes]
    return Sizes(
        [legal[nodes] for nodes in sorted(legal, reverse=True)],
        dict(sorted(refused.items(), reverse=True)),
    )


def _check_range(config: Config) -> None:
    """Raises OrchError (64) if another key contradicts the range of nodes."""
    if config.parallel.dp is not None:
        raise OrchError(
            f"nodes={config.nodes} changes dp with the size: leave dp={config.parallel.dp} out",
            Exit.USAGE,
        )
    if config.train.batch_ramp is not None:
        reason = (
            "a ramp grows in whole micro-batches on every replica, so each size would make steps of"
            " its own"
        )
        raise OrchError(
            f"nodes={config.nodes} with train.batch_ramp: {reason}; leave one of them out",
            Exit.USAGE,
        )
    file = config.cluster.topology_file
    if file is not None and not file.startswith(LIVE):
        raise OrchError(
            f"nodes={config.nodes}: cluster.topology_file={file} says which nodes there are",
            Exit.USAGE,
        )


def _data_parallel_sizes(
    config: Config,
    site: _Site,
    first: int,
    last: int,
) -> tuple[dict[int, Size], dict[int, str]]:
    """Plans `first` to `last` nodes, which differ only in data parallelism and micro-batches.

    Returns (node count -> its legal size, node count -> the reason that excludes it).
    """
    legal: dict[int, Size] = {}
    refused: dict[int, str] = {}
    for nodes in range(first, last + 1):
        try:
            smaller = legal[max(legal)] if legal else None
            size = _replicas(config, site, nodes, smaller)
            # Several clusters may hold a size: the largest one is taken, because it has the most
            # spares.
            if size.nodes >= first:
                legal[size.nodes] = size
                refused.pop(size.nodes, None)
            if size.nodes < nodes:
                refused[nodes] = (
                    f"groups that stay in their NVLink domain use {size.nodes} of these nodes"
                )
        except OrchError as error:
            refused[nodes] = error.message
    return legal, refused


def _program_sizes(config: Config, resolve: Resolve) -> Sizes:
    """Returns the legal sizes of a program without a model, as `plan_sizes` does."""
    from orchestrator.planner.program import plan_program

    if config.nodes is None:
        plan = plan_program(config, resolve(config.cluster))
        return Sizes([Size(config.cluster.nodes, config, plan)], {})
    first, last = node_range(config.nodes)
    if config.nproc is not None or config.parallel.dp is not None:
        raise OrchError(
            f"nodes={config.nodes} changes the ranks with the size: leave nproc and dp out",
            Exit.USAGE,
        )
    _check_has(config, last)
    legal = []
    refused = {}
    for nodes in range(last, first - 1, -1):
        sized_config = _at(config, nodes)
        try:
            cluster = resolve(sized_config.cluster)
            plan = plan_program(sized_config, cluster)
            used = -(-plan.parallel.world_size // cluster.gpus_per_node)
            if used == nodes:
                legal.append(Size(nodes, sized_config, plan))
            else:
                refused[nodes] = (
                    f"groups that stay in their NVLink domain use {used} of these nodes"
                )
        except OrchError as error:
            refused[nodes] = error.message
    if not legal:
        raise OrchError(
            f"nodes={config.nodes}: no legal size; with {last}: {refused[last]}", Exit.CONFIG
        )
    return Sizes(legal, refused)


def _at(config: Config, nodes: int) -> Config:
    """Returns the configuration with exactly `nodes` nodes.

    If the switches are ragged, these are the first nodes of the cluster.
    """
    levels = [
        structs.replace(level, nodes_per_switch=_cut(level.nodes_per_switch, nodes))
        for level in config.cluster.levels
    ]
    return structs.replace(
        config,
        nodes=None,
        cluster=structs.replace(config.cluster, nodes=nodes, levels=levels),
    )


def _cut(per_switch: int | list[int], nodes: int) -> int | list[int]:
    """Returns the nodes per switch of a cluster's first `nodes` nodes."""
    if isinstance(per_switch, int):
        return per_switch
    cut_switches: list[int] = []
    for size in per_switch:
        cut_switches.append(min(size, nodes - sum(cut_switches)))
    return [size for size in cut_switches if size]


def _with_layout(config: Config, settled_config: Config) -> Config:
    """Returns the configuration with the layout that the search settled on, and dp left open."""
    parallel = structs.replace(
        settled_config.parallel,
        dp=None,
        micro_batch_size=config.parallel.micro_batch_size,
    )
    return structs.replace(config, parallel=parallel, train=settled_config.train)


def _check_has(config: Config, nodes: int) -> None:
    """Raises OrchError (65) if `nodes` is more than a described cluster has."""
    if nodes > (have := config.cluster.nodes) and config.cluster.topology_file is None:
        message = (
            f"cluster {config.cluster.name} has {have} nodes; cluster.nodes={nodes} gives it more"
        )
        raise OrchError(message, Exit.CONFIG)


def _replicas(config: Config, site: _Site, nodes: int, smaller: Size | None) -> Size:
    """Returns the size with equal replicas, or with unequal ones if the batch needs that.

    Raises OrchError if unequal replicas would be no faster than the next smaller size.
    """
    # Imported here because it imports numpy, which a cached plan does not need.
    from orchestrator.planner.degrees import global_batch

    _check_has(config, nodes)
    par = config.parallel
    gpus = _filled(config, site.resolve(_at(config, nodes).cluster))
    ranks_per_replica = prod(getattr(par, axis) or 1 for axis in ("tp", "cp", "pp"))
    replicas = max(1, gpus // ranks_per_replica)
    if global_batch(config) % ((par.micro_batch_size or 1) * replicas) == 0:
        return _size(config, site, nodes)
    uneven = structs.replace(config, parallel=structs.replace(par, uneven=True))
    size = _size(uneven, site, nodes)
    if smaller is not None and size.plan.time.step_s >= smaller.plan.time.step_s:
        counts = " or ".join(map(str, sorted(set(taken(size.plan.parallel)))))
        reason = (
            f"replicas would take {counts} micro-batches, which is no faster than {smaller.nodes}"
            " nodes"
        )
        raise OrchError(reason, Exit.CONFIG)
    return size


def _other_pipeline(config: Config, site: _Site, nodes: int) -> Size | None:
    """Returns the fastest plan with another number of pipeline stages, or None if there is none.

    It serves sizes that cannot hold a whole replica of the job. The schedule stays if it is legal.
    `stage_layers` is dropped, because it was given for the job's own stages.
    """
    par = config.parallel
    candidates = []
    gpus = nodes * config.cluster.gpus_per_node
    stages, rest = divmod(
        gpus,
        prod(getattr(par, axis) or 1 for axis in ("tp", "cp", "ep")),
    )
    if rest or par.schedule_file is not None:
        return None
    for pp in range(1, min(stages, config.model.layers) + 1):
        if stages % pp or pp == (par.pp or 1):
            continue
        for vpp, schedule in dict.fromkeys([(par.vpp, par.schedule), (1, None)]):
            parallel = structs.replace(
                par,
                pp=pp,
                vpp=vpp,
                schedule=schedule,
                stage_layers=None,
            )
            repiped = structs.replace(config, parallel=parallel)
            try:
                candidates.append(_replicas(repiped, site, nodes, smaller=None))
            except OrchError:
                continue
            break
    return min(
        candidates,
        key=lambda size: (_over(size.plan), size.plan.time.step_s),
        default=None,
    )


def _size(config: Config, site: _Site, nodes: int) -> Size:
    """Plans one size. Raises OrchError (65) if replicas do not divide it or memory is too small."""
    par = config.parallel
    gpus = nodes * config.cluster.gpus_per_node
    replica = prod(getattr(par, axis) or 1 for axis in ("tp", "cp", "ep", "pp"))
    sized_config = _at(config, nodes)
    cluster = site.resolve(sized_config.cluster)
    if _filled(config, cluster) % replica:
        raise OrchError(
            f"{gpus} GPUs are not a multiple of a model replica of {replica}", Exit.CONFIG
        )
    plan = plan_of(sized_config, cluster, profile=site.profile)
    if _over(plan) and not (site.any_memory or config.run.allow_oom):
        usage = f"{plan.memory.total / 2**30:.1f} GiB of {plan.memory.capacity / 2**30:.1f} GiB"
        raise OrchError(f"rank {plan.memory.worst_rank} needs {usage}", Exit.CONFIG)
    return Size(
        -(-plan.parallel.world_size // cluster.gpus_per_node),
        sized_config,
        plan,
    )


def _filled(config: Config, cluster: Cluster) -> int:
    """Returns the number of GPUs of `cluster` that the job uses."""
    par = config.parallel
    model = (par.tp or 1, par.cp or 1, par.ep or 1, par.pp or 1)
    return domains_of(cluster).filled(*model, par.allow_tp_across_nvlink)


def _over(plan: Plan) -> bool:
    """Reports whether the fullest rank of a plan needs more memory than it has."""
    return plan.memory.total > plan.memory.capacity
