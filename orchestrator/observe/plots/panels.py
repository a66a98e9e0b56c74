"""The panels of a plan's picture. Each draws on axes that it is given."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from orchestrator import style
from orchestrator.observe.pages.placement_grid import label_axes
from orchestrator.plan import Plan
from orchestrator.plan.batch import replica_of
from orchestrator.plan.document import Coord
from orchestrator.plan.interval import interval
from orchestrator.planner.memory.rank_memory import memory_by_pp_rank
from orchestrator.planner.memory.recipe import recipe_of
from orchestrator.planner.plan_cost import pipeline_timeline
from orchestrator.style import hex_of, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MUTED = "#6b7280"
LINE = "#d1d5db"
INK = "#1f2937"
STROKE = (0.12, 0.16, 0.22, 0.45)  # of patterns, over any colour
REPLICA = tuple(map(hex_of, style.REPLICA))
#: Of the replicas beyond those, one a round of the colours.
PATTERN = ("", "////", "....", "xxxx", "----", "oooo", "\\\\\\\\", "++++")
CATEGORY = {name: hex_of(code) for name, code in style.CATEGORY_COLOUR.items()}
#: What a rank does -> colour, pattern and words. Half a backward pass has its colour and a pattern.
ACTION = {
    "F": (hex_of(style.FORWARD), "", "forward"),
    "B": (hex_of(style.BACKWARD), "", "backward"),
    "I": (hex_of(style.BACKWARD), "////", "input's gradient"),
    "W": (hex_of(style.BACKWARD), "....", "weight's gradient"),
}
GIB = 1 << 30

RC = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.edgecolor": LINE,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11.5,
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.6,
    "figure.facecolor": "white",
}


def shade(colour: str, amount: float) -> tuple[float, float, float]:
    """Mix a #rrggbb colour with white: amount 0 is the colour, 1 is white."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(channel + (1 - channel) * amount for channel in channels)  # type: ignore[return-value]


def time_unit(longest_s: float) -> tuple[float, str]:
    """The one unit of a time axis, as seconds and by name."""
    return next(
        ((s, name) for s, name in ((1.0, "seconds"), (1e-3, "milliseconds")) if longest_s >= s),
        (1e-6, "µs"),
    )


def legend(ax: Axes, **where: Any) -> None:
    """One line of colours and words above a panel."""
    small = {
        "frameon": False,
        "fontsize": 8,
        "borderaxespad": 0.0,
        "handlelength": 1.4,
        "handleheight": 1,
    }
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 0.98),
        columnspacing=1.2,
        handletextpad=0.5,
        **small,
        **where,
    )


class Topology:
    """Nodes as columns of GPUs, under the switches they hang on; colour, pattern = replica, tint =
    pipeline stage."""

    MOST_LABELLED = 40  # nodes drawn with a label a GPU

    def __init__(self, plan: Plan):
        self.plan = plan
        self.nodes = len({rank.node for rank in plan.ranks})
        self.gpus = plan.cluster.gpus_per_node
        self.labelled = self.nodes <= self.MOST_LABELLED
        self.switches = [
            level for level in plan.cluster.levels if 1 < len(level.switches) < self.nodes
        ]
        self.switches = [level for level in self.switches if len(level.switches) <= 64]
        tops = [level for level in plan.cluster.levels if len(level.switches) == 1]
        self.tiers = self.switches + tops[:1]  # innermost first
        self.inches = 0.42 * len(self.tiers) + (0.30 * self.gpus if self.labelled else 1.5) + 0.35

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
        top = (0.75 + len(self.tiers) * 1.4 - 0.5) * unit
        ax.set_xlim(-0.2, max(columns.values()) + 1.1)
        ax.set_ylim(bottom, top)
        self._switches(ax, columns, unit)
        ax.axis("off")
        ax.set_title(f"Placement on the topology   {self._legend()}")

    def _switches(self, ax: Axes, place: dict[int, float], unit: float) -> None:
        """Boxes tier by tier, each wired to what hangs below it."""
        from matplotlib.patches import FancyBboxPatch

        box = ax.get_window_extent()
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        stretch = (
            (high - low) / box.height / ((right - left) / box.width)
        )  # so that corners are round
        feet = {
            node: (x + 0.45, 0.0) for node, x in place.items()
        }  # where a node's wire upwards starts
        for tier, level in enumerate(self.tiers):
            y = (0.75 + tier * 1.4) * unit
            for number, members in enumerate(level.switches):
                members = [node for node in members if node in place]
                if not members:
                    continue
                xs = [place[node] for node in members]
                start = min(xs)
                width = max(xs) - min(xs) + 0.9
                middle = start + width / 2
                # too many nodes to wire one by one: one wire a box
                ends = (
                    {feet[node] for node in members} if self.labelled or tier else {(middle, 0.0)}
                )
                for x, foot in ends:
                    ax.plot([x, x], [foot, y], color="#9ca3af", linewidth=0.8, zorder=1)
                style = f"round,pad=0,rounding_size={0.1 * unit / stretch}"
                ax.add_patch(
                    FancyBboxPatch(
                        (start, y),
                        width,
                        0.62 * unit,
                        boxstyle=style,
                        mutation_aspect=stretch,
                        facecolor="#f3f4f6",
                        edgecolor="#9ca3af",
                        linewidth=0.8,
                        zorder=3,
                    )
                )
                name = f"{level.name} {number}" if len(level.switches) > 1 else level.name
                ax.text(
                    middle, y + 0.3 * unit, name, ha="center", va="center", fontsize=8.5, zorder=4
                )
                feet.update(dict.fromkeys(members, (middle, y + 0.62 * unit)))

    def _columns(self) -> dict[int, float]:
        """Left edge of each node's column; a gap between switches."""
        blocks = self.switches[0].switches if self.switches else [list(range(self.nodes))]
        gap = 0.35 if self.labelled else max(1.0, self.nodes / 150)
        columns = {}
        x = 0.0
        for block in blocks:
            for node in block:
                if node < self.nodes:
                    columns[node] = x
                    x += 1.0
            x += gap
        return columns

    def _colour(self, coord: Coord) -> tuple[float, float, float]:
        par = self.plan.parallel
        tint = 0.0 if par.pp == 1 else 0.55 * coord.pp / (par.pp - 1)
        return shade(REPLICA[replica_of(par, coord) % len(REPLICA)], tint)

    @staticmethod
    def _pattern(replica: int) -> str:
        return PATTERN[replica // len(REPLICA) % len(PATTERN)]

    def _cells(self, ax: Axes, columns: dict[int, float]) -> None:
        from matplotlib.patches import Rectangle

        axes = label_axes(self.plan)
        index = {name: i for i, name in enumerate(self.plan.cluster.node_names)}
        small = len(columns) > 20 or len(axes) > 3
        for rank in self.plan.ranks:
            node = index[rank.node]
            x = columns[node]
            y = -(rank.gpu + 1)
            colour = self._colour(rank.coord)
            pattern = self._pattern(replica_of(self.plan.parallel, rank.coord))
            look: dict[str, Any] = {
                "facecolor": colour,
                "edgecolor": STROKE,
                "linewidth": 0,
                "hatch": pattern,
            }
            ax.add_patch(Rectangle((x + 0.03, y + 0.06), 0.86, 0.88, **look))
            label = ".".join(str(getattr(rank.coord, axis)) for axis in axes) or "0"
            backdrop = (
                {"facecolor": colour, "edgecolor": "none", "pad": 1.2} if pattern else None
            )  # no stroke in a text
            ax.text(
                x + 0.46,
                y + 0.5,
                label,
                ha="center",
                va="center",
                fontsize=6 if small else 7.5,
                bbox=backdrop,
            )
        for node, x in columns.items():
            name = self.plan.cluster.node_names[node]
            ax.text(
                x + 0.46,
                -self.gpus - 0.12,
                name,
                ha="center",
                va="top",
                fontsize=6.5 if small else 8,
                color=MUTED,
            )

    def _strips(self, ax: Axes, columns: dict[int, float], bottom: float) -> None:
        """Too many nodes for a label a GPU: an image a switch, a column a node, a row a GPU; its
        replicas below."""
        import numpy as np

        index = {name: i for i, name in enumerate(self.plan.cluster.node_names)}
        at = {(index[rank.node], rank.gpu): rank.coord for rank in self.plan.ranks}
        colour = {where: self._colour(coord) for where, coord in at.items()}
        replica = {where: replica_of(self.plan.parallel, coord) for where, coord in at.items()}
        many = self.plan.parallel.dp * self.plan.parallel.ep > len(REPLICA)
        blocks = self.switches[0].switches if self.switches else [list(range(self.nodes))]
        for block in blocks:
            members = [node for node in block if node in columns]
            if not members:
                continue
            image = np.array(
                [
                    [colour.get((node, gpu), (1, 1, 1)) for node in members]
                    for gpu in range(self.gpus)
                ]
            )
            left = columns[members[0]]
            right = columns[members[-1]] + 1
            ax.imshow(
                image,
                extent=(left, right, bottom, 0),
                aspect="auto",
                interpolation="nearest",
                zorder=2,
            )
            if many:
                self._patterns(ax, members, replica, left, -bottom / self.gpus)
            held = sorted(
                {
                    replica[node, gpu]
                    for node in members
                    for gpu in range(self.gpus)
                    if (node, gpu) in replica
                }
            )
            label = f"{len(members)} nodes" + (
                f"\nreplica {ranges(held)}" if len(blocks) <= 16 else ""
            )
            ax.text(
                (left + right) / 2,
                bottom - 0.15,
                label,
                ha="center",
                va="top",
                fontsize=8,
                color=MUTED,
            )

    def _patterns(
        self,
        ax: Axes,
        members: list[int],
        replica: dict[tuple[int, int], int],
        left: float,
        height: float,
    ) -> None:
        """Patterns over one image: a rectangle for each run of nodes that hold one replica in a row
        of GPUs."""
        from matplotlib.patches import Rectangle

        for gpu in range(self.gpus):
            runs = itertools.groupby(
                enumerate(members), key=lambda indexed_node: replica.get((indexed_node[1], gpu))
            )
            for number, run in runs:
                pattern = "" if number is None else self._pattern(number)
                cells = list(run)
                if pattern:
                    look: dict[str, Any] = {
                        "facecolor": "none",
                        "edgecolor": STROKE,
                        "linewidth": 0,
                        "zorder": 3,
                    }
                    start = left + cells[0][0]
                    ax.add_patch(
                        Rectangle(
                            (start, -(gpu + 1) * height), len(cells), height, hatch=pattern, **look
                        )
                    )

    def _legend(self) -> str:
        par = self.plan.parallel
        axes = label_axes(self.plan)
        entries = []
        if par.dp * par.ep > 1:
            replicas = par.dp * par.ep
            which = "dp, ep" if par.ep > 1 else "dp"
            entries.append(f"colour{' and pattern' * (replicas > len(REPLICA))}: replica ({which})")
        if par.pp > 1:
            entries.append("tint: stage (pp)")
        if self.labelled and axes:
            entries.append(f"label: {'.'.join(axes)}")
        entries += [
            f"{level.name} uplinks {level.oversubscription:g}:1"
            for level in self.tiers
            if level.oversubscription > 1
        ]
        return f"[{', '.join(entries)}]" if entries else ""


def memory(ax: Axes, plan: Plan) -> None:
    """Stacked bytes of each pipeline stage against the GPU's capacity."""
    recipe = recipe_of(plan.time.software or "orch", plan.job.optim)
    stages = memory_by_pp_rank(
        plan.cluster, plan.model, plan.parallel, plan.job.train, recipe, plan.job.matmul
    )
    left = [0.0] * len(stages)
    rows = list(range(len(stages)))
    for name, colour in CATEGORY.items():
        sizes = [getattr(stage, name) / GIB for stage in stages]
        ax.barh(rows, sizes, left=left, color=colour, height=0.72, label=name, linewidth=0)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    capacity = plan.memory.capacity / GIB
    ax.axvline(capacity, color=INK, linewidth=1.4, linestyle=(0, (4, 3)))
    most = max(capacity, *left)
    ax.set_xlim(0, most * 1.14)
    for row, total in zip(rows, left, strict=True):
        if len(rows) <= 16:  # beyond the line of the capacity, which strikes none of them
            weight = "bold" if total > capacity else "normal"
            ax.text(
                most * 1.13,
                row,
                f"{total:.1f}",
                ha="right",
                va="center",
                fontsize=8,
                fontweight=weight,
            )
    ax.set_ylim(max(len(rows), 3) - 0.4, -0.6)
    step = max(1, math.ceil(len(rows) / 16))
    ax.set_yticks(rows[::step], [f"pp {row}" for row in rows[::step]])
    ax.set_xlabel(f"GiB a rank (dashed: capacity {capacity:.1f})")
    legend(ax, ncols=5)
    ax.set_title("Memory by pipeline stage", pad=24)
    ax.tick_params(length=0)


def time(ax: Axes, plan: Plan) -> None:
    """Where a step goes, and the whole with its 95 % interval."""
    value = plan.time
    rows = [("compute", value.compute_s, hex_of(style.COMPUTE))]
    sent = hex_of(style.COMMUNICATION)
    rows += [
        (f"{axis} comm.", cost, sent) for axis, cost in value.exposed_comm_s.items() if cost > 0
    ]
    if plan.parallel.pp > 1:
        bubble = value.step_s - value.compute_s - sum(value.exposed_comm_s.values())
        rows.append(("bubble", max(0.0, bubble), hex_of(style.IDLE)))
    rows.append(("step", value.step_s, "white"))
    low, high = interval(value.step_s, value.sd)
    longest = max(high, *(cost for _, cost, _ in rows))
    scale, unit = time_unit(longest)
    spread = [[(value.step_s - low) / scale], [(high - value.step_s) / scale]]
    ax.errorbar(value.step_s / scale, len(rows) - 1, xerr=spread, color=INK, capsize=4)
    for row, (name, cost, colour) in enumerate(rows):
        ax.barh(
            row,
            cost / scale,
            color=colour,
            height=0.62,
            linewidth=0.8,
            edgecolor=MUTED if name == "step" else colour,
        )
        end = high if name == "step" else cost
        ax.text(
            (end + 0.015 * longest) / scale,
            row,
            f"{seconds(cost)}  {cost / value.step_s:.1%}",
            va="center",
            fontsize=8.5,
        )
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.set_ylim(max(len(rows), 4) - 0.4, -0.6)
    ax.set_xlim(0, longest * 1.32 / scale)
    ax.set_xlabel(unit)
    ax.set_title("Time of a step", pad=24)
    ax.tick_params(length=0)


def timeline_inches(plan: Plan) -> float:
    return min(4.0, 0.55 + 0.2 * min(plan.parallel.pp, 32) + 0.5)


def ranges(numbers: list[int]) -> str:
    """Sorted numbers with runs as ranges; many pieces as their number and ends."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    if len(runs) > 3:
        return f"{len(numbers)} of {numbers[0]}..{numbers[-1]}"
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)


def pipeline(ax: Axes, plan: Plan) -> None:
    """The first micro-batches of a step on every pipeline rank, with the plan's own stage times."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    drawn = pipeline_timeline(plan)
    scale, unit = time_unit(drawn.makespan)
    chunks = plan.parallel.vpp
    boxes: dict[str, list[Any]] = {name: [] for name in ACTION}
    colours: dict[str, list[Any]] = {name: [] for name in ACTION}
    for rank, spans in enumerate(drawn.spans):
        for span in spans:
            a = span.start / scale
            b = span.end / scale
            low = rank - 0.42
            high = rank + 0.42
            kind = span.action.kind.name
            boxes[kind].append([(a, low), (b, low), (b, high), (a, high)])
            chunk = drawn.schedule.model_stage(span.action.stage) // plan.parallel.pp
            colour, pattern, _ = ACTION[kind]
            colours[kind].append(shade(colour, 0.5 * chunk / max(1, chunks - 1)))
            text = str(span.action.micro_batch)
            if (span.end - span.start) / drawn.makespan > 0.006 * (
                1 + len(text)
            ) and plan.parallel.pp <= 16:
                plain = (
                    {"facecolor": colours[kind][-1], "edgecolor": "none", "pad": 0.5}
                    if pattern
                    else None
                )
                ax.text((a + b) / 2, rank, text, ha="center", va="center", fontsize=6.5, bbox=plain)
    handles = []
    for kind, (colour, pattern, words) in ACTION.items():
        if boxes[kind]:
            how: dict[str, Any] = {"edgecolors": STROKE, "linewidths": 0, "hatch": pattern}
            ax.add_collection(PolyCollection(boxes[kind], facecolors=colours[kind], **how))
            ax.add_collection(
                PolyCollection(boxes[kind], facecolors="none", edgecolors="white", linewidths=0.5)
            )
            handles.append(
                Patch(facecolor=colour, hatch=pattern, edgecolor=STROKE, linewidth=0, label=words)
            )
    ax.set_xlim(0, drawn.makespan * 1.002 / scale)
    ax.set_ylim(plan.parallel.pp - 0.4, -0.6)
    step = max(1, math.ceil(plan.parallel.pp / 16))
    ax.set_yticks(
        range(0, plan.parallel.pp, step), [f"pp {r}" for r in range(0, plan.parallel.pp, step)]
    )
    ax.set_xlabel(unit)
    shown = drawn.schedule.micro_batches
    which = (
        f"all {shown}"
        if shown == plan.parallel.micro_batches
        else f"first {shown} of {plan.parallel.micro_batches}"
    )
    legend(ax, handles=handles, ncols=len(handles))
    ax.set_title(f"Pipeline timeline, {plan.parallel.schedule}   [{which} micro-batches]", pad=24)
    ax.tick_params(length=0)
