"""`parallel=auto`: the configuration with everything that was left open filled in by the search."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster
from orchestrator.plan.interval import SIGMAS
from orchestrator.planner.cost.profile import Profile, difference_sd, relative_sd
from orchestrator.planner.placement.axis_order import CostContext, axis_placement
from orchestrator.planner.plan_cost import jacobian

from .search import NEAR, CostedLayout, Search, SearchResult

GIB = 1 << 30


def search(
    config: Config, cluster: Cluster, near: float = NEAR, any_layout: bool = False, profile: Profile | None = None
) -> SearchResult:
    """The fastest layout that fits, and slower ones (by up to `near`) that need less memory.

    `any_layout`: also layouts that the bundled trainer does not run. Raises OrchError (65) when nothing fits.
    """
    seeker = Search(config, cluster, any_layout, profile)
    answer = _run(seeker, near)
    return answer._replace(front=_with_intervals(answer.front, seeker.context))


def _with_intervals(front: Sequence[CostedLayout], context: CostContext) -> list[CostedLayout]:
    """With what only a reader of the front needs: the error of each prediction, and which are as fast as the first as
    far as the model can tell. Errors that both layouts share do not count there."""
    found: list[CostedLayout] = []
    first = None
    for one in front:
        parallel, best, _, time = one.solution
        train = structs.replace(context.train, recompute=one.layout.recompute)
        own = jacobian(context, best, parallel, train)
        first = own if first is None else first
        slower = log(one.step_s / front[0].step_s)
        solution = one.solution._replace(time=structs.replace(time, sd=relative_sd(own, context.profile)))
        equal = slower <= SIGMAS * difference_sd(first, own, context.profile)
        placed = axis_placement(best, one.solution.traffic).values()
        spine = sum(place.bytes_per_step_by_level.get(context.level_names[-1], 0.0) for place in placed)
        found.append(one._replace(solution=solution, equal=equal, spine_bytes=spine))
    return found


def resolve_auto(
    config: Config, cluster: Cluster, any_layout: bool = False, profile: Profile | None = None
) -> tuple[Config, CostContext | None]:
    """(configuration with every degree filled in, cost context of the search or None when nothing was open)."""
    if not config.parallel.auto:
        return config, None
    seeker = Search(config, cluster, any_layout, profile)
    return _run(seeker, near=0.0).front[0].config, seeker.context


def settled(config: Config, cluster: Cluster, any_layout: bool = False, profile: Profile | None = None) -> Config:
    """The configuration with every degree filled in."""
    return resolve_auto(config, cluster, any_layout, profile)[0]


def _run(seeker: Search, near: float) -> SearchResult:
    config = seeker.space.config
    answer = seeker.run(near)
    if answer.front:
        return answer
    given = [
        f"{name}={getattr(config.parallel, name)}"
        for name in ("tp", "cp", "ep", "pp", "dp", "zero", "vpp", "sp", "cp_method", "schedule", "micro_batch_size")
        if getattr(config.parallel, name) is not None
    ]
    with_what = f" with {', '.join(given)}" if given else ""
    if not answer.counts.legal:
        raise OrchError(
            f"parallel=auto: no layout of {seeker.space.gpus} GPUs{with_what} is legal for {config.model.name} and a"
            f" global batch of {seeker.space.samples} samples; change the batch, or give fewer degrees",
            Exit.CONFIG,
        )
    raise OrchError(
        f"parallel=auto: none of the {answer.counts.legal:,} legal layouts of {seeker.space.gpus} GPUs{with_what} fits"
        f" {seeker.capacity / GIB:.1f} GiB a GPU for {config.model.name}; use more GPUs, shorter sequences"
        " (train.seq_len) or train.grad_dtype=bf16",
        Exit.CONFIG,
    )
