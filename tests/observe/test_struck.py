"""What is written in a picture can be read: no line through it, one unit an axis, replicas beyond
eight by pattern."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from orchestrator.plan.batch import replica_of
from orchestrator.plan.worker import trace_file
from tests.observe.test_expert_report import lines
from tests.observe.test_measured import trace
from tests.planner import configs, shapes

pytest.importorskip("matplotlib")

from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from orchestrator.observe.expert_loads import loads_of
from orchestrator.observe.plots import expert_picture, memory_picture, panels
from orchestrator.observe.plots.plan_picture import figure
from orchestrator.observe.plots.topology_panel import Topology
from orchestrator.observe.rank_trace import read_timeline


def small(**parallel):
    return configs.planned(shapes.llama3_70b(), parallel)


PLANS = {
    "main line": configs.main_line,
    "thousands of nodes": configs.largest,
    "split backward": lambda: small(pp=4, schedule="zb_h1"),
    "many replicas": lambda: small(tp=2, pp=2, zero=1),
    "virtual stages": lambda: small(tp=8, pp=8, vpp=2, zero=1),
}


def memory_over_time(folder):
    trace(folder)
    return memory_picture.figure(read_timeline(trace_file(folder, 0), 0), "tiny on local")


def expert_loads(_):
    return expert_picture.figure(loads_of(lines()), "tiny_moe on local")


OF_RUNS = {"memory over time": memory_over_time, "expert loads": expert_loads}


@pytest.fixture(scope="module", params=[*PLANS, *OF_RUNS], name="drawn")
def _drawn(request, tmp_path_factory):
    """A picture, and its plan if it is of one."""
    plan = PLANS[request.param]() if request.param in PLANS else None
    if plan is not None:
        result = figure(plan)
    else:
        result = OF_RUNS[request.param](tmp_path_factory.mktemp("run"))
    FigureCanvasAgg(result).draw()
    return plan, result


def crosses(box, start, end) -> bool:
    """Whether a segment enters a box (Liang and Barsky)."""
    low = 0.0
    high = 1.0
    for axis, (lower, upper) in enumerate(((box.x0, box.x1), (box.y0, box.y1))):
        run = end[axis] - start[axis]
        if abs(run) < 1e-9:
            if not lower < start[axis] < upper:
                return False
            continue
        ends = sorted(((lower - start[axis]) / run, (upper - start[axis]) / run))
        low = max(low, ends[0])
        high = min(high, ends[1])
    return low < high


class Stroke(NamedTuple):
    """A straight piece of a line or of an area's edge, in pixels."""

    artist: Artist
    start: tuple[float, float]
    end: tuple[float, float]


def strokes(result: Figure) -> Iterator[Stroke]:
    """Everything that is drawn as a line: lines, error bars, edges of areas, axes and grids."""
    for ax in result.axes:
        lines = list(ax.lines)
        patches = list(ax.patches)
        if ax.axison:
            area = ax.bbox.padded(1)  # beyond it, grid lines are not drawn
            for line in (*ax.get_xgridlines(), *ax.get_ygridlines()):
                points = line.get_transform().transform(line.get_xydata())
                lines += [line] if all(area.contains(*point) for point in points) else []
            patches += ax.spines.values()
        for line in lines:
            if line.get_visible():
                points = line.get_transform().transform(line.get_xydata())
                for start, end in itertools.pairwise(points):
                    yield Stroke(line, start, end)
        for lines_together in ax.collections:
            if isinstance(lines_together, LineCollection):
                for segment in lines_together.get_segments():
                    for start, end in itertools.pairwise(ax.transData.transform(segment)):
                        yield Stroke(lines_together, start, end)
        for patch in patches:
            if patch.get_visible() and patch.get_linewidth() and patch.get_edgecolor()[3]:
                outline = patch.get_transform().transform_path(patch.get_path())
                for polygon in outline.to_polygons(closed_only=False):
                    for start, end in itertools.pairwise(polygon):
                        yield Stroke(patch, start, end)


def written(result: Figure) -> Iterator[Text]:
    """Everything that is written: titles, labels, numbers at axes, legends."""
    for ax in result.axes:
        texts = [*ax.texts, ax.title, *ax.get_children()]
        if ax.axison:
            texts += [*ax.get_xticklabels(), *ax.get_yticklabels()]
            texts += [ax.xaxis.label, ax.yaxis.label]
        if ax.get_legend():
            texts += ax.get_legend().get_texts()
        for label in texts:
            if isinstance(label, Text) and label.get_visible() and label.get_text().strip():
                yield label
    yield from result.texts


def is_above(label: Text, artist: Artist) -> bool:
    """Whether a text hides an artist behind a ground of its own."""
    ground = label.get_bbox_patch()
    is_opaque = ground is not None and ground.get_facecolor()[3] == 1.0
    return is_opaque and label.get_zorder() > artist.get_zorder()


def test_no_line_strikes_a_text(drawn):
    _, result = drawn
    pieces = list(strokes(result))
    assert pieces
    for label in written(result):
        box = label.get_window_extent()
        struck = [
            artist
            for artist, start, end in pieces
            if crosses(box, start, end) and not is_above(label, artist)
        ]
        assert struck == [], label.get_text()


def test_texts_on_a_pattern_have_a_plain_ground(drawn):
    _, result = drawn
    for ax in result.axes:
        patterned = [patch.get_window_extent() for patch in ax.patches if patch.get_hatch()]
        for label in ax.texts:
            box = label.get_window_extent()
            x = (box.x0 + box.x1) / 2
            y = (box.y0 + box.y1) / 2
            if any(area.x0 < x < area.x1 and area.y0 < y < area.y1 for area in patterned):
                ground = label.get_bbox_patch()
                assert ground is not None and ground.get_facecolor()[3] == 1.0


def test_an_axis_has_one_unit_and_says_it(drawn):
    _, result = drawn
    for ax in result.axes:
        title = ax.get_title(loc="left")
        if title.startswith(("Time", "Pipeline", "Memory")):
            for label in ax.get_xticklabels():
                float(label.get_text().replace("−", "-"))
            assert ax.get_xlabel().split()[0] in ("seconds", "milliseconds", "µs", "GiB")


def test_replicas_beyond_eight_have_patterns_and_labels():
    plan = PLANS["many replicas"]()
    assert plan.parallel.dp > 8
    topology = Topology(plan)
    looks = {}
    for rank in plan.ranks:
        replica = replica_of(plan.parallel, rank.coord)
        if rank.coord.pp == 0:
            looks[replica] = topology._colour(rank.coord), topology._pattern(replica)
    assert len(set(looks.values())) == len(looks) == plan.parallel.dp <= 64
    result = figure(plan)
    cells = [patch for patch in result.axes[0].patches if type(patch).__name__ == "Rectangle"]
    assert {patch.get_hatch() or "" for patch in cells} == {"", "////"}
    assert "colour and pattern: replica (dp)" in result.axes[0].get_title(loc="left")
    shown = {label.get_text() for label in result.axes[0].texts}
    assert f"{plan.parallel.dp - 1}.1.1" in shown


def test_of_thousands_of_nodes_each_image_says_its_replicas():
    plan = configs.largest()
    result = figure(plan)
    written = " ".join(label.get_text() for label in result.axes[0].texts)
    assert "replica 0.." in written and f"..{plan.parallel.dp * plan.parallel.ep - 1}" in written
    assert any(patch.get_hatch() for patch in result.axes[0].patches)


@pytest.mark.parametrize(
    ("numbers", "range_text"),
    [([3], "3"), ([0, 1, 2], "0..2"), ([0, 1, 4], "0..1, 4"), ([0, 2, 4, 6], "4 of 0..6")],
)
def test_ranges(numbers, range_text):
    assert panels.ranges(numbers) == range_text
