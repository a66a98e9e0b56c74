"""Naive twin of the search: cost every legal layout one by one with `build_plan`'s own parts, and
sort."""

from __future__ import annotations

from orchestrator.config.schema import Config
from orchestrator.planner.search.costed_layout import CostedLayout
from orchestrator.planner.search.search import NEAR
from orchestrator.planner.search.ties import preference
from tests.planner import configs


def every_layout(config: Config) -> list[CostedLayout]:
    """All layouts that are legal and fit, best first: by time, then memory, then plainness. A
    layout with several exchanges of expert tokens is there once with each."""
    search = configs.search(config, any_layout=True)
    candidates = [
        search.exact_costs.of_placed(placed._replace(nestings=[nestings]))
        for mesh in search.space.meshes()
        for layout in search.space.layouts(mesh)
        if (placed := search.exact_costs.placed(layout)) is not None
        for nestings in placed.nestings
    ]
    fitting = [candidate for candidate in candidates if candidate is not None]
    return sorted(
        fitting,
        key=lambda candidate: (
            candidate.step_s,
            candidate.memory.total,
            preference(candidate.layout),
        ),
    )


def front(layouts: list[CostedLayout]) -> list[CostedLayout]:
    """What is slower than the best by at most `NEAR`, and needs less memory than everything
    faster; each layout with its fastest exchange of these."""
    frontier: list[CostedLayout] = []
    for candidate in layouts:
        if any(candidate.layout == k.layout for k in frontier):
            continue
        if candidate.step_s <= layouts[0].step_s * (1 + NEAR) and all(
            candidate.memory.total < k.memory.total for k in frontier
        ):
            frontier.append(candidate)
    return frontier
