"""The panel of a plan's picture that shows the placement of ranks on the cluster's topology."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestrator.observe.colours import (
    HATCH,
    REPLICA,
    hex_of,
    ink_on,
    replica_colour,
    replica_round,
)
from orchestrator.observe.pages.placement_grid import colour_key, label_axes
from orchestrator.plan import Plan
from orchestrator.plan.batch import replica_of
from orchestrator.plan.document import Coord

from .panels import MUTED, STROKE, ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIRE = "#9ca3af"
SWITCH = "#f3f4f6"
_TIER = 1.4  # distance between two tiers of switches
_FIRST_TIER = 0.75
_SWITCH_HEIGHT = 0.62
#: Switches of a level beyond which the level is not drawn.
_MOST_SWITCHES = 64
#: Blocks of nodes beyond which the replicas of each are not listed.
_MOST_LISTED = 16

Columns = dict[int, float]  # node -> left edge of its column
Gpu = tuple[int, int]  # node, GPU


class Topology:
    """Draws nodes as columns of GPUs under their switches. Colour and pattern show the replica of
    each rank, tint its pipeline stage."""

    MOST_LABELLED = 40  # nodes that are drawn with a label per GPU

    def __init__(self, plan: Plan):
        self.plan = plan
        self.nodes = len({rank.node for rank in plan.ranks})
        self.gpus = plan.cluster.gpus_per_node
        self.labelled = self.nodes <= self.MOST_LABELLED
        most_switches = min(self.nodes - 1, _MOST_SWITCHES)
        levels = plan.cluster.levels
        self.switches = [level for level in levels if 1 < len(level.switches) <= most_switches]
        tops = [level for level in levels if len(level.switches) == 1]
        self.tiers = self.switches + tops[:1]  # innermost first
        node_inches = 0.30 * self.gpus if self.labelled else 1.5
        self.inches = 0.42 * len(self.tiers) + node_inches + 0.35

    def draw(self, ax: Axes) -> None:
        columns = self._columns()
        if self.labelled:
            self._cells(ax, columns)
            unit = 1.0
            bottom = -self.gpus - 0.7
        else:
            unit = 1.35
            bottom = -6.6
            self._strips(ax, columns, bottom + 1.6)
        top = (_FIRST_TIER + len(self.tiers) * _TIER - 0.5) * unit
        ax.set_xlim(-0.2, max(columns.values()) + 1.1)
        ax.set_ylim(bottom, top)
        self._switches(ax, columns, unit)
        ax.axis("off")
        ax.set_title(f"Placement on the topology   {self._legend()}")

    def _columns(self) -> Columns:
        """Places the nodes from left to right, with a gap between switches."""
        gap = 0.35 if self.labelled else max(1.0, self.nodes / 150)
        columns = {}
        x = 0.0
        for block in self._blocks:
            for node in block:
                if node < self.nodes:
                    columns[node] = x
                    x += 1.0
            x += gap
        return columns

    @cached_property
    def _blocks(self) -> list[list[int]]:
        """Nodes under each innermost switch that is drawn."""
        return self.switches[0].switches if self.switches else [list(range(self.nodes))]

    @cached_property
    def _node_index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.plan.cluster.node_names)}

    # ----------------------------------------------------------------------------------------------
    #     switches

    def _switches(self, ax: Axes, columns: Columns, unit: float) -> None:
        """Draws the switches as boxes, tier by tier, each wired to the nodes or switches below."""
        stretch = _stretch(ax)
        feet = {node: (x + 0.45, 0.0) for node, x in columns.items()}  # start of the wire upwards
        for tier, level in enumerate(self.tiers):
            y = (_FIRST_TIER + tier * _TIER) * unit
            for number, switch in enumerate(level.switches):
                nodes = [node for node in switch if node in columns]
                if not nodes:
                    continue
                left_x = min(columns[node] for node in nodes)
                width = max(columns[node] for node in nodes) - left_x + 0.9
                middle = left_x + width / 2
                # A wire per node is too dense for many nodes: they share one per box.
                has_wires = self.labelled or tier > 0
                wires = {feet[node] for node in nodes} if has_wires else {(middle, 0.0)}
                for x, foot in wires:
                    ax.plot(
                        [x, x],
                        [foot, y],
                        color=WIRE,
                        linewidth=0.8,
                        zorder=1,
                    )
                self._box(
                    ax,
                    left_x=left_x,
                    y=y,
                    width=width,
                    unit=unit,
                    stretch=stretch,
                )
                name = f"{level.name} {number}" if len(level.switches) > 1 else level.name
                ax.text(
                    middle,
                    y + 0.3 * unit,
                    name,
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    zorder=4,
                )
                feet.update(dict.fromkeys(nodes, (middle, y + _SWITCH_HEIGHT * unit)))

    @staticmethod
    def _box(
        ax: Axes,
        *,
        left_x: float,
        y: float,
        width: float,
        unit: float,
        stretch: float,
    ) -> None:
        from matplotlib.patches import FancyBboxPatch

        box = FancyBboxPatch(
            (left_x, y),
            width,
            _SWITCH_HEIGHT * unit,
            boxstyle=f"round,pad=0,rounding_size={0.1 * unit / stretch}",
            mutation_aspect=stretch,
            facecolor=SWITCH,
            edgecolor=WIRE,
            linewidth=0.8,
            zorder=3,
        )
        ax.add_patch(box)

    # ----------------------------------------------------------------------------------------------
    #     nodes

    def _colour(self, coord: Coord) -> int:
        return replica_colour(replica_of(self.plan.parallel, coord), coord.pp)

    @staticmethod
    def _pattern(replica: int) -> str:
        return HATCH[replica_round(replica)]

    def _cells(self, ax: Axes, columns: Columns) -> None:
        """Draws a labelled cell per GPU, and the node names below."""
        from matplotlib.patches import Rectangle

        axes = label_axes(self.plan)
        is_crowded = len(columns) > 20 or len(axes) > 3
        label_size = 6 if is_crowded else 7.5
        for rank in self.plan.ranks:
            x = columns[self._node_index[rank.node]]
            y = -(rank.gpu + 1)
            colour = self._colour(rank.coord)
            pattern = self._pattern(replica_of(self.plan.parallel, rank.coord))
            cell = Rectangle(
                (x + 0.03, y + 0.06),
                0.86,
                0.88,
                facecolor=hex_of(colour),
                edgecolor=STROKE,
                linewidth=0,
                hatch=pattern,
            )
            ax.add_patch(cell)
            # A backdrop keeps the strokes of a pattern out of the label.
            backdrop = {"facecolor": hex_of(colour), "edgecolor": "none", "pad": 1.2}
            ax.text(
                x + 0.46,
                y + 0.5,
                ".".join(str(getattr(rank.coord, axis)) for axis in axes) or "0",
                ha="center",
                va="center",
                fontsize=label_size,
                color=hex_of(ink_on(colour)),
                bbox=backdrop if pattern else None,
            )
        for node, x in columns.items():
            ax.text(
                x + 0.46,
                -self.gpus - 0.12,
                self.plan.cluster.node_names[node],
                ha="center",
                va="top",
                fontsize=6.5 if is_crowded else 8,
                color=MUTED,
            )

    def _strips(self, ax: Axes, columns: Columns, bottom: float) -> None:
        """Draws an image per switch if there are too many nodes for labels: a column per node, a
        row per GPU, and the replicas below."""
        import numpy as np
        from matplotlib.colors import to_rgb

        par = self.plan.parallel
        coords = {(self._node_index[rank.node], rank.gpu): rank.coord for rank in self.plan.ranks}
        colours = {gpu: to_rgb(hex_of(self._colour(coord))) for gpu, coord in coords.items()}
        replicas = {gpu: replica_of(par, coord) for gpu, coord in coords.items()}
        for block in self._blocks:
            nodes = [node for node in block if node in columns]
            if not nodes:
                continue
            rows = [
                [colours.get((node, gpu), (1, 1, 1)) for node in nodes] for gpu in range(self.gpus)
            ]
            left_x = columns[nodes[0]]
            right_x = columns[nodes[-1]] + 1
            ax.imshow(
                np.array(rows),
                extent=(left_x, right_x, bottom, 0),
                aspect="auto",
                interpolation="nearest",
                zorder=2,
            )
            if par.dp * par.ep > len(REPLICA):
                self._patterns(
                    ax,
                    nodes,
                    replicas,
                    left_x=left_x,
                    height=-bottom / self.gpus,
                )
            ax.text(
                (left_x + right_x) / 2,
                bottom - 0.15,
                self._strip_label(nodes, replicas),
                ha="center",
                va="top",
                fontsize=8,
                color=MUTED,
            )

    def _strip_label(self, nodes: list[int], replicas: dict[Gpu, int]) -> str:
        label = f"{len(nodes)} nodes"
        if len(self._blocks) > _MOST_LISTED:
            return label
        gpus = itertools.product(nodes, range(self.gpus))
        block_replicas = {replicas[gpu] for gpu in gpus if gpu in replicas}
        return f"{label}\nreplica {ranges(sorted(block_replicas))}"

    def _patterns(
        self,
        ax: Axes,
        nodes: list[int],
        replicas: dict[Gpu, int],
        *,
        left_x: float,
        height: float,
    ) -> None:
        """Draws patterns over one image: a rectangle per run of nodes that hold the same replica in
        a row of GPUs."""
        from matplotlib.patches import Rectangle

        style: dict[str, Any] = {
            "facecolor": "none",
            "edgecolor": STROKE,
            "linewidth": 0,
            "zorder": 3,
        }
        for gpu in range(self.gpus):
            row = [replicas.get((node, gpu)) for node in nodes]
            for start, length, replica in _runs(row):
                pattern = "" if replica is None else self._pattern(replica)
                if pattern:
                    corner = (left_x + start, -(gpu + 1) * height)
                    ax.add_patch(Rectangle(corner, length, height, hatch=pattern, **style))

    def _legend(self) -> str:
        axes = label_axes(self.plan)
        entries = colour_key(self.plan)
        if self.labelled and axes:
            entries.append(f"label: {'.'.join(axes)}")
        entries += [
            f"{level.name} uplinks {level.oversubscription:g}:1"
            for level in self.tiers
            if level.oversubscription > 1
        ]
        return f"[{', '.join(entries)}]" if entries else ""


def _stretch(ax: Axes) -> float:
    """Height over width of a square in data units, which makes round corners round."""
    box = ax.get_window_extent()
    left_x, right_x = ax.get_xlim()
    low, high = ax.get_ylim()
    return (high - low) / box.height / ((right_x - left_x) / box.width)


def _runs(row: list[int | None]) -> Iterator[tuple[int, int, int | None]]:
    """Yields (start, length, number) of each run of equal numbers."""
    start = 0
    for number, run in itertools.groupby(row):
        length = sum(1 for _ in run)
        yield start, length, number
        start += length
