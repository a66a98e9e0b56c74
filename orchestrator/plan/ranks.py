"""Converts between coordinates, ranks and groups. Pure functions of the plan's degrees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .document import Model, Parallel, Plan, Rank

AXES = ("tp", "cp", "ep", "pp", "dp")
#: Composite groups -> the axes that vary inside one group. "grad": ranks that hold the same dense
#: weights and sum their gradients. "model": ranks that together hold one copy of the weights; a
#: gradient norm is summed over them.
COMPOSITE: dict[str, tuple[str, ...]] = {"grad": ("cp", "ep", "dp"), "model": ("tp", "pp")}


def coords(order: Iterable[str], degrees: Mapping[str, int]) -> list[dict[str, int]]:
    """Lists the coordinate of every rank if axes nest in `order`, innermost first."""
    order = list(order)
    result = [dict.fromkeys(AXES, 0)]
    for axis in reversed(order):
        result = [{**coord, axis: index} for coord in result for index in range(degrees[axis])]
    return result


def _coord_tuples(order: Iterable[str], degrees: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Lists the same coordinates as `coords`, as tuples in the order of AXES."""
    stride = 1
    world = prod(degrees.values())
    columns = dict[str, list[int]]()
    for axis in order:
        turn = [index for index in range(degrees[axis]) for _ in range(stride)]
        columns[axis] = turn * (world // max(1, len(turn)))
        stride = len(turn)
    return list(zip(*(columns[axis] for axis in AXES), strict=True))


def groups(all_coords: list[dict[str, int]], varying: tuple[str, ...]) -> list[list[int]]:
    """Lists groups of ranks in which only the axes in `varying` vary, each sorted by those
    coordinates (last axis slowest)."""
    fixed = tuple(axis for axis in AXES if axis not in varying)
    read_fixed = _reader(fixed)
    read_varying = _reader(tuple(reversed(varying)))
    fixed_coords = list(map(read_fixed, all_coords))
    varying_coords = list(map(read_varying, all_coords))
    ranks = sorted(range(len(varying_coords)), key=varying_coords.__getitem__)
    ranks_by_coord: dict[object, list[int]] = {key: [] for key in fixed_coords}
    for rank in ranks:
        ranks_by_coord[fixed_coords[rank]].append(rank)
    return list(ranks_by_coord.values())


def _reader(axes: tuple[str, ...]) -> Callable[[Mapping[str, int]], Any]:
    """Returns a function that reads these axes of a coordinate. It is called once per rank and kind
    of group, and 100,000 ranks are common."""
    return itemgetter(*axes) if axes else lambda _: ()


def all_groups(all_coords: list[dict[str, int]], pp: int) -> dict[str, list[list[int]]]:
    """Builds every group list of a plan: one per axis, the composites, and "embedding" (first and
    last stage)."""
    rank_lists = {axis: groups(all_coords, (axis,)) for axis in AXES}
    for name, axes in COMPOSITE.items():
        rank_lists[name] = groups(all_coords, axes)
    rank_lists["embedding"] = _embedding_groups(rank_lists["pp"], pp)
    return rank_lists


def _embedding_groups(pipelines: list[list[int]], pp: int) -> list[list[int]]:
    """The ranks of the first and the last stage of each pipeline."""
    if pp == 1:
        return [pipeline[:1] for pipeline in pipelines]
    return [[pipeline[0], pipeline[-1]] for pipeline in pipelines]


def embeds_at_both_ends(model: Model) -> bool:
    """Checks whether the last pipeline stage also holds the token table: as its head, or to predict
    further tokens. Its gradients are summed over "embedding"."""
    return model.tied_embeddings or bool(model.mtp)


def nested_groups(order: Iterable[str], degrees: Mapping[str, int]) -> dict[str, list[list[int]]]:
    """Equals `all_groups(coords(order, degrees), ...)`, but needs only the strides of the axes and
    takes time linear in the ranks."""
    stride = 1
    strides = {}
    for axis in order:
        strides[axis] = stride
        stride *= degrees[axis]
    varying_axes = {axis: (axis,) for axis in AXES} | COMPOSITE
    rank_lists = {
        name: _nested(strides, degrees, varying) for name, varying in varying_axes.items()
    }
    rank_lists["embedding"] = _embedding_groups(rank_lists["pp"], degrees["pp"])
    return rank_lists


def _nested(
    strides: dict[str, int],
    degrees: Mapping[str, int],
    varying: tuple[str, ...],
) -> list[list[int]]:
    """Lists groups like `groups`, in the order of their lowest rank. Members are sorted by
    coordinate, the last axis of `varying` slowest. `strides` has the innermost axis first."""
    firsts = [0]
    members = [0]
    for axis in varying:
        members = _repeated(members, degrees[axis], strides[axis])
    for axis, stride in strides.items():
        if axis not in varying:
            firsts = _repeated(firsts, degrees[axis], stride)
    if len(members) == 1:
        return [[first] for first in firsts]
    return [[first + rank for rank in members] for first in firsts]


def _repeated(ranks: list[int], degree: int, stride: int) -> list[int]:
    """Copies the ranks along an axis."""
    return [index * stride + rank for index in range(degree) for rank in ranks]


def as_dict(rank: Rank) -> dict[str, int]:
    return dict(zip(AXES, _read_coord(rank.coord), strict=True))


_read_coord = attrgetter(*AXES)


def degrees(parallel: Parallel) -> dict[str, int]:
    return {axis: getattr(parallel, axis) for axis in AXES}


def check_ranks(plan: Plan) -> str | None:
    """Checks degrees, ranks, groups and nodes. Returns one line on the first contradiction, or
    None."""
    par = plan.parallel
    world = par.tp * par.cp * par.ep * par.pp * par.dp
    if par.world_size != world or len(plan.ranks) != world:
        return (
            f"plan has {len(plan.ranks)} ranks and world_size {par.world_size}, its degrees"
            f" multiply to {world}"
        )
    names = set(plan.cluster.node_names)
    used_gpus: set[tuple[str, int]] = set()
    for index, rank in enumerate(plan.ranks):
        if rank.rank != index:
            return f"ranks[{index}] says rank {rank.rank}"
        if rank.node not in names:
            return f"rank {index} is on node {rank.node!r}, which the cluster does not have"
        if not 0 <= rank.gpu < plan.cluster.gpus_per_node:
            return (
                f"rank {index} is on GPU {rank.gpu} of {rank.node}, which has"
                f" {plan.cluster.gpus_per_node}"
            )
        if (rank.node, rank.gpu) in used_gpus:
            return f"rank {index} shares GPU {rank.gpu} of {rank.node} with another rank"
        used_gpus.add((rank.node, rank.gpu))
    coordinates = [_read_coord(rank.coord) for rank in plan.ranks]
    # Plans of this planner nest their axes, which is fast to check; others are checked in full.
    nested = sorted(par.order) == sorted(AXES)
    if nested and coordinates == _coord_tuples(par.order, degrees(par)):
        if plan.groups != nested_groups(par.order, degrees(par)):
            return "groups do not follow from the ranks' coordinates"
        return _stages_problem(plan)
    if len(set(coordinates)) != world:
        return "two ranks have the same coordinate"
    coord_dicts = [as_dict(rank) for rank in plan.ranks]
    for axis, degree in degrees(par).items():
        if any(not 0 <= coord[axis] < degree for coord in coord_dicts):
            return f"a rank's {axis} coordinate is outside 0..{degree - 1}"
    if plan.groups != all_groups(coord_dicts, par.pp):
        return "groups do not follow from the ranks' coordinates"
    return _stages_problem(plan)


def _stages_problem(plan: Plan) -> str | None:
    par = plan.parallel
    if plan.program:
        has_layers = bool(par.stage_layers)
        return "the plan of a program has no layers, and no stage_layers" if has_layers else None
    if len(par.stage_layers) != par.pp * par.vpp or sum(par.stage_layers) != plan.model.layers:
        return (
            f"stage_layers {par.stage_layers} must be {par.pp * par.vpp} numbers that sum to"
            f" {plan.model.layers}"
        )
    return None
