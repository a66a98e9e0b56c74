"""The communication that nothing hides: the plan beside the recorded calls of a step."""

from __future__ import annotations

import json

import pytest

from benchmarks.exposed import __main__ as exposed
from tests.beds import fakegpu

ROWS = json.loads(exposed.RESULT.read_text())
#: Of a step, by which plan and calls may differ.
MARGIN = 0.08


def test_the_page_has_what_was_measured():
    page = exposed.PAGE.read_text()
    assert page == exposed.filled(page, "exposed", exposed.table(ROWS))
    assert list(ROWS) == list(exposed.LAYOUTS)


@pytest.mark.parametrize("name", exposed.LAYOUTS)
def test_a_plan_exposes_what_the_calls_leave_exposed(name):
    row = ROWS[name]
    step_s = row["computed_s"] + row["played_s"]
    assert 0 < row["played_s"] < row["sent_s"], "a part is hidden"
    assert abs(row["planned_s"] - row["played_s"]) < MARGIN * step_s


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs")
def test_the_calls_of_a_step_are_still_those():
    name = "ZeRO-1"
    assert exposed.measured(exposed.LAYOUTS[name]) == pytest.approx(ROWS[name], rel=0.02)
