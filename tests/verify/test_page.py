"""What is said of verdicts, on a terminal and in docs/parity.md."""

from __future__ import annotations

import math

import pytest

from orchestrator import __version__
from orchestrator.cli.verbs.verify import _versions
from orchestrator.plan.parity import LIMITS, Errors, Verdict
from orchestrator.style import Style
from orchestrator.verify import matrix
from orchestrator.verify.page import document, lines, read_equal, summary


def errors(**changes: float) -> Errors:
    values = {
        "loss": 1e-16,
        "grad": 2e-15,
        "norm": 0.0,
        "weight": 3e-14,
        "worst_grad": "a",
        "worst_weight": "b",
    }
    return Errors(**(values | changes))


def verdict(**changes: float) -> Verdict:
    return Verdict(name="dp2", errors={"fp64": errors(**changes), "fp32": errors()})


@pytest.mark.parametrize("figure", ["loss", "grad", "norm", "weight", "more"])
@pytest.mark.parametrize("value", [2e-10, math.inf, math.nan])
def test_one_number_above_the_limit_is_different(figure, value):
    assert verdict().word == "equal"
    above = {figure: value}
    at_limit = {figure: LIMITS["fp64"]}
    assert verdict(**above).word == "DIFFERENT"
    assert verdict(**at_limit).word == "equal"


def test_nothing_measured_is_not_equal():
    assert not Verdict(name="x").equal
    assert (
        Verdict(name="x", refused="why").word == "refused"
        and Verdict(name="x", failed="why").word == "failed"
    )


def test_a_line_a_precision_with_all_four_numbers():
    page_text = "\n".join(lines(verdict(grad=0.5), Style()))
    assert (
        page_text.startswith("DIFFERENT dp2")
        and "5.0e-01" in page_text
        and "fp32" in page_text
        and "gradient of a" in page_text
    )
    assert "because" in "\n".join(lines(Verdict(name="x", refused="because"), Style()))


def test_summary_counts():
    verdicts = [verdict(), verdict(), verdict(norm=1.0), Verdict(name="x", refused="no")]
    assert summary(verdicts) == "2 equal, 1 DIFFERENT, 1 refused"


def test_the_document_has_a_row_for_every_cell():
    entries = matrix.full()
    verdicts = {entry.name: Verdict(name=entry.name, errors=verdict().errors) for entry in entries}
    verdicts[entries[3].name] = Verdict(name=entries[3].name, refused="zero=3 | is refused")
    page = document(entries, verdicts, "orch 1, torch 2")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "fp64 loss" not in line]
    assert len(rows) == len(entries)
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1, (
        "every row has the same columns"
    )
    assert "refused: zero=3 \\| is refused" in page and "orch 1, torch 2" in page
    assert f"{len(entries) - 1} equal, 1 refused" in page
    # What is read of a page makes the same page again; the refused cell has to run.
    read = read_equal(page, entries, "orch 1, torch 2")
    assert set(verdicts) - set(read) == {entries[3].name}
    assert document(entries, verdicts | read, "orch 1, torch 2") == page
    assert read_equal(page, entries, "orch 1, torch 3") == {}


def test_the_page_says_what_it_was_measured_with():
    """The distribution has another name than the package, and a whole matrix has run when this is
    asked."""
    assert _versions().startswith(f"orch {__version__}, torch ")
