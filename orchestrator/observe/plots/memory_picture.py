"""Draws the memory of a rank's first steps as a stacked timeline (Ultra-Scale Playbook, "Memory
usage in Transformers")."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from orchestrator.observe.colours import hex_of
from orchestrator.observe.pages.plan_page import CATEGORIES
from orchestrator.observe.rank_trace import Timeline
from orchestrator.style import binary, seconds

from .panels import ACTION, CATEGORY, INK, MUTED, RC, STROKE
from .plan_picture import matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {
    "params": "parameters",
    "grads": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations",
    "buffers": "buffers",
}
_CHARACTER = 0.0075  # width of a label's character over the panel's width


def figure(timeline: Timeline, title: str) -> Figure:
    """Draws a panel of stacked bytes by category, and below it the actions of the rank."""
    with matplotlib().rc_context(RC):
        from matplotlib.figure import Figure

        result = Figure(figsize=(12, 5.4))
        spec = result.add_gridspec(
            2,
            1,
            height_ratios=[12, 1],
            hspace=0.08,
            left=0.08,
            right=0.84,
            top=0.86,
            bottom=0.1,
        )
        above = result.add_subplot(spec[0])
        below = result.add_subplot(spec[1], sharex=above)
        result.text(
            0.08,
            0.955,
            title,
            fontsize=15,
            fontweight="bold",
            va="center",
        )
        result.text(
            0.08,
            0.905,
            _subtitle(timeline),
            fontsize=10,
            color=MUTED,
            va="center",
        )
        _memory(above, timeline)
        _actions(below, timeline)
        return result


def _subtitle(timeline: Timeline) -> str:
    peaks = [f"{step.name}: {binary(sum(timeline.peak(step).values()))}" for step in timeline.steps]
    return f"memory of rank {timeline.rank}   |   peak of {', '.join(peaks)}"


def _memory(ax: Axes, timeline: Timeline) -> None:
    samples = timeline.memory
    times = [sample.at * 1e3 for sample in samples]
    peak = max((sum(sample.bytes.values()) for sample in samples), default=1)
    scale, unit = _byte_unit(peak)
    layers = [[sample.bytes[name] / scale for sample in samples] for name in CATEGORIES]
    colours = [CATEGORY[name] for name in CATEGORIES]
    labels = [NAMES[name] for name in CATEGORIES]
    ax.stackplot(
        times,
        layers,
        step="post",
        colors=colours,
        labels=labels,
        linewidth=0,
    )
    _memory_legend(ax)
    ax.set_ylabel(unit)
    ax.set_ylim(0, 1.1 * peak / scale)
    ax.margins(x=0)
    ax.tick_params(labelbottom=False)
    ax.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    ax.set_axisbelow(True)
    backdrop = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides the grid
    for step in timeline.steps:
        ax.axvline(
            step.start * 1e3,
            color=INK,
            linewidth=0.8,
            linestyle=(0, (4, 3)),
        )
        label = f" {step.name}, {seconds(step.end - step.start)}"
        label_ms = len(label) * _CHARACTER * (times[-1] - times[0])
        if label_ms > (step.end - step.start) * 1e3:
            continue  # the next step's line would strike the label
        ax.text(
            step.start * 1e3,
            1.08 * peak / scale,
            label,
            va="top",
            fontsize=9,
            color=INK,
            bbox=backdrop,
        )


def _byte_unit(peak: int) -> tuple[int, str]:
    """The unit of the memory axis: its bytes and its name."""
    if peak >= 1 << 30:
        return 1 << 30, "GiB"
    if peak >= 1 << 20:
        return 1 << 20, "MiB"
    return 1 << 10, "KiB"


def _memory_legend(ax: Axes) -> None:
    """Lists the categories in the order of the stack, the topmost first."""
    handles, names = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1],
        names[::-1],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        borderaxespad=0,
    )


def _actions(ax: Axes, timeline: Timeline) -> None:
    for name, spans in itertools.groupby(sorted(timeline.actions), key=lambda span: span.name):
        bars = [(span.start * 1e3, (span.end - span.start) * 1e3) for span in spans]
        colour = MUTED
        pattern = ""
        label = name
        if name in ACTION:
            tints, pattern, label = ACTION[name]
            colour = hex_of(tints[0])
        ax.broken_barh(
            bars,
            (0, 1),
            label=label,
            facecolors=colour,
            edgecolor=STROKE,
            linewidth=0,
            hatch=pattern,
        )
    ax.set_yticks([])
    ax.set_ylim(0, 1)
    ax.set_xlabel("milliseconds")
    ax.spines["left"].set_visible(False)
    ax.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 2.6),
        frameon=False,
        borderaxespad=0,
        handlelength=1.4,
    )
