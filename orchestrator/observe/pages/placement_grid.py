"""The placement grid: nodes by GPUs. Each cell is a rank, coloured by replica and labelled by
coordinate.

More than 32 nodes are folded into ranges, so 2,048 nodes take a few lines and no information is
lost.
"""

from __future__ import annotations

import itertools
from functools import cached_property

from orchestrator.observe.colours import MARK, REPLICA, ink_on, replica_colour, replica_round
from orchestrator.plan import Plan
from orchestrator.plan.batch import replica_of
from orchestrator.plan.document import Coord
from orchestrator.style import GRAY, Style

MOST_LINES = 32  # nodes that are listed one by one
MOST_FOLDED = 12  # lines of ranges for more nodes
_MOST_SWITCHES = 16  # of a level whose switches get headings


def label_axes(plan: Plan) -> list[str]:
    """The axes of more than one rank, outermost first. Their coordinates label a cell."""
    return [axis for axis in reversed(plan.parallel.order) if getattr(plan.parallel, axis) > 1]


def colour_key(plan: Plan) -> list[str]:
    """What the colours of ranks mean, in the grid and in the plan's picture."""
    par = plan.parallel
    replicas = par.dp * par.ep
    entries = []
    if replicas > 1:
        looks = "colour and pattern" if replicas > len(REPLICA) else "colour"
        axes = "dp, ep" if par.ep > 1 else "dp"
        entries.append(f"{looks}: replica ({axes})")
    if par.pp > 1:
        entries.append("tint: odd stage (pp)")
    return entries


def grid(plan: Plan, style: Style) -> list[str]:
    """The lines of the grid. More than `MOST_LINES` nodes are folded into runs of nodes under one
    switch."""
    return _Grid(plan, style).lines()


class _Grid:
    """One plan's grid in one style."""

    def __init__(self, plan: Plan, style: Style):
        self._plan = plan
        self._style = style
        self._axes = label_axes(plan)
        self._coords: dict[str, list[Coord]] = {}  # node -> coordinates of its ranks
        for rank in plan.ranks:
            self._coords.setdefault(rank.node, []).append(rank.coord)

    def lines(self) -> list[str]:
        key = f"cell: {' '.join(self._axes)} coordinate" if self._axes else "one rank"
        if self._style.colour:
            key = "; ".join([key, *colour_key(self._plan)])
        lines = [self._style.paint(key, GRAY)]
        nodes = list(self._coords)
        if len(nodes) > MOST_LINES:
            return lines + self._folded(nodes)
        for switch, members in self._under_switches(nodes):
            if switch:
                lines.append(self._style.paint(switch, GRAY))
            for node in members:
                lines += self._node_lines(node)
        return lines

    @cached_property
    def _cut_axis(self) -> str | None:
        """The axis at whose coordinates a long run of nodes is cut."""
        for axis in ("dp", "pp", "ep", "cp", "tp"):
            if getattr(self._plan.parallel, axis) > 1:
                return axis
        return None

    def _fill(self, label: str, coord: Coord) -> str:
        """Returns a label on the colour of its rank."""
        code = replica_colour(replica_of(self._plan.parallel, coord), coord.pp)
        return self._style.fill(label, code, ink_on(code))

    def _label(self, coord: Coord) -> str:
        return ".".join(str(getattr(coord, axis)) for axis in self._axes) or "0"

    @cached_property
    def _cell_width(self) -> int:
        return max(len(self._label(rank.coord)) for rank in self._plan.ranks)

    @cached_property
    def _node_index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._plan.cluster.node_names)}

    def _node_lines(self, node: str) -> list[str]:
        """One node, whose GPUs wrap on a narrow terminal."""
        room = self._style.width - len(node) - 3
        columns = max(1, room // (self._cell_width + 1))
        coords = self._coords[node]
        lines = []
        for start in range(0, len(coords), columns):
            cells = [
                self._fill(self._label(coord).center(self._cell_width), coord)
                for coord in coords[start : start + columns]
            ]
            name = node if start == 0 else " " * len(node)
            lines.append(f"  {name} {' '.join(cells)}")
        return lines

    def _under_switches(self, nodes: list[str]) -> list[tuple[str, list[str]]]:
        """Groups nodes by the switches of the innermost level that has several; [("", nodes)] if no
        level has."""
        for level in self._plan.cluster.levels:
            if len(level.switches) > 1:
                switch_of = _switch_of(level.switches)
                blocks: dict[int, list[str]] = {}
                for node in nodes:
                    blocks.setdefault(switch_of[self._node_index[node]], []).append(node)
                return [(f"{level.name} {switch}", members) for switch, members in blocks.items()]
        return [("", nodes)]

    def _folded(self, nodes: list[str]) -> list[str]:
        """Runs of nodes as ranges of coordinates: one line per replica, or per group of replicas if
        there are many."""
        level, switches = self._heading_level()
        switch_of = _switch_of(switches)
        runs: list[tuple[int, list[str]]] = []
        for node in nodes:
            switch = switch_of[self._node_index[node]]
            if not runs or runs[-1][0] != switch:
                runs.append((switch, []))
            runs[-1][1].append(node)
        lines = []
        for switch, run in runs:
            lines.append(self._style.paint(f"{level} {switch}: {len(run)} nodes", GRAY))
            # A long run is cut at replica borders, so that each line names its replicas.
            pieces = self._pieces(run, max(1, MOST_FOLDED // len(runs)))
            lines += [self._piece_line(piece) for piece in pieces]
        return lines

    def _piece_line(self, nodes: list[str]) -> str:
        coords = [coord for node in nodes for coord in self._coords[node]]
        ranges = [
            f"{axis} {_range([getattr(coord, axis) for coord in coords])}" for axis in self._axes
        ]
        name = nodes[0] if len(nodes) == 1 else f"{nodes[0]} .. {nodes[-1]}"
        mark = "-"
        if self._style.colour:
            replica = replica_of(self._plan.parallel, coords[0])
            mark = self._fill(MARK[replica_round(replica)], coords[0])
        return f"  {mark} {name}  {'  '.join(ranges)}"

    def _pieces(self, run: list[str], limit: int) -> list[list[str]]:
        """Cuts a run where the coordinate of `_cut_axis` changes, and joins neighbours until there
        are at most `limit` + 1 pieces."""
        pieces: list[list[str]] = []
        last_coordinates: object = None
        for node in run:
            coordinates = self._cut_coordinates(node)
            if not pieces or coordinates != last_coordinates:
                pieces.append([])
            pieces[-1].append(node)
            last_coordinates = coordinates
        if len(pieces) <= limit:
            return pieces
        step = -(-len(pieces) // limit)
        joined = [pieces[start : start + step] for start in range(0, len(pieces), step)]
        return [list(itertools.chain(*neighbours)) for neighbours in joined]

    def _cut_coordinates(self, node: str) -> list[int]:
        axis = self._cut_axis
        return sorted({getattr(coord, axis) for coord in self._coords[node]}) if axis else []

    def _heading_level(self) -> tuple[str, list[list[int]]]:
        """The innermost level whose headings stay readable: one with few switches."""
        for level in self._plan.cluster.levels:
            if len(level.switches) <= _MOST_SWITCHES:
                return level.name, level.switches
        return "cluster", [list(range(len(self._plan.cluster.node_names)))]


def _switch_of(switches: list[list[int]]) -> dict[int, int]:
    """Node -> number of its switch."""
    return {node: number for number, nodes in enumerate(switches) for node in nodes}


def _range(numbers: list[int]) -> str:
    """Formats a run of numbers as 0..7; other numbers as their count and their range."""
    distinct = sorted(set(numbers))
    first = distinct[0]
    last = distinct[-1]
    if first == last:
        return str(first)
    if last - first == len(distinct) - 1:
        return f"{first}..{last}"
    return f"{len(distinct)} of {first}..{last}"
