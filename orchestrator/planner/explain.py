"""Explains the cost of a plan, and the single changes that help most.

Each change is costed as a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType, structs

from orchestrator.config.schema import Config, ParallelSpec
from orchestrator.cost.buckets import BUCKETS, MIB, NUMBERS, PIECE, bucket_size
from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.cost.of_plan import ExpertLoad, expert_load
from orchestrator.cost.profile import with_values
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan import document as doc
from orchestrator.plan.batch import divisors
from orchestrator.plan.cluster import NVLINK, SELF
from orchestrator.plan.domains import domains_of
from orchestrator.plan.expert_mesh import expert_mesh, folds_cp, tensor_ranks
from orchestrator.plan.offload import comm_buffer_of
from orchestrator.plan.schedules import SCHEDULES, shards_layers
from orchestrator.plan.trained import refusal
from orchestrator.planner.search.costed_layout import CostedLayout
from orchestrator.planner.search.layout import CP_METHODS, RECOMPUTE_MODES, Layout, Mesh
from orchestrator.planner.search.search import Search

from .build import build_plan

CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers")
LEFT_OUT = (
    "tp",
    "cp",
    "ep",
    "etp",
    "fold_cp",
    "pp",
    "dp",
    "zero",
    "vpp",
    "sp",
    "cp_method",
    "schedule",
    "micro_batch_size",
    "order",
    "stage_layers",
)


class Term(NamedTuple):
    """One term of a step."""

    name: str
    seconds: float


class Change(NamedTuple):
    """A change of one key of a plan; dp takes the remaining GPUs."""

    overrides: list[str]  # overrides for the command line
    step_s: float
    memory: doc.Memory
    saves_s: float  # seconds per step that the change saves; negative if it is slower
    frees_bytes: int


class CostedChanges(NamedTuple):
    """The changes that improve a plan, among all that were costed."""

    better: list[Change]
    tried: int


class Explanation(NamedTuple):
    """The terms of a plan's step and memory, and the changes that improve it."""

    terms: list[Term]  # terms of the step, largest first
    experts: ExpertLoad | None  # the assumed load of the ranks that share experts
    limited_by: str
    over_bytes: int  # bytes that the fullest rank lacks; 0 if the plan fits
    categories: list[tuple[str, int]]  # categories of its memory, largest first
    buckets: str  # the size of gradient buckets and its reason; empty if nothing is summed in them
    context_bytes: int  # of the buffers: the device's context and NCCL's communicators
    changes: list[Change]  # changes that make it faster, or make it fit if it does not; best first
    tried: int
    warnings: list[str]
    not_counted: list[str]  # work of the job that the predicted time and memory leave out


def explain(
    config: Config,
    cluster: doc.Cluster,
    plan: Plan,
    limit: int = 3,
) -> Explanation:
    """Explains `plan`, which was made of `config` and `cluster` with nothing left open.

    At most `limit` changes are returned.
    """
    memory = plan.memory
    over = max(0, memory.total - memory.capacity)
    changes = list[Change]()
    tried = 0
    if plan.parallel.schedule in SCHEDULES and plan.job.train.recompute in RECOMPUTE_MODES:
        changes, tried = _layout_changes(config, cluster, plan)
    if over:
        changes += offered(config, cluster, plan)
    changes.sort(key=lambda change: (change.step_s, change.memory.total, change.overrides))
    categories = sorted(
        ((name, getattr(memory, name)) for name in CATEGORIES),
        key=lambda pair: -pair[1],
    )
    return Explanation(
        terms=terms(plan),
        experts=expert_load(plan),
        limited_by=plan.time.limited_by,
        over_bytes=over,
        categories=categories,
        buckets=bucket_choice(plan),
        context_bytes=memory.context,
        changes=changes[:limit],
        tried=tried,
        warnings=list(plan.warnings),
        not_counted=not_counted(plan),
    )


def _layout_changes(config: Config, cluster: doc.Cluster, plan: Plan) -> CostedChanges:
    """Costs every layout that differs from the plan's in one key.

    If the plan does not fit and no single change makes it fit, the fastest layout that does is the
    change.
    """
    over = plan.memory.total > plan.memory.capacity
    profile = with_values(plan.time.parameters)
    any_layout = refusal(plan) is not None

    def search_with(all_to_all: doc.AllToAll | UnsetType) -> Search:
        """Returns the search over all layouts with this exchange of expert tokens."""
        return Search(_opened(config, all_to_all), cluster, any_layout, profile)

    search = search_with(plan.parallel.expert_all_to_all)
    candidates = [(search, *neighbour) for neighbour in neighbours(plan)]
    for all_to_all in other_all_to_alls(plan):
        candidates.append((search_with(all_to_all), *_by(plan, all_to_all)))
    better = []
    for layout_search, overrides, layout in candidates:
        costed = layout_search.exact_costs.of_layout(layout)
        if costed is not None and (over or costed.step_s < plan.time.step_s):
            better.append(_change(overrides, costed, plan))
    if over and not better:
        better = [_change(best.overrides, best, plan) for best in search.run(near=0.0).front[:1]]
    return CostedChanges(better, len(candidates))


def bucket_choice(plan: Plan) -> str:
    """Returns the size of a plan's gradient buckets with its reason.

    It is empty if ranks sum no gradients over replicas, or whole layers (`shards_layers`).
    """
    parallel = plan.parallel
    replicas = parallel.cp * parallel.ep * parallel.dp
    if replicas == 1 or shards_layers(parallel) or not parallel.bucket_bytes:
        return ""
    train = plan.job.train
    width = DTYPE_BYTES[train.grad_dtype]
    chosen = bucket_size(plan.model, parallel, width, comm_buffer_of(train))
    size = f"{parallel.bucket_bytes / MIB:.4g} MiB"
    if parallel.bucket_bytes != chosen.size:
        return f"{size}, as given (the planner's choice: {chosen.size / MIB:.4g} MiB)"
    reasons = {
        "least": "the least, since smaller ones cost latency",
        "numbers": f"{NUMBERS // 10**6} million gradients",
        "pieces": f"{PIECE // MIB} MiB for each of {replicas} replicas",
        "bound": "train.comm_buffer_mib; larger parameters are cut",
        "share": f"1/{BUCKETS} of the rank's gradients, so that backward hides the rest",
    }
    return f"{size}: {reasons[chosen.reason]}"


def not_counted(plan: Plan) -> list[str]:
    """Names the work that the plan's seconds and bytes leave out, with its measured effect."""
    if not plan.job.train.compile or plan.time.software != "orch":
        return []
    return [
        "train.compile: time and memory are those of blocks that are not compiled; the one model"
        " measured so far, of 1B parameters on an H100, took 0.81 times its uncompiled step"
        " (docs/accuracy.md)"
    ]


def offered(config: Config, cluster: doc.Cluster, plan: Plan) -> Iterator[Change]:
    """Yields the same plan with less on the device, if it then fits.

    The optimizer can move to the host or to its disk, and the kept inputs to the host, or ranks of
    a tensor-parallel group can share them.
    """
    if config.cost.software != "orch":
        return
    choices: list[tuple[str, str | bool]] = []
    if config.train.offload == "none":
        choices += [("offload", "host"), ("offload", "disk")]
    keeps_inputs = plan.job.train.recompute != "none"
    if keeps_inputs and config.train.offload_activations == "none":
        choices.append(("offload_activations", "host"))
    holds_copies = plan.parallel.tp > 1 and not plan.parallel.sp
    if keeps_inputs and holds_copies and not config.train.partition_activations:
        choices.append(("partition_activations", True))
    for key, target in choices:
        override: dict[str, Any] = {key: target}
        train = structs.replace(config.train, **override)
        try:
            offloaded = build_plan(structs.replace(config, train=train), cluster)
        except OrchError:
            continue
        if offloaded.memory.total <= offloaded.memory.capacity:
            saves = plan.time.step_s - offloaded.time.step_s
            frees = plan.memory.total - offloaded.memory.total
            yield Change(
                [f"train.{key}={str(target).lower()}"],
                offloaded.time.step_s,
                offloaded.memory,
                saves,
                frees,
            )


#: Descriptions of the terms of the cost model (`Time.terms`).
WORDS = {
    "gemm": "matrix products",
    "attention": "attention core",
    "elementwise": "norms, activations, residual sums",
    "cast": "casts to 8 bits",
    "experts": "permuting tokens for experts",
    "recompute": "recomputation",
    "activations": "inputs of layers to the host and back",
    "checkpoints": "inputs of layers into their reserved buffer",
    "head": "output projection and loss",
    "host": "GPU waits for the CPU's launches",
    "optimizer": "optimizer",
    "tp": "tensor parallel, communication",
    "inputs": "shared inputs of layers, gathered",
    "cp": "context parallel, communication",
    "ep": "expert parallel, communication",
    "pp": "pipeline, communication",
    "dp": "gradients and weights, communication",
    "bubble": "pipeline bubble",
}


def terms(plan: Plan) -> list[Term]:
    """Returns the terms of the slowest rank's step, largest first; they sum to the step."""
    time = plan.time
    # Plans of older versions have no terms.
    seconds_by_term = time.terms or {
        "compute": time.compute_s,
        **time.exposed_comm_s,
    }
    shown = [
        Term(WORDS.get(name, name), seconds)
        for name, seconds in seconds_by_term.items()
        if seconds > 1e-9 * time.step_s
    ]
    return sorted(shown, key=lambda term: -term.seconds)


def _opened(config: Config, all_to_all: doc.AllToAll | UnsetType) -> Config:
    """Returns the configuration with every degree left open, so that any layout can be costed.

    `all_to_all` is the kind of exchange between tokens and experts.
    """
    open_keys: dict[str, Any] = dict.fromkeys(LEFT_OUT) | {
        "expert_all_to_all": "direct" if all_to_all is UNSET else all_to_all
    }
    parallel: ParallelSpec = structs.replace(config.parallel, auto=True, **open_keys)
    train = structs.replace(config.train, recompute=None)
    return structs.replace(config, parallel=parallel, train=train)


def _change(overrides: list[str], costed: CostedLayout, plan: Plan) -> Change:
    """Returns the change from `plan` to a costed layout."""
    saves = plan.time.step_s - costed.step_s
    frees = plan.memory.total - costed.memory.total
    return Change(overrides, costed.step_s, costed.memory, saves, frees)


def neighbours(plan: Plan) -> Iterator[tuple[list[str], Layout]]:
    """Yields (overrides for the command line, layout) of every plan that differs in one key."""
    par = plan.parallel
    settings = {
        name: getattr(par, name)
        for name in ("tp", "cp", "ep", "pp", "vpp", "zero", "micro_batch_size")
    }
    settings |= {"schedule": par.schedule, "recompute": plan.job.train.recompute}
    for name in ("tp", "cp", "ep", "pp", "micro_batch_size"):
        for value in (settings[name] * 2, settings[name] // 2):
            if value >= 1:
                yield from _one(plan, settings | {name: value}, [f"parallel.{name}={value}"])
    for zero in range(4):
        if zero != par.zero:
            yield from _one(plan, settings | {"zero": zero}, [f"parallel.zero={zero}"])
    for mode in RECOMPUTE_MODES:
        if mode != settings["recompute"]:
            yield from _one(plan, settings | {"recompute": mode}, [f"train.recompute={mode}"])
    if par.tp > 1:
        yield from _one(
            plan,
            settings | {"sp": not par.sp},
            [f"parallel.sp={str(not par.sp).lower()}"],
        )
    if par.cp > 1:
        for method in CP_METHODS:
            if method != par.cp_method:
                yield from _one(
                    plan,
                    settings | {"cp_method": method},
                    [f"parallel.cp_method={method}"],
                )
    if par.pp > 1:
        yield from _pipelines(plan, settings)
    if plan.model.moe is not None:
        yield from _folds(plan, settings)


def _folds(plan: Plan, settings: dict[str, Any]) -> Iterator[tuple[list[str], Layout]]:
    """Yields layouts whose experts fold in another way over the same tp and cp.

    Either as many ranks hold different experts, or the ep axis keeps its length.
    """
    par = plan.parallel
    total = expert_mesh(par).ep
    current_fold = (tensor_ranks(par), folds_cp(par), par.ep)
    for etp, fold_cp in product(divisors(par.tp), {False, par.cp > 1}):
        inner = par.tp // etp * (par.cp if fold_cp else 1)
        ep_degrees = {par.ep}
        if total % inner == 0:
            ep_degrees.add(total // inner)
        for ep in sorted(ep_degrees):
            if (etp, fold_cp, ep) == current_fold:
                continue
            overrides = []
            if etp != current_fold[0]:
                overrides.append(f"parallel.etp={etp}")
            if ep != current_fold[2]:
                overrides.append(f"parallel.ep={ep}")
            if fold_cp != current_fold[1]:
                overrides.append(f"parallel.fold_cp={str(fold_cp).lower()}")
            cut = etp if etp < par.tp else UNSET
            folded = {
                "etp": cut,
                "fold_cp": fold_cp or UNSET,
                "ep": ep,
            }
            yield from _one(plan, settings | folded, overrides)


def other_all_to_alls(plan: Plan) -> list[doc.AllToAll]:
    """Returns the other exchanges between tokens and experts that the plan could use."""
    if expert_mesh(plan.parallel).ep == 1 or plan.placement["ep"].worst_level in (SELF, NVLINK):
        return []
    return ["direct"] if plan.parallel.expert_all_to_all == "hierarchical" else ["hierarchical"]


def _by(plan: Plan, all_to_all: doc.AllToAll) -> tuple[list[str], Layout]:
    """Returns the plan's layout with another exchange between tokens and experts."""
    par = plan.parallel
    mesh = Mesh(**{name: getattr(par, name) for name in Mesh._fields})
    layout = Layout(
        mesh,
        plan.job.train.recompute,
        par.zero,
        par.schedule,
        par.vpp,
    )
    return [f"parallel.expert_all_to_all={all_to_all}"], layout


def _pipelines(plan: Plan, settings: dict[str, Any]) -> Iterator[tuple[list[str], Layout]]:
    """Yields layouts with another pipeline schedule or another number of virtual stages."""
    par = plan.parallel
    for name, entry in SCHEDULES.items():
        low, high = entry.vpp
        layers_per_rank = plan.model.layers // par.pp
        for vpp in range(low, min(high or 8, layers_per_rank) + 1):
            if (name, vpp) != (par.schedule, par.vpp):
                overrides = [f"parallel.schedule={name}"]
                if vpp != par.vpp:
                    overrides.append(f"parallel.vpp={vpp}")
                yield from _one(plan, settings | {"schedule": name, "vpp": vpp}, overrides)


def _gpus_of(plan: Plan, tp: int, cp: int, ep: int, pp: int) -> int:
    """Returns the GPUs that the plan would use with other degrees.

    A plan that fills its cluster still fills it, as far as groups of that size can.
    """
    par = plan.parallel
    domains = domains_of(plan.cluster)
    if par.world_size == domains.filled(par.tp, par.cp, par.ep, par.pp):
        return domains.filled(tp, cp, ep, pp)
    return par.world_size


def _one(
    plan: Plan,
    settings: dict[str, Any],
    overrides: list[str],
) -> Iterator[tuple[list[str], Layout]]:
    """Yields the layout with these settings if its degrees fill the GPUs and the global batch."""
    par = plan.parallel
    tp, cp, ep, pp = (settings[axis] for axis in ("tp", "cp", "ep", "pp"))
    dp, rest = divmod(_gpus_of(plan, tp, cp, ep, pp), tp * cp * ep * pp)
    size = settings["micro_batch_size"]
    if rest or not dp or par.global_batch_samples % (size * dp * ep):
        return
    sp = settings.get("sp", par.sp) if par.tp > 1 and tp > 1 else tp > 1
    etp = settings.get("etp", par.etp)
    fold_cp = settings.get("fold_cp", par.fold_cp) if cp > 1 else UNSET
    etp = UNSET if etp == tp else etp
    # Without a pipeline there is only one schedule.
    if pp == 1 and par.pp > 1:
        settings = settings | {"schedule": "1f1b", "vpp": 1}
    micro_batches = par.global_batch_samples // (size * dp * ep)
    mesh = Mesh(
        tp=tp,
        cp=cp,
        ep=ep,
        pp=pp,
        dp=dp,
        micro_batch_size=size,
        micro_batches=micro_batches,
        sp=sp,
        cp_method=settings.get("cp_method", par.cp_method),
        etp=etp,
        fold_cp=fold_cp,
    )
    layout = Layout(
        mesh=mesh,
        recompute=settings["recompute"],
        zero=settings["zero"],
        schedule=settings["schedule"],
        vpp=settings["vpp"],
    )
    yield overrides, layout
