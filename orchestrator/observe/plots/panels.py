"""The panels of memory, time and pipeline in a plan's picture. Each function draws on the axes that
it is given."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from orchestrator.cost.memory.rank_memory import memory_by_pp_rank
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.of_plan import pipeline_timeline
from orchestrator.cost.workload import Workload
from orchestrator.observe import colours
from orchestrator.observe.colours import hex_of, ink_on
from orchestrator.plan import Plan
from orchestrator.plan.interval import interval
from orchestrator.plan.schedules import Span, Timeline
from orchestrator.style import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

MUTED = "#6b7280"
LINE = "#d1d5db"
INK = "#1f2937"
STROKE = (0.12, 0.16, 0.22, 0.45)  # of patterns, over any colour
CATEGORY = {name: hex_of(code) for name, code in colours.CATEGORY.items()}
#: Kind of action -> colours of even and odd chunks, pattern and label. The two halves of a backward
#: pass have its colours and a pattern.
ACTION = {
    "F": (colours.FORWARD, "", "forward"),
    "B": (colours.BACKWARD, "", "backward"),
    "I": (colours.BACKWARD, "////", "input's gradient"),
    "W": (colours.BACKWARD, "....", "weight's gradient"),
}
GIB = 1 << 30
_MOST_ROWS = 16  # pipeline ranks beyond which rows have no labels

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


def time_unit(longest_s: float) -> tuple[float, str]:
    """The unit of a time axis: its seconds and its name."""
    for unit_s, name in ((1.0, "seconds"), (1e-3, "milliseconds")):
        if longest_s >= unit_s:
            return unit_s, name
    return 1e-6, "µs"


def legend(ax: Axes, **options: Any) -> None:
    """Draws the legend, one line above a panel."""
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
        **options,
    )


def memory(ax: Axes, plan: Plan) -> None:
    """Draws the stacked bytes of each pipeline stage against the GPU's capacity."""
    recipe = recipe_of(plan.time.software or "orch", plan.job.optim)
    workload = Workload.of_plan(plan)
    stages = memory_by_pp_rank(workload, plan.cluster, recipe, plan.job.matmul)
    totals = [0.0] * len(stages)
    rows = list(range(len(stages)))
    for name, colour in CATEGORY.items():
        sizes = [getattr(stage, name) / GIB for stage in stages]
        ax.barh(
            rows,
            sizes,
            left=totals,
            color=colour,
            height=0.72,
            label=name,
            linewidth=0,
        )
        totals = [total + size for total, size in zip(totals, sizes, strict=True)]
    capacity = plan.memory.capacity / GIB
    ax.axvline(
        capacity,
        ymax=0.96,  # below the legend
        color=INK,
        linewidth=1.4,
        linestyle=(0, (4, 3)),
    )
    longest = max(capacity, *totals)
    ax.set_xlim(0, longest * 1.14)
    if len(rows) <= _MOST_ROWS:
        _memory_totals(ax, totals, capacity, x=longest * 1.13)
    ax.set_ylim(max(len(rows), 3) - 0.4, -0.6)
    step = max(1, math.ceil(len(rows) / _MOST_ROWS))
    ax.set_yticks(rows[::step], [f"pp {row}" for row in rows[::step]])
    ax.set_xlabel(f"GiB per rank (dashed: capacity {capacity:.1f})")
    legend(ax, ncols=5)
    ax.set_title("Memory by pipeline stage", pad=24)
    ax.tick_params(length=0)


def _memory_totals(ax: Axes, totals: list[float], capacity: float, x: float) -> None:
    """Writes each total to the right of the capacity's line, so that the line strikes none."""
    for row, total in enumerate(totals):
        ax.text(
            x,
            row,
            f"{total:.1f}",
            ha="right",
            va="center",
            fontsize=8,
            fontweight="bold" if total > capacity else "normal",
        )


def time(ax: Axes, plan: Plan) -> None:
    """Draws the parts of a step, and the whole step with its 95 % interval."""
    prediction = plan.time
    rows = _time_rows(plan)
    low, high = interval(prediction.step_s, prediction.sd)
    longest = max(high, *(cost for _, cost, _ in rows))
    scale, unit = time_unit(longest)
    spread = [[(prediction.step_s - low) / scale], [(high - prediction.step_s) / scale]]
    ax.errorbar(
        prediction.step_s / scale,
        len(rows) - 1,
        xerr=spread,
        color=INK,
        capsize=4,
    )
    for row, (name, cost, colour) in enumerate(rows):
        is_step = name == "step"
        ax.barh(
            row,
            cost / scale,
            color=colour,
            height=0.62,
            linewidth=0.8,
            edgecolor=MUTED if is_step else colour,
        )
        end = high if is_step else cost
        ax.text(
            (end + 0.015 * longest) / scale,
            row,
            f"{seconds(cost)}  {cost / prediction.step_s:.1%}",
            va="center",
            fontsize=8.5,
        )
    ax.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    ax.set_ylim(max(len(rows), 4) - 0.4, -0.6)
    ax.set_xlim(0, longest * 1.32 / scale)
    ax.set_xlabel(unit)
    ax.set_title("Time of a step", pad=24)
    ax.tick_params(length=0)


def _time_rows(plan: Plan) -> list[tuple[str, float, str]]:
    """(name, seconds, colour) of each bar; the last one is the whole step."""
    prediction = plan.time
    exposed = prediction.exposed_comm_s
    communication = hex_of(colours.COMMUNICATION)
    rows = [("compute", prediction.compute_s, hex_of(colours.COMPUTE))]
    rows += [
        (
            f"{axis} comm.",
            cost,
            communication,
        )
        for axis, cost in exposed.items()
        if cost > 0
    ]
    if plan.parallel.pp > 1:
        bubble = prediction.step_s - prediction.compute_s - sum(exposed.values())
        rows.append(("bubble", max(0.0, bubble), hex_of(colours.IDLE)))
    rows.append(("step", prediction.step_s, "white"))
    return rows


def timeline_inches(plan: Plan) -> float:
    return min(4.0, 0.55 + 0.2 * min(plan.parallel.pp, 32) + 0.5)


def ranges(numbers: list[int]) -> str:
    """Formats sorted numbers with runs as ranges; more than three runs as their count and ends."""
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
    """Draws the first micro-batches of a step on every pipeline rank, with the plan's stage
    times."""
    timeline = pipeline_timeline(plan)
    pp = plan.parallel.pp
    scale, unit = time_unit(timeline.makespan)
    handles = _actions(ax, plan, timeline, scale)
    ax.set_xlim(0, timeline.makespan * 1.002 / scale)
    ax.set_ylim(pp - 0.4, -0.6)
    ticks = range(0, pp, max(1, math.ceil(pp / _MOST_ROWS)))
    ax.set_yticks(ticks, [f"pp {rank}" for rank in ticks])
    ax.set_xlabel(unit)
    legend(ax, handles=handles, ncols=len(handles))
    shown = timeline.schedule.micro_batches
    count = f"first {shown} of {plan.parallel.micro_batches}"
    if shown == plan.parallel.micro_batches:
        count = f"all {shown}"
    tint = ", tint: odd chunks of layers" if plan.parallel.vpp > 1 else ""
    title = f"Pipeline timeline, {plan.parallel.schedule}   [{count} micro-batches{tint}]"
    ax.set_title(title, pad=24)
    ax.tick_params(length=0)


def _actions(ax: Axes, plan: Plan, timeline: Timeline, scale: float) -> list[Patch]:
    """Draws all actions. Returns the handles for the legend."""
    pp = plan.parallel.pp
    boxes: dict[str, list[Any]] = {name: [] for name in ACTION}
    fills: dict[str, list[Any]] = {name: [] for name in ACTION}
    for rank, spans in enumerate(timeline.spans):
        for span in spans:
            kind = span.action.kind.name
            chunk = timeline.schedule.model_stage(span.action.stage) // pp
            colour = ACTION[kind][0][chunk % 2]
            boxes[kind].append(_box(span, rank, scale))
            fills[kind].append(hex_of(colour))
            label = str(span.action.micro_batch)
            label_share = 0.006 * (1 + len(label))
            if pp <= _MOST_ROWS and (span.end - span.start) / timeline.makespan > label_share:
                _action_label(
                    ax,
                    span,
                    rank,
                    scale,
                    label=label,
                    colour=colour,
                )
    return _action_boxes(ax, boxes, fills)


def _box(span: Span, rank: int, scale: float) -> list[tuple[float, float]]:
    """The corners of an action's box."""
    start = span.start / scale
    end = span.end / scale
    low = rank - 0.42
    high = rank + 0.42
    return [(start, low), (end, low), (end, high), (start, high)]


def _action_label(
    ax: Axes,
    span: Span,
    rank: int,
    scale: float,
    *,
    label: str,
    colour: int,
) -> None:
    """Writes an action's micro-batch, on a backdrop that hides the strokes of a pattern."""
    _, pattern, _ = ACTION[span.action.kind.name]
    backdrop = {"facecolor": hex_of(colour), "edgecolor": "none", "pad": 0.5}
    ax.text(
        (span.start / scale + span.end / scale) / 2,
        rank,
        label,
        ha="center",
        va="center",
        fontsize=6.5,
        color=hex_of(ink_on(colour)),
        bbox=backdrop if pattern else None,
    )


def _action_boxes(
    ax: Axes,
    boxes: dict[str, list[Any]],
    fills: dict[str, list[Any]],
) -> list[Patch]:
    """Draws the boxes of each kind of action. Returns the handles for the legend."""
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    handles = []
    for kind, (tints, pattern, label) in ACTION.items():
        if not boxes[kind]:
            continue
        filled = PolyCollection(
            boxes[kind],
            facecolors=fills[kind],
            edgecolors=STROKE,
            linewidths=0,
            hatch=pattern,
        )
        ax.add_collection(filled)
        border = PolyCollection(
            boxes[kind],
            facecolors="none",
            edgecolors="white",
            linewidths=0.5,
        )
        ax.add_collection(border)
        handle = Patch(
            facecolor=hex_of(tints[0]),
            hatch=pattern,
            edgecolor=STROKE,
            linewidth=0,
            label=label,
        )
        handles.append(handle)
    return handles
