"""Fills in everything that a configuration with `parallel=auto` leaves open, by the search."""

from __future__ import annotations

from msgspec import structs

from orchestrator.config.schema import Config
from orchestrator.cost.context import CostContext
from orchestrator.cost.of_plan import jacobian
from orchestrator.cost.profile import Profile, relative_sd
from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.document import Cluster

from .costed_layout import CostedLayout
from .search import NEAR, Search, SearchResult
from .ties import bytes_at_the_top

GIB = 1 << 30
#: Keys that the search keeps if they are given.
GIVEN = (
    "tp",
    "cp",
    "ep",
    "etp",
    "fold_cp",
    "expert_all_to_all",
    "pp",
    "dp",
    "zero",
    "vpp",
    "sp",
    "cp_method",
    "schedule",
    "micro_batch_size",
)


def search(
    config: Config,
    cluster: Cluster,
    near: float = NEAR,
    any_layout: bool = False,
    profile: Profile | None = None,
) -> SearchResult:
    """Returns the fastest layout that fits, and slower ones that need less memory.

    `any_layout` also searches layouts that the bundled trainer does not run. Raises OrchError (65)
    if nothing fits.
    """
    seeker = Search(config, cluster, any_layout, profile)
    answer = _run(seeker, near)
    shown = {costed.layout: costed for costed in (*answer.front, *answer.equal)}
    shown = {layout: _with_interval(costed, seeker.context) for layout, costed in shown.items()}
    front, equal = (
        [shown[costed.layout] for costed in layouts] for layouts in (answer.front, answer.equal)
    )
    return answer._replace(front=front, equal=equal)


def _with_interval(layout: CostedLayout, context: CostContext) -> CostedLayout:
    """Adds what only a reader of the result needs.

    That is the error of the prediction, and the bytes over the top level of the network.
    """
    parallel, best, _, time = layout.solution
    train = structs.replace(context.train, recompute=layout.layout.recompute)
    sd = relative_sd(jacobian(context, best, parallel, train), context.profile)
    solution = layout.solution._replace(time=structs.replace(time, sd=sd))
    return layout._replace(
        solution=solution,
        spine_bytes=bytes_at_the_top(layout, context.level_names[-1]),
    )


def resolve_auto(
    config: Config,
    cluster: Cluster,
    any_layout: bool = False,
    profile: Profile | None = None,
) -> tuple[Config, CostContext | None]:
    """Returns (configuration with every degree filled in, cost context of the search).

    The context is None if nothing was open.
    """
    if not config.parallel.auto:
        return config, None
    seeker = Search(config, cluster, any_layout, profile)
    return _run(seeker, near=0.0).equal[0].config, seeker.context


def settled(
    config: Config,
    cluster: Cluster,
    any_layout: bool = False,
    profile: Profile | None = None,
) -> Config:
    """Returns the configuration with every degree filled in."""
    return resolve_auto(config, cluster, any_layout, profile)[0]


def _run(seeker: Search, near: float) -> SearchResult:
    """Runs the search. Raises OrchError (65) if nothing is legal or nothing fits."""
    config = seeker.space.config
    answer = seeker.run(near)
    if answer.front:
        return answer
    given_keys = [
        f"{name}={getattr(config.parallel, name)}"
        for name in GIVEN
        if getattr(config.parallel, name) is not None
    ]
    with_what = f" with {', '.join(given_keys)}" if given_keys else ""
    if not answer.counts.legal:
        raise OrchError(
            f"parallel=auto: no layout of {seeker.space.gpus} GPUs{with_what} is legal for"
            f" {config.model.name} and a global batch of {seeker.space.samples} samples; change the"
            " batch, or give fewer degrees",
            Exit.CONFIG,
        )
    raise OrchError(
        f"parallel=auto: none of the {answer.counts.legal:,} legal layouts of {seeker.space.gpus}"
        f" GPUs{with_what} fits {seeker.capacity / GIB:.1f} GiB per GPU for {config.model.name};"
        " use more GPUs, shorter sequences (train.seq_len) or train.grad_dtype=bf16",
        Exit.CONFIG,
    )
