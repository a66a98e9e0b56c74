"""The page: says what matters, fits its width, needs no colour."""

from __future__ import annotations

import re

import pytest

from orchestrator.observe.pages.plan_page import render
from orchestrator.style import Style, percent, seconds, si, three
from tests.beds.plans import make_plan
from tests.planner.configs import largest, main_line


def test_it_says_what_matters():
    page = render(main_line())
    assert "llama3_70b, 70.6 G parameters" in page
    assert "tp=8  pp=4  dp=2  zero=1" in page
    assert re.search(r"node-4 1\.0\.0 1\.0\.1", page)  # dp 1 begins on the second leaf
    assert "8 groups of 8, within nvlink" in page
    assert "16 groups of 4, within leaf" in page
    assert re.search(r"total +48\.\d .*\s+of 74\.2 ±5%: fits", page)
    assert re.search(r"MFU \d\d\.\d%", page)
    assert "limited by" in page
    assert "! data stdlib is a demo corpus" in page


def test_without_colour_it_has_no_escapes_and_with_colour_it_says_the_same():
    plain, painted = (
        render(main_line(), Style(colour=colour, width=100)) for colour in (False, True)
    )
    assert "\033" not in plain
    stripped = re.sub(r"\033\[[0-9;]*m", "", painted).replace(
        "; colour: replica (dp); tint: odd stage (pp)", ""
    )
    assert stripped == plain


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("plan", [main_line, largest])
def test_lines_keep_the_width(plan, width):
    page = render(plan(), Style(width=width))
    assert max(map(len, page.splitlines())) <= width


def test_thousands_of_nodes_fold_into_ranges_that_cover_them():
    page = render(largest())
    assert len(page.splitlines()) < 70
    assert "node-0000 .." in page and "node-2047" in page
    assert [int(n) for n in re.findall(r"pod \d: (\d+) nodes", page)] == [
        384,
        384,
        384,
        384,
        384,
        128,
    ]
    assert "DOES NOT FIT" in page and "does not fit: rank" in page


def test_small_plans_and_ascii():
    page = render(make_plan(), Style(unicode=False))
    assert page.isascii()
    assert "one rank: nothing to communicate" in page
    assert re.search(r"Memory of the fullest rank \(0\), MiB", page)  # five bytes are not 0.00 GiB


@pytest.mark.parametrize(
    ("formatted", "want"),
    [(si(1_234_567, "B"), "1.23 MB"), (si(999.7), "1.00 k"), (si(12), "12.0"), (seconds(0), "0 s"),
     (seconds(0.00123), "1.23 ms"), (seconds(4e-6), "4.00 us"), (seconds(3.2), "3.20 s"), (percent(0), "0%"),
     (seconds(4000), "1 h 07 min"), (percent(0.001), "<1%"), (three(1234.5), "1,234")],
)  # fmt: skip
def test_numbers(formatted, want):
    assert formatted == want
