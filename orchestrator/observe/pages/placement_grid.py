"""The placement grid: nodes by GPUs, each cell a rank, coloured by data-parallel replica, labelled
by coordinate.

Nodes that look alike are folded into one line, so 2,048 nodes take a few lines and no information
is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from orchestrator.style import GRAY, REPLICA, Style

MOST_LINES = 32  # nodes shown one by one
MOST_FOLDED = 12  # lines when there are more


def label_axes(plan: Plan) -> list[str]:
    """Axes that tell ranks apart, outermost first: what a cell shows."""
    return [axis for axis in reversed(plan.parallel.order) if getattr(plan.parallel, axis) > 1]


def grid(plan: Plan, style: Style) -> list[str]:
    """Lines of the grid. Folds runs of nodes under one switch when there are more than `MOST_LINES`
    nodes."""
    by_node: dict[str, list[Coord]] = {}
    for rank in plan.ranks:
        by_node.setdefault(rank.node, []).append(rank.coord)
    names = list(by_node)
    axes = label_axes(plan)
    key = f"cell: {' '.join(axes)} coordinate" if axes else "one rank"
    colour_axis = _colour_axis(plan)
    if colour_axis and style.colour:
        key += f"; colour: {colour_axis}"
    lines = [style.paint(key, GRAY)]
    if len(names) <= MOST_LINES:
        cell = max(len(_cell(coord, axes)) for coord in (rank.coord for rank in plan.ranks))
        for switch, members in _under_switches(plan, names):
            if switch:
                lines.append(style.paint(switch, GRAY))
            for name in members:
                lines += _node_line(name, by_node[name], axes, colour_axis, cell, style)
        return lines
    return lines + _folded(plan, names, by_node, axes, colour_axis, style)


def _colour_axis(plan: Plan) -> str | None:
    """Replicas differ in colour; with one replica, pipeline stages."""
    return next(
        (axis for axis in ("dp", "pp", "ep", "cp", "tp") if getattr(plan.parallel, axis) > 1), None
    )


def _cell(coord: Coord, axes: Sequence[str]) -> str:
    return ".".join(str(getattr(coord, axis)) for axis in axes) or "0"


def _node_line(
    name: str,
    coords: list[Coord],
    axes: Sequence[str],
    colour_axis: str | None,
    cell: int,
    style: Style,
) -> list[str]:
    """One node; its GPUs wrap when the terminal is narrow."""
    room = max(1, (style.width - len(name) - 3) // (cell + 1))
    lines = []
    for start in range(0, len(coords), room):
        cells = []
        for coord in coords[start : start + room]:
            label = _cell(coord, axes).center(cell)
            code = (
                REPLICA[getattr(coord, colour_axis) % len(REPLICA)] if colour_axis else REPLICA[0]
            )
            cells.append(style.fill(label, code))
        lead = name if start == 0 else " " * len(name)
        lines.append(f"  {lead} {' '.join(cells)}")
    return lines


def _under_switches(plan: Plan, names: list[str]) -> list[tuple[str, list[str]]]:
    """Nodes by the innermost switch level that has several switches; ("", all) when there is
    none."""
    for level in plan.cluster.levels:
        if len(level.switches) > 1:
            index = {name: i for i, name in enumerate(plan.cluster.node_names)}
            owner = {node: number for number, nodes in enumerate(level.switches) for node in nodes}
            blocks: dict[int, list[str]] = {}
            for name in names:
                blocks.setdefault(owner[index[name]], []).append(name)
            return [(f"{level.name} {number}", members) for number, members in blocks.items()]
    return [("", names)]


def _folded(
    plan: Plan,
    names: list[str],
    by_node: dict[str, list[Coord]],
    axes: Sequence[str],
    colour_axis: str | None,
    style: Style,
) -> list[str]:
    """Runs of nodes as ranges of coordinates: one line a replica, or a group of replicas when there
    are many."""
    level, switches = _coarse_level(plan)
    index = {name: i for i, name in enumerate(plan.cluster.node_names)}
    owner = {node: number for number, nodes in enumerate(switches) for node in nodes}
    runs: list[list[str]] = []
    for name in names:
        if runs and owner[index[runs[-1][0]]] == owner[index[name]]:
            runs[-1].append(name)
        else:
            runs.append([name])
    # a long run is cut at replica borders, so that each line says where replicas are
    lines = []
    for run in runs:
        number = owner[index[run[0]]]
        lines.append(style.paint(f"{level} {number}: {len(run)} nodes", GRAY))
        for part in _pieces(run, by_node, colour_axis, max(1, MOST_FOLDED // len(runs))):
            coords = [coord for name in part for coord in by_node[name]]
            ranges = "  ".join(
                f"{axis} {_range([getattr(c, axis) for c in coords])}" for axis in axes
            )
            span = part[0] if len(part) == 1 else f"{part[0]} .. {part[-1]}"
            code = (
                REPLICA[getattr(coords[0], colour_axis) % len(REPLICA)]
                if colour_axis
                else REPLICA[0]
            )
            lines.append(f"  {style.fill(' ', code) if style.colour else '-'} {span}  {ranges}")
    return lines


def _pieces(
    run: list[str], by_node: dict[str, list[Coord]], axis: str | None, limit: int
) -> list[list[str]]:
    """At most `most` + 1 parts of a run, cut where the coordinate on `axis` changes, joined until
    few enough."""
    groups: list[list[str]] = []
    last_coordinates: object = None
    for name in run:
        coordinates = (
            tuple(sorted({getattr(coord, axis) for coord in by_node[name]})) if axis else ()
        )
        if not groups or coordinates != last_coordinates:
            groups.append([])
        groups[-1].append(name)
        last_coordinates = coordinates
    if len(groups) <= limit:
        return groups
    step = -(-len(groups) // limit)
    return [
        [name for group in groups[i : i + step] for name in group]
        for i in range(0, len(groups), step)
    ]


def _coarse_level(plan: Plan) -> tuple[str, list[list[int]]]:
    """The innermost level with at most 16 switches, so that a heading each stays readable."""
    for level in plan.cluster.levels:
        if len(level.switches) <= 16:
            return level.name, level.switches
    return "cluster", [list(range(len(plan.cluster.node_names)))]


def _range(values: list[int]) -> str:
    """0..7 for a run; otherwise how many different values."""
    distinct = sorted(set(values))
    if len(distinct) == 1:
        return str(distinct[0])
    if distinct[-1] - distinct[0] == len(distinct) - 1:
        return f"{distinct[0]}..{distinct[-1]}"
    return f"{len(distinct)} of {distinct[0]}..{distinct[-1]}"
