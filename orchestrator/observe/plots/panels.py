"""The panels of a plan's picture. Each draws on axes that it is given."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from orchestrator.observe.pages.placement_grid import label_axes
from orchestrator.plan import Plan
from orchestrator.plan.batch import replica_of
from orchestrator.plan.interval import interval
from orchestrator.plan.schedules import Kind
from orchestrator.planner.memory.rank_memory import memory_by_pp_rank
from orchestrator.planner.memory.recipe import recipe_of
from orchestrator.planner.plan_cost import pipeline_timeline
from orchestrator.style import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MUTED, LINE, INK = "#6b7280", "#d1d5db", "#1f2937"
#: Okabe & Ito 2008, softened; cycles over data-parallel replicas.
REPLICA = ("#4c9fd6", "#f0a93b", "#3bb28a", "#e07a5f", "#a78bda", "#6cc5d9", "#d6c14a", "#d783b0")
CATEGORY = {
    "params": "#4c9fd6",
    "grads": "#f0a93b",
    "optimizer": "#3bb28a",
    "activations": "#e07a5f",
    "buffers": "#a78bda",
}
AXIS = {"tp": "#4c9fd6", "cp": "#6cc5d9", "ep": "#a78bda", "pp": "#f0a93b", "dp": "#3bb28a"}
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
    "figure.facecolor": "white",
}


def shade(colour: str, amount: float) -> tuple[float, float, float]:
    """Mix a #rrggbb colour with white: amount 0 is the colour, 1 is white."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(part + (1 - part) * amount for part in parts)  # type: ignore[return-value]


class Topology:
    """Nodes as columns of GPUs, under the switches they hang on; colour = replica, tint = pipeline stage."""

    MOST_LABELLED = 40  # nodes drawn with a label a GPU

    def __init__(self, plan: Plan):
        self.plan = plan
        self.nodes = len({rank.node for rank in plan.ranks})
        self.gpus = plan.cluster.gpus_per_node
        self.labelled = self.nodes <= self.MOST_LABELLED
        self.switches = [level for level in plan.cluster.levels if 1 < len(level.switches) < self.nodes]
        self.switches = [level for level in self.switches if len(level.switches) <= 64]
        tops = [level for level in plan.cluster.levels if len(level.switches) == 1]
        self.tiers = self.switches + tops[:1]  # innermost first
        self.inches = 0.42 * len(self.tiers) + (0.30 * self.gpus if self.labelled else 1.5) + 0.35

    def draw(self, ax: Axes) -> None:
        place = self._columns()
        colour = self._colours()
        if self.labelled:
            self._cells(ax, place, colour)
            unit, bottom = 1.0, -self.gpus - 0.7
        else:
            unit, bottom = 1.35, -5.9
            self._strips(ax, place, colour, bottom + 0.9)
        top = (0.75 + len(self.tiers) * 1.4 - 0.5) * unit
        ax.set_xlim(-0.2, max(place.values()) + 1.1)
        ax.set_ylim(bottom, top)
        self._switches(ax, place, unit)
        ax.axis("off")
        ax.set_title(f"Placement on the topology   {self._legend()}")

    def _switches(self, ax: Axes, place: dict[int, float], unit: float) -> None:
        """Boxes tier by tier, each wired to what hangs below it."""
        from matplotlib.patches import FancyBboxPatch

        box = ax.get_window_extent()
        (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
        stretch = (high - low) / box.height / ((right - left) / box.width)  # so that corners are round
        feet = {node: (x + 0.45, 0.0) for node, x in place.items()}  # where a node's wire upwards starts
        for tier, level in enumerate(self.tiers):
            y = (0.75 + tier * 1.4) * unit
            for number, members in enumerate(level.switches):
                members = [node for node in members if node in place]
                if not members:
                    continue
                xs = [place[node] for node in members]
                start, width = min(xs), max(xs) - min(xs) + 0.9
                middle = start + width / 2
                # too many nodes to wire one by one: one wire a box
                ends = {feet[node] for node in members} if self.labelled or tier else {(middle, 0.0)}
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
                ax.text(middle, y + 0.3 * unit, name, ha="center", va="center", fontsize=8.5, zorder=4)
                feet.update(dict.fromkeys(members, (middle, y + 0.62 * unit)))

    def _columns(self) -> dict[int, float]:
        """Left edge of each node's column; a gap between switches."""
        blocks = self.switches[0].switches if self.switches else [list(range(self.nodes))]
        gap = 0.35 if self.labelled else max(1.0, self.nodes / 150)
        place, x = {}, 0.0
        for block in blocks:
            for node in block:
                if node < self.nodes:
                    place[node] = x
                    x += 1.0
            x += gap
        return place

    def _colours(self) -> dict[tuple[int, int], tuple[float, float, float]]:
        par = self.plan.parallel
        index = {name: i for i, name in enumerate(self.plan.cluster.node_names)}
        result = {}
        for rank in self.plan.ranks:
            tint = 0.0 if par.pp == 1 else 0.55 * rank.coord.pp / (par.pp - 1)
            replica = replica_of(par, rank.coord)
            result[index[rank.node], rank.gpu] = shade(REPLICA[replica % len(REPLICA)], tint)
        return result

    def _cells(self, ax: Axes, place: dict[int, float], colour: dict[tuple[int, int], Any]) -> None:
        from matplotlib.patches import Rectangle

        axes = label_axes(self.plan)
        index = {name: i for i, name in enumerate(self.plan.cluster.node_names)}
        small = len(place) > 20 or len(axes) > 3
        for rank in self.plan.ranks:
            node = index[rank.node]
            x, y = place[node], -(rank.gpu + 1)
            patch = Rectangle((x + 0.03, y + 0.06), 0.86, 0.88, facecolor=colour[node, rank.gpu], edgecolor="none")
            ax.add_patch(patch)
            text = ".".join(str(getattr(rank.coord, axis)) for axis in axes) or "0"
            ax.text(x + 0.46, y + 0.5, text, ha="center", va="center", fontsize=6 if small else 7.5)
        for node, x in place.items():
            name = self.plan.cluster.node_names[node]
            ax.text(x + 0.46, -self.gpus - 0.12, name, ha="center", va="top", fontsize=6.5 if small else 8, color=MUTED)

    def _strips(self, ax: Axes, place: dict[int, float], colour: dict[tuple[int, int], Any], bottom: float) -> None:
        """Too many nodes for labels: one image a switch, a column a node, a row a GPU."""
        import numpy as np

        blocks = self.switches[0].switches if self.switches else [list(range(self.nodes))]
        for block in blocks:
            members = [node for node in block if node in place]
            if not members:
                continue
            image = np.array([[colour.get((node, gpu), (1, 1, 1)) for node in members] for gpu in range(self.gpus)])
            left, right = place[members[0]], place[members[-1]] + 1
            ax.imshow(image, extent=(left, right, bottom, 0), aspect="auto", interpolation="nearest", zorder=2)
            ax.text((left + right) / 2, bottom - 0.15, f"{len(members)} nodes", ha="center", va="top", color=MUTED)

    def _legend(self) -> str:
        par, axes = self.plan.parallel, label_axes(self.plan)
        parts = []
        if par.dp * par.ep > 1:
            parts.append("colour: replica (dp)")
        if par.pp > 1:
            parts.append("tint: stage (pp)")
        if self.labelled and axes:
            parts.append(f"label: {'.'.join(axes)}")
        parts += [
            f"{level.name} uplinks {level.oversubscription:g}:1" for level in self.tiers if level.oversubscription > 1
        ]
        return f"[{', '.join(parts)}]" if parts else ""


def memory(ax: Axes, plan: Plan) -> None:
    """Stacked bytes of each pipeline stage against the GPU's capacity."""
    recipe = recipe_of(plan.time.software or "orch", plan.job.optim)
    stages = memory_by_pp_rank(plan.cluster, plan.model, plan.parallel, plan.job.train, recipe, plan.job.matmul)
    left = [0.0] * len(stages)
    rows = list(range(len(stages)))
    for name, colour in CATEGORY.items():
        sizes = [getattr(stage, name) / GIB for stage in stages]
        ax.barh(rows, sizes, left=left, color=colour, height=0.72, label=name, linewidth=0)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    capacity = plan.memory.capacity / GIB
    ax.axvline(capacity, color="#b91c1c", linewidth=1.4, linestyle=(0, (4, 3)))
    ax.set_xlim(0, max(capacity, *left) * 1.14)
    for row, total in zip(rows, left, strict=True):
        if len(rows) <= 16:
            ax.text(total, row, f" {total:.1f}", va="center", fontsize=8, color="#b91c1c" if total > capacity else INK)
    ax.set_ylim(max(len(rows), 3) - 0.4, -0.6)
    step = max(1, math.ceil(len(rows) / 16))
    ax.set_yticks(rows[::step], [f"pp {row}" for row in rows[::step]])
    ax.set_xlabel(f"GiB a rank (dashed: capacity {capacity:.1f})")
    ax.legend(ncols=5, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(-0.01, 0.98), borderaxespad=0.0,
              handlelength=1, handleheight=1, columnspacing=1.2, handletextpad=0.5)  # fmt: skip
    ax.set_title("Memory by pipeline stage", pad=24)
    ax.tick_params(length=0)


def time(ax: Axes, plan: Plan) -> None:
    """Where a step goes, and the whole with its 95 % interval."""
    value = plan.time
    rows = [("compute", value.compute_s, "#3bb28a")]
    rows += [(f"{axis} comm.", cost, AXIS[axis]) for axis, cost in value.exposed_comm_s.items() if cost > 0]
    if plan.parallel.pp > 1:
        bubble = value.step_s - value.compute_s - sum(value.exposed_comm_s.values())
        rows.append(("bubble", max(0.0, bubble), "#9ca3af"))
    rows.append(("step", value.step_s, LINE))
    low, high = interval(value.step_s, value.sd)
    longest = max(high, *(cost for _, cost, _ in rows))
    ax.errorbar(value.step_s, len(rows) - 1, xerr=[[value.step_s - low], [high - value.step_s]], color=INK, capsize=4)
    for row, (name, cost, colour) in enumerate(rows):
        ax.barh(row, cost, color=colour, height=0.62, linewidth=0)
        end = high if name == "step" else cost
        ax.text(end + 0.015 * longest, row, f"{seconds(cost)}  {cost / value.step_s:.1%}", va="center", fontsize=8.5)
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.set_ylim(max(len(rows), 4) - 0.4, -0.6)
    ax.set_xlim(0, longest * 1.32)
    ax.xaxis.set_major_formatter(lambda value, _: seconds(value))
    ax.set_title("Time of a step", pad=24)
    ax.tick_params(length=0)


def timeline_inches(plan: Plan) -> float:
    return min(4.0, 0.55 + 0.2 * min(plan.parallel.pp, 32) + 0.5)


def pipeline(ax: Axes, plan: Plan) -> None:
    """The first micro-batches of a step on every pipeline rank, with the plan's own stage times."""
    from matplotlib.collections import PolyCollection

    drawn = pipeline_timeline(plan)
    chunks, kinds = plan.parallel.vpp, {Kind.F: "#4c9fd6", Kind.B: "#f0a93b", Kind.I: "#e8c15f", Kind.W: "#3bb28a"}
    boxes, colours = [], []
    for rank, spans in enumerate(drawn.spans):
        for span in spans:
            a, b, low, high = span.start, span.end, rank - 0.42, rank + 0.42
            boxes.append([(a, low), (b, low), (b, high), (a, high)])
            chunk = drawn.schedule.model_stage(span.action.stage) // plan.parallel.pp
            colours.append(shade(kinds[span.action.kind], 0.5 * chunk / max(1, chunks - 1)))
            if (span.end - span.start) / drawn.makespan > 0.012 and plan.parallel.pp <= 16:
                x = (span.start + span.end) / 2
                ax.text(x, rank, str(span.action.micro_batch), ha="center", va="center", fontsize=6.5)
    ax.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.5))
    ax.set_xlim(0, drawn.makespan * 1.002)
    ax.set_ylim(plan.parallel.pp - 0.4, -0.6)
    step = max(1, math.ceil(plan.parallel.pp / 16))
    ax.set_yticks(range(0, plan.parallel.pp, step), [f"pp {r}" for r in range(0, plan.parallel.pp, step)])
    ax.xaxis.set_major_formatter(lambda value, _: seconds(value))
    shown = drawn.schedule.micro_batches
    which = (
        f"all {shown}" if shown == plan.parallel.micro_batches else f"first {shown} of {plan.parallel.micro_batches}"
    )
    legend = "blue: forward, orange: backward"
    if drawn.schedule.splits_backward:
        legend = "blue: forward, yellow: input gradient, green: weight gradient, orange: both"
    ax.set_title(f"Pipeline timeline, {plan.parallel.schedule}   [{which} micro-batches; {legend}]")
    ax.tick_params(length=0)
