"""Layouts whose predicted steps differ by less than predictions can tell, and how one is chosen.

Two predictions on the same machines share most of their error. The rest is assumed to be `EQUAL` of
the step, for all layouts alike. Of equal layouts, the one that moves fewer bytes over the highest
level of the network is taken, then one that `orch verify` proves, then the one with fewer
techniques.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cost.nesting import axis_placement
from orchestrator.plan.expert_mesh import tensor_ranks
from orchestrator.plan.schedules import SCHEDULES

from .costed_layout import CostedLayout
from .layout import CP_METHODS, NO_FOLD, RECOMPUTE_MODES, Layout

EQUAL = 0.02  # as a share of the step
MOST_EQUAL = 4  # the number of equal layouts, the fastest ones, that are compared
#: Pipeline schedules that `orch verify` combines in threes (`orchestrator/verify/matrix.py`; a test
#: compares them).
IN_THREES = frozenset({"1f1b", "interleaved", "zb_h1", "dualpipe"})


def preference(layout: Layout) -> tuple[object, ...]:
    """Returns the sort key of layouts with equal time and memory: fewer techniques come first."""
    names = list(SCHEDULES)
    rank = names.index(layout.schedule) if layout.schedule in names else len(names)
    order = names.index("1f1b") if "1f1b" in names else 0
    mesh = layout.mesh
    return (
        RECOMPUTE_MODES.index(layout.recompute) if layout.recompute in RECOMPUTE_MODES else 9,
        layout.zero,
        rank != order,
        layout.vpp,
        rank,
        mesh.ep,
        mesh.cp,
        mesh.tp,
        mesh.pp,
        mesh.micro_batch_size,
        mesh.tp > 1 and not mesh.sp,
        CP_METHODS.index(mesh.cp_method),
        mesh.fold != NO_FOLD,
        mesh.fold_cp is True,
        mesh.tp - tensor_ranks(mesh),
    )


def proven(layout: Layout) -> bool:
    """Reports whether `orch verify` proves all techniques of a layout together.

    It proves up to two techniques, or three of the main ones.
    """
    mesh = layout.mesh
    used = [
        layout.zero > 0 or mesh.dp > 1,
        mesh.tp > 1,
        mesh.cp > 1,
        mesh.pp > 1,
        layout.recompute != "none",
    ]
    main = mesh.cp_method != "ring" and (mesh.pp == 1 or layout.schedule in IN_THREES)
    return mesh.ep == 1 and mesh.fold == NO_FOLD and sum(used) <= (3 if main else 2)


def bytes_at_the_top(layout: CostedLayout, level: str) -> float:
    """Returns the bytes per step of the busiest rank of each axis over the highest switch level."""
    placed = axis_placement(layout.solution.best, layout.solution.traffic).values()
    return sum(axis.bytes_per_step_by_level.get(level, 0.0) for axis in placed)


def preferred_first(equal: Sequence[CostedLayout], level: str) -> list[CostedLayout]:
    """Returns equal layouts, the one to take first and the others by their time."""

    def key(costed: CostedLayout) -> tuple[object, ...]:
        """Returns the sort key of an equal layout."""
        # a difference of one percent does not decide
        moved = float(f"{bytes_at_the_top(costed, level):.2g}")
        return moved, not proven(costed.layout), costed.step_s, preference(costed.layout)

    best = min(equal, key=key)
    return [best, *(costed for costed in equal if costed is not best)]
