"""What is written in a picture can be read: no line through it, one unit an axis, replicas beyond
eight by pattern."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.plan.batch import replica_of
from tests.planner import configs, shapes

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex

from orchestrator.observe.plots import panels
from orchestrator.observe.plots.plan_picture import figure
from orchestrator.observe.plots.topology_panel import Topology


def small(**parallel):
    return configs.planned(shapes.llama3_70b(), parallel)


PLANS = {
    "main line": configs.main_line,
    "thousands of nodes": configs.largest,
    "split backward": lambda: small(pp=4, schedule="zb_h1"),
    "many replicas": lambda: small(tp=2, pp=2, zero=1),
    "virtual stages": lambda: small(tp=8, pp=8, vpp=2, zero=1),
}


@pytest.fixture(scope="module", params=PLANS, name="drawn")
def _drawn(request):
    plan = PLANS[request.param]()
    result = figure(plan)
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


def test_no_line_strikes_a_text(drawn):
    _, result = drawn
    for ax in result.axes:
        texts = [label for label in ax.texts if label.get_text().strip()]
        segments = []
        for line in ax.lines:
            points = (
                ax.transData.transform(line.get_xydata())
                if line.get_transform() == ax.transData
                else None
            )
            if points is None:
                points = line.get_transform().transform(line.get_xydata())
            segments += [(line, a, b) for a, b in itertools.pairwise(points)]
        for lines in ax.collections:
            if type(lines).__name__ == "LineCollection":
                for segment in lines.get_segments():
                    points = ax.transData.transform(segment)
                    segments += [(lines, a, b) for a, b in itertools.pairwise(points)]
        for label in texts:
            box = label.get_window_extent()
            for line, start, end in segments:
                assert not crosses(box, start, end), (
                    ax.get_title(loc="left"),
                    label.get_text(),
                    line,
                )


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
            looks[replica] = to_hex(topology._colour(rank.coord)), topology._pattern(replica)
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
