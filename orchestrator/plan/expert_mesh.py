"""The expert mesh: how the ranks of a stage share its experts. Pure.

The mesh factorises the ranks of a stage into ranks that share each expert (etp), ranks with
different experts (ep) and ranks with the same experts (edp). Without folding, etp = tp, ep is the
axis of that name, and edp = cp * dp. `Parallel.etp` below tp gives tp ranks different experts (ep
folds over tp); `Parallel.fold_cp` does the same for cp ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from msgspec import UnsetType

from .document import Axis, Plan

#: Axes of ranks that hold the same experts, unless experts fold over cp.
REPLICAS: tuple[Axis, ...] = ("cp", "dp")


class Degrees(Protocol):
    """The degrees that both a `Parallel` and a `Case` have."""

    @property
    def tp(self) -> int: ...
    @property
    def cp(self) -> int: ...
    @property
    def ep(self) -> int: ...
    @property
    def dp(self) -> int: ...
    @property
    def etp(self) -> int | UnsetType: ...
    @property
    def fold_cp(self) -> bool | UnsetType: ...


class ExpertMesh(NamedTuple):
    """Degrees whose product is the number of ranks of a stage: etp * ep * edp = tp * cp * (axis ep)
    * dp."""

    etp: int
    ep: int
    edp: int


def expert_mesh(par: Degrees) -> ExpertMesh:
    etp = tensor_ranks(par)
    ep = par.tp // etp * spread(par)
    edp = par.dp if folds_cp(par) else par.dp * par.cp
    return ExpertMesh(etp, ep, edp)


def tensor_ranks(par: Degrees) -> int:
    """The number of ranks that share each expert."""
    return par.etp if isinstance(par.etp, int) else par.tp


def folds_cp(par: Degrees) -> bool:
    """Checks whether there are several cp ranks, and they hold different experts."""
    return par.fold_cp is True and par.cp > 1


def spread(par: Degrees) -> int:
    """The number of ranks of one dense gradient group that hold different experts."""
    return par.ep * (par.cp if folds_cp(par) else 1)


def axes(par: Degrees) -> tuple[Axis, ...]:
    """The axes along which ranks hold different experts, to which tokens are sent. "tp" may be
    folded only in part."""
    folded: dict[Axis, bool] = {
        "tp": tensor_ranks(par) < par.tp,
        "cp": folds_cp(par),
        "ep": True,
    }
    return tuple(axis for axis in folded if folded[axis])


def replicas(par: Degrees) -> tuple[Axis, ...]:
    """The axes of ranks that hold the same experts."""
    return ("dp",) if folds_cp(par) else REPLICAS


def in_words(par: Degrees) -> tuple[int, int] | None:
    """(etp, ep) of the word of degrees that folds experts as `par` does; None if only keys can
    express it."""
    mesh = expert_mesh(par)
    try:
        folded = fold(
            par.tp,
            par.cp,
            mesh.etp,
            mesh.ep,
            lambda reason, near: ValueError(reason),
        )
    except ValueError:
        return None
    return (mesh.etp, mesh.ep) if folded == (par.ep, folds_cp(par)) else None


def fullest(par: Any) -> float:
    """The load of the fullest expert rank over the mean that a `Parallel` assumes."""
    return par.expert_imbalance if isinstance(par.expert_imbalance, float) else 1.0


def position(par: Any, coord: Any) -> int:
    """The index of the run of a layer's experts that the rank at `coord` holds: its position in its
    "experts" group, ascending. `par`: a `Parallel`, `coord`: a `Coord`."""
    etp = tensor_ranks(par)
    sizes = {"tp": par.tp // etp, "cp": par.cp, "ep": par.ep}
    coordinates: dict[str, int] = {
        "tp": coord.tp // etp,
        "cp": coord.cp,
        "ep": coord.ep,
    }
    expert_axes = axes(par)
    index = 0
    for axis in reversed(par.order):
        if axis in expert_axes:
            index = index * sizes[axis] + coordinates[axis]
    return index


def nvlink_domain_of(plan: Plan) -> list[int]:
    """Lists the number of the NVLink domain of each rank's GPU."""
    numbers = {name: index for index, name in enumerate(plan.cluster.node_names)}
    domain = {node: at for at, nodes in enumerate(plan.cluster.nvlink_domains) for node in nodes}
    return [domain[numbers[rank.node]] for rank in plan.ranks]


def fold(
    tp: int,
    cp: int,
    etp: int,
    ep: int,
    refuse: Callable[[str, int], Exception],
) -> tuple[int, bool]:
    """Finds (degree of the axis ep, whether cp folds) of an expert mesh with `etp` and `ep` in a
    stage with `tp` and `cp`.

    Experts fold over tp first, then over cp, then over an axis of their own. Raises the exception
    that `refuse` makes from the reason and the nearest legal ep.
    """
    if tp % etp:
        raise refuse(f"etp={etp} does not divide tp={tp}", ep)
    inner = tp // etp
    if ep == inner:
        return 1, False
    if ep % (inner * cp) == 0:
        return ep // (inner * cp), cp > 1
    step = inner * cp
    near = min(
        [inner, step * max(1, ep // step), step * (ep // step + 1)],
        key=lambda legal: abs(legal - ep),
    )
    raise refuse(
        f"etp={etp} ep={ep}: ep is tp / etp = {inner}, or a multiple of tp * cp / etp = {step}",
        near,
    )
