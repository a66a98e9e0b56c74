"""docs/techniques.md is what its list gives, and every row of the list is true: its words run or
are refused, its cells are equal, and its tests, results and pages exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import Plan
from orchestrator.plan.trained import problems
from orchestrator.planner.explain import WORDS
from orchestrator.verify.techniques import AXES, UNEQUAL
from tests.docs.scripts import script
from tests.docs.test_reference import anchors
from tests.house.rooms import ROOT
from tests.planner.configs import build_plan

PAGE = script("make_techniques")
PAPERS = script("technique_rows").PAPERS
ROWS = {
    f"{title.partition(' (')[0]}: {row.name}": row
    for title, (_, rows) in PAPERS.items()
    for row in rows
}
#: Layouts of the matrix that are cells of their own.
ALONE = {technique.name for axis in (*AXES.values(), UNEQUAL) for technique in axis}
ALONE.add("one process, our engine")
CELLS = PAGE.parity()


def planned(words: str) -> tuple[Plan | None, str]:
    """The plan of some words, and why the bundled trainer does not run it."""
    try:
        plan = build_plan(load(words.split()))
    except OrchError as error:
        return None, error.message
    return plan, next(problems(plan), "")


def faults(row: Any) -> Iterator[str]:
    """What is not true of a row."""
    plan, refusal = planned(f"{row.setting} {row.beside} {row.words}")
    if row.reason:
        if row.words and not refusal:
            yield "it is there: its words run"
    elif plan is None or refusal:
        yield refusal
    elif not any(term in plan.time.terms for term in row.price):
        yield f"the plan has no term of {row.price}, but {list(plan.time.terms)}"
    if not (row.reason or row.cells or row.verify or row.shown_by):
        yield "nothing shows that it equals one process"
    if row.verify:
        load(row.verify.split())
    yield from wrong_cells(row.cells)
    yield from missing_names(row)


def wrong_cells(names: tuple[str, ...]) -> Iterator[str]:
    """tests/verify/test_published.py wants each cell of the matrix in docs/parity.md."""
    for name in names:
        published = PAGE.cells_with(name, CELLS)
        if name not in ALONE and not published:
            yield f"no cell {name!r}"
        for cell in published:
            refused = cell.verdict.startswith("refused") and cell.layout != name
            if cell.verdict != "equal" and not refused:
                yield f"{cell.layout}: {cell.verdict}"


def missing_names(row: Any) -> Iterator[str]:
    for path, names in (
        ("tests/trainer/test_planned_memory.py", row.memory),
        ("tests/trainer/test_planned_bytes.py", row.sent),
    ):
        text = (ROOT / path).read_text()
        yield from (f"{path}: no layout {name!r}" for name in names if f'"{name}": ' not in text)
    for place in (*row.shown_by, *row.measured):
        path, _, name = place.partition("::")
        if not (ROOT / path).is_file():
            yield f"no file {path}"
        elif path.endswith(".py") and f"\ndef {name}(" not in (ROOT / path).read_text():
            yield f"{path}: no test {name}"
        elif path.endswith(".json"):
            yield from wrong_result(path, name)
    yield from (f"no term {term!r}" for term in row.price if term not in WORDS)
    for target in row.pages:
        path, _, anchor = target.partition("#")
        file = ROOT / "docs" / path
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            yield f"no page {target}"


def wrong_result(path: str, name: str) -> Iterator[str]:
    try:
        result = PAGE.named(path, name)
    except KeyError as error:
        yield str(error)
    else:
        if isinstance(result, dict) and not result.get("equal", True):
            yield f"{path}: {name} is not equal"


def test_the_page_is_current():
    assert PAGE.PAGE.read_text() == PAGE.page(PAPERS), "python docs/make_techniques.py"


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_true(name):
    assert list(faults(ROWS[name])) == []


ZERO1 = "ZeRO: P_os: optimizer state partitioning (ZeRO-1)"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"words": "parallel.zeros=1"}, "zeros"),
        ({"words": "parallel.zero=4"}, "zero"),
        ({"words": "parallel.zero=3 train.comm_buffer_mib=32"}, "gathers whole layers"),
        ({"cells": ("zero1", "zero9")}, "no cell 'zero9'"),
        ({"cells": ("zero1 + zero2",)}, "no cell"),
        ({"cells": ()}, "nothing shows"),
        ({"memory": ("dp2 zero9",)}, "no layout 'dp2 zero9'"),
        ({"sent": ("dp2 zero9",)}, "no layout 'dp2 zero9'"),
        ({"measured": ("tests/trainer/test_zero_formulas.py::test_bytes",)}, "no test test_bytes"),
        ({"measured": ("benchmarks/results/none.json::none",)}, "no file"),
        ({"measured": ("benchmarks/results/exposed.json::ZeRO-9",)}, "has no 'ZeRO-9'"),
        ({"price": ("cast",)}, "no term of"),
        ({"price": ("dp", "gradients")}, "no term 'gradients'"),
        ({"pages": ("offload.md#nothing",)}, "no page offload.md#nothing"),
        ({"reason": "nobody wrote it"}, "it is there"),
    ],
)
def test_a_row_that_is_not_true_is_noticed(change, fault):
    found_faults = list(faults(ROWS[ZERO1]._replace(**change)))
    assert len(found_faults) == 1 and re.search(fault, found_faults[0])


def test_a_cell_that_differs_is_noticed(monkeypatch):
    different = [
        cell._replace(verdict="DIFFERENT") if cell.layout == "zero1" else cell for cell in CELLS
    ]
    monkeypatch.setitem(globals(), "CELLS", different)
    assert list(wrong_cells(("zero1",))) == ["zero1: DIFFERENT"]
