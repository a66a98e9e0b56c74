"""The expert mesh: how the ranks of a stage share its experts. It is a factorisation of its own of
these ranks, into ranks that cut each expert (etp), ranks with different experts (ep) and ranks with
the same ones (edp).

Without folding etp = tp, ep is the axis of that name, and edp = cp * dp. `Parallel.etp` below tp
gives the tp ranks of a stage different experts (ep folds over tp), `Parallel.fold_cp` those of cp.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from msgspec import UnsetType

from .document import Axis, Plan

#: Axes of ranks that hold the same experts, where these do not fold over cp.
REPLICAS: tuple[Axis, ...] = ("cp", "dp")


class Degrees(Protocol):
    """What a `Parallel` and a `Case` have."""

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
    """Its three products are the ranks of a stage: etp * ep * edp = tp * cp * ep axis * dp."""

    etp: int
    ep: int
    edp: int


def expert_mesh(par: Degrees) -> ExpertMesh:
    etp = tensor_ranks(par)
    return ExpertMesh(etp, par.tp // etp * spread(par), par.dp * (1 if folds_cp(par) else par.cp))


def tensor_ranks(par: Degrees) -> int:
    """Ranks that each expert is cut over."""
    return par.etp if isinstance(par.etp, int) else par.tp


def folds_cp(par: Degrees) -> bool:
    """Whether ranks of cp, where there are several, hold different experts."""
    return par.fold_cp is True and par.cp > 1


def spread(par: Degrees) -> int:
    """Ranks of one dense gradient group that hold different experts."""
    return par.ep * (par.cp if folds_cp(par) else 1)


def axes(par: Degrees) -> tuple[Axis, ...]:
    """Axes along which ranks hold different experts and tokens go to them; of "tp" perhaps a
    part."""
    folded: dict[Axis, bool] = {"tp": tensor_ranks(par) < par.tp, "cp": folds_cp(par), "ep": True}
    return tuple(axis for axis in folded if folded[axis])


def replicas(par: Degrees) -> tuple[Axis, ...]:
    """Axes of ranks that hold the same experts."""
    return ("dp",) if folds_cp(par) else REPLICAS


def in_words(par: Degrees) -> tuple[int, int] | None:
    """(etp, ep) of the word of degrees that folds experts as `par` does; None where no word does,
    and keys must."""
    mesh = expert_mesh(par)
    axis = par.ep
    over_cp = folds_cp(par)
    try:
        matches = fold(
            par.tp, par.cp, mesh.etp, mesh.ep, lambda reason, near: ValueError(reason)
        ) == (
            axis,
            over_cp,
        )
    except ValueError:
        return None
    return (mesh.etp, mesh.ep) if matches else None


def fullest(par: Any) -> float:
    """Load of the fullest of the ranks that share experts over the mean, as a `Parallel` assumes
    it."""
    return par.expert_imbalance if isinstance(par.expert_imbalance, float) else 1.0


def position(par: Any, coord: Any) -> int:
    """Which run of a layer's experts the rank at `coord` holds: its place among the ranks of its
    own "experts" group, ascending. `par`: a `Parallel`, `coord`: a `Coord`."""
    etp = tensor_ranks(par)
    result = 0
    sizes = {"tp": par.tp // etp, "cp": par.cp, "ep": par.ep}
    coordinates: dict[str, int] = {"tp": coord.tp // etp, "cp": coord.cp, "ep": coord.ep}
    for axis in reversed([axis for axis in par.order if axis in axes(par)]):
        result = result * sizes[axis] + coordinates[axis]
    return result


def nvlink_domain_of(plan: Plan) -> list[int]:
    """The number of the NVLink domain of each rank's GPU."""
    numbers = {name: index for index, name in enumerate(plan.cluster.node_names)}
    domain = {node: at for at, nodes in enumerate(plan.cluster.nvlink_domains) for node in nodes}
    return [domain[numbers[rank.node]] for rank in plan.ranks]


def fold(
    tp: int, cp: int, etp: int, ep: int, refuse: Callable[[str, int], Exception]
) -> tuple[int, bool]:
    """(degree of the axis ep, whether cp folds) of an expert mesh with `etp` and `ep` in a stage
    with `tp` and `cp`.

    Ranks of tp are taken first, then those of cp, then those of an axis of its own. Raises what
    `refuse`, called with the reason and the nearest legal ep, returns.
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
