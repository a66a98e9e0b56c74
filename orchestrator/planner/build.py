"""Turns a configuration and a resolved cluster into a sealed plan.

It holds the one function of the planner that the rest of orch calls. Pure.
"""

from __future__ import annotations

from msgspec import UNSET, structs

from orchestrator.config.schema import Config
from orchestrator.cost.context import CostContext
from orchestrator.cost.memory import rank_memory as memory
from orchestrator.cost.memory.recipe import Recipe, recipe_of
from orchestrator.cost.memory.recompute import resolve_recompute
from orchestrator.cost.model.layers import resolve
from orchestrator.cost.nesting import axis_placement
from orchestrator.cost.of_plan import jacobian
from orchestrator.cost.profile import Profile, differing, relative_sd
from orchestrator.cost.workload import Workload
from orchestrator.errors import OrchError
from orchestrator.plan import SCHEMA, Exit, Plan, hierarchy, seal
from orchestrator.plan.document import Certificate, Cluster, Job, Memory
from orchestrator.plan.flops import model_flops_per_token
from orchestrator.plan.ranks import coords, degrees, nested_groups
from orchestrator.plan.supported import Case
from orchestrator.planner import advice, legality
from orchestrator.planner.placement.best_order import Solution, solve
from orchestrator.planner.placement.node_placement import (
    certified,
    cluster_to_fill,
    make_context,
    place_job,
)
from orchestrator.planner.placement.rank_assignment import assign_ranks

from .degrees import make_case, make_parallel
from .job import make_job

GIB = 1 << 30


def build_plan(
    config: Config,
    cluster: Cluster,
    any_layout: bool = False,
    profile: Profile | None = None,
) -> Plan:
    """Returns the plan of a job, sealed with its hash.

    The degrees are checked, the ranks placed, and memory and time predicted. `cluster` is the
    cluster that `config.cluster` was resolved to (`orchestrator.cluster.resolve`). `any_layout` is
    for a program of the user's own: parallel=auto may then choose layouts that the bundled trainer
    does not run, without a warning. `profile` holds parameters of the cost model; None takes those
    that orch ships.

    Raises OrchError (65) with one line if the cluster, the model or the degrees contradict each
    other.
    """
    searched = None
    if config.parallel.auto:
        # Imported here because the search takes longer to import than a plan takes to make.
        from orchestrator.planner.search.auto import resolve_auto

        config, searched = resolve_auto(config, cluster, any_layout, profile)
    model = resolve(config.model)
    job = make_job(config)
    case = make_case(config, cluster_to_fill(config, cluster), model)
    legality.check(case)
    shape = make_parallel(config, case)
    recipe = recipe_of(config.cost.software, config.optim)
    budget = config.train.recompute_budget_gib
    train = resolve_recompute(
        Workload(model, shape, job.train, isolated=job.data.isolate_documents),
        cluster,
        budget,
        recipe,
        job.matmul,
    )
    job = structs.replace(job, train=train)
    path_cache = searched.path_cache if searched else None
    whole_cluster = make_context(config, cluster, profile, path_cache).training(train)
    shape = whole_cluster.completed(shape)
    # The order of imported nodes has no meaning.
    imported = config.cluster.topology_file is not None
    context, certificate = place_job(whole_cluster, shape, config.parallel.order, move=imported)
    solution = solve(context, shape, config.parallel.order)
    inside_nvlink = None
    if solution.best.outside_nvlink("tp"):
        _check_allowed(case, solution)
        inside_nvlink = _inside_nvlink(config, case, whole_cluster)
    plan = _plan_of(context, job, recipe, solution, certificate)
    if problem := hierarchy.problem(plan):
        raise OrchError(f"parallel: {problem}", Exit.CONFIG)
    return seal(structs.replace(plan, warnings=advice.warnings(plan, inside_nvlink, any_layout)))


def _check_allowed(case: Case, solution: Solution) -> None:
    """Raises OrchError (65) unless tensor-parallel groups may leave NVLink.

    Only an explicit order takes them out where they must stay; the rules refuse everything else.
    """
    if case.allow_tp_across_nvlink:
        return
    parallel = solution.parallel
    raise OrchError(
        f"parallel.order={parallel.order} puts tp={parallel.tp} groups across"
        f" {solution.best.worst_level('tp')}; put tp first, or set"
        " parallel.allow_tp_across_nvlink=true to see what it costs",
        Exit.CONFIG,
    )


def _plan_of(
    context: CostContext,
    job: Job,
    recipe: Recipe,
    solution: Solution,
    certificate: Certificate,
) -> Plan:
    """Returns the plan of a placed job, without its warnings and its hash.

    Raises OrchError (65) if the described hosts have no room for the offloaded data.
    """
    parallel, best, traffic, time = solution
    model = context.model
    cluster = context.cluster
    train = job.train
    sd = relative_sd(jacobian(context, best, parallel, train), context.profile)
    coordinates = coords(parallel.order, degrees(parallel))
    per_gpu = parallel.global_batch_tokens / time.step_s / parallel.world_size
    peak = cluster.gpu.peak_flops[train.precision]
    accounts = memory.memory_by_pp_rank(
        context.workload(parallel, train),
        cluster,
        recipe,
        job.matmul,
    )
    worst = max(accounts, key=lambda account: account.total)
    worst_rank = next(
        rank for rank, coord in enumerate(coordinates) if coord["pp"] == worst.worst_rank
    )
    check_host(cluster, worst)
    return Plan(
        schema=SCHEMA,
        hash="",
        cluster=cluster,
        model=model,
        parallel=parallel,
        job=job,
        ranks=assign_ranks(cluster, coordinates),
        groups=nested_groups(parallel.order, degrees(parallel)),
        placement=axis_placement(best, traffic),
        memory=structs.replace(worst, worst_rank=worst_rank),
        time=structs.replace(
            time,
            sd=sd,
            parameters=differing(context.profile),
        ),
        mfu=per_gpu * model_flops_per_token(model, train.seq_len) / peak,
        tokens_per_s_per_gpu=per_gpu,
        warnings=[],
        certificate=certified(certificate, time.step_s),
    )


def check_host(cluster: Cluster, memory: Memory) -> None:
    """Raises OrchError (65) if the described hosts have no room for the offloaded data."""
    if cluster.host is UNSET:
        return
    ranks = cluster.gpus_per_node
    host = cluster.host
    for key, need, have, change in (
        (
            "memory_gib",
            memory.host,
            host.memory_bytes,
            "raise dp with zero1, or train.offload=disk",
        ),
        ("disk_gib", memory.disk, host.disk_bytes, "raise dp with zero1, or a larger disk"),
    ):
        if ranks * need > have:
            raise OrchError(
                f"what is offloaded needs {ranks * need / GIB:.1f} GiB on each node, which has"
                f" cluster.host.{key}={have / GIB:.1f}: {change}",
                Exit.CONFIG,
            )


def _inside_nvlink(
    config: Config,
    case: Case,
    context: CostContext,
) -> tuple[str, float] | None:
    """Returns the nearest degrees that keep tensor parallelism inside NVLink, or None.

    The result is (parallelism spec, step seconds). Degrees with the same tp x pp come first,
    because they need about as much memory.
    """
    legal = legality.nearest_legal(structs.replace(case, allow_tp_across_nvlink=False), limit=100)
    if not legal:
        return None
    near = min(
        legal,
        key=lambda legal_case: (
            legal_case.tp * legal_case.pp != case.tp * case.pp,
            legal.index(legal_case),
        ),
    )
    free = structs.replace(
        config,
        parallel=structs.replace(config.parallel, order=None, stage_layers=None),
    )
    return near.spec, solve(context, context.completed(make_parallel(free, near))).time.step_s
