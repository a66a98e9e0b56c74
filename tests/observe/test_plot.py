"""Pictures: every format, every kind of plan, the same bytes for the same plan."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from tests.planner import configs, shapes

pytest.importorskip("matplotlib")

from orchestrator.observe.plots.plan_picture import save


def plan(**parallel):
    return configs.planned(shapes.llama3_70b(), parallel)


@pytest.mark.parametrize("drawn", [configs.main_line, configs.largest])
def test_png(drawn, tmp_path):
    save(drawn(), tmp_path / "plan.png")
    data = (tmp_path / "plan.png").read_bytes()
    assert (
        data.startswith(b"\x89PNG\r\n\x1a\n") and int.from_bytes(data[16:20], "big") >= 1600
    )  # the width
    assert len(data) < 2_000_000, "thousands of nodes become strips"


def test_svg_is_well_formed_and_the_same_every_time(tmp_path):
    for name in ("a.svg", "b.svg"):
        save(configs.main_line(), tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    assert ElementTree.fromstring(first).tag.endswith("svg")


def test_pdf_is_the_same_every_time(tmp_path):
    for name in ("a.pdf", "b.pdf"):
        save(configs.main_line(), tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("a.pdf", "b.pdf"))
    assert first == second and first.startswith(b"%PDF-")


def test_html_is_one_file_that_loads_nothing(tmp_path):
    save(plan(tp=8, pp=8, vpp=2, zero=1), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "limited by" in page
    assert "<script" not in page and "src=" not in page and "@import" not in page


@pytest.mark.parametrize(
    "parallel",
    [{}, {"pp": 4, "schedule": "zb_h1"}, {"tp": 2, "pp": 4, "schedule": "zbv", "vpp": 2}],
)
def test_other_layouts(parallel, tmp_path):
    save(plan(**parallel), tmp_path / "plan.svg")


@pytest.mark.parametrize("name", ["plan.gif", "plan", "missing/plan.png"])
def test_bad_paths_are_one_line(name, tmp_path):
    with pytest.raises(OrchError, match=r"--plot ") as caught:
        save(configs.main_line(), tmp_path / name)
    assert caught.value.exit == Exit.USAGE
