"""Pages fit 80 columns, or wrap: nothing that people read is cut off by a narrow terminal."""

from __future__ import annotations

import re
import shlex

import pytest

from orchestrator.accuracy.predict.score import Errors, Score
from orchestrator.cli.verbs import VERBS
from orchestrator.cli.verbs.whatif import page
from orchestrator.drill.session import trial_line
from orchestrator.drill.trial import Trial
from orchestrator.observe.pages import accuracy_page, drill_page
from orchestrator.style import Style, fold
from tests.backends.test_verbs import home, orch

__all__ = ["home"]  # the fixture

LINES = [
    "plan +cluster=h100x64 parallel=tp2_pp2_zero1 model=llama3_8b",
    "plan +cluster=h100x1024 parallel=tp8_pp4_zero1 model=llama3_70b --explain",
    "plan +cluster=h100x64 nodes=4..8 parallel=tp8_pp4",
    "plan cluster=h800x2048 model=deepseek_v3 parallel=deepseek_v3",
    "tune +cluster=h100x8 model=llama3_8b",
    (
        "whatif +cluster=h100x64 parallel=tp8_pp4_zero1 --case parallel=tp8_pp2_zero1 --case"
        " train.recompute=full"
    ),
    "submit nproc=5 --dry-run -- python -c pass",
    "config --choices",
    "list",
    "nodes",
    "help",
    *(f"{verb} --help" for verb in VERBS),
]


@pytest.mark.parametrize("line", LINES)
def test_no_line_is_longer_than_80(home, capsys, monkeypatch, line):
    monkeypatch.setenv("COLUMNS", "80")
    try:
        code, out, _ = orch(capsys, *shlex.split(line))
    except SystemExit as ended:  # argparse, after its help
        code = int(ended.code or 0)
        out = capsys.readouterr().out
    assert code == 0
    folder = str(home)  # a path is one word
    assert [
        output_line
        for output_line in out.splitlines()
        if len(output_line) > 80 and folder not in output_line and " " in output_line.strip()
    ] == []


def test_a_line_is_folded_at_words_and_a_long_word_stays_whole():
    assert fold("a b", 80) == ["a b"]
    assert fold("  name  one two three", 14, 8) == ["  name  one", "        two", "        three"]
    assert fold("x " + "y" * 30, 10) == ["x", "y" * 30]
    assert fold("\033[1mone\033[0m two", 7) == ["\033[1mone\033[0m two"], "colours take no room"


def test_the_lines_of_drills_and_of_scores_go_on_below_one_another():
    look = Style(colour=True, width=80)
    trial = Trial(
        fault="slow_worker",
        position="coordinator",
        rank=12,
        node="node-with-a-long-name-0012",
        at=0.0,
        epoch=1,
        ok=True,
        noticed_s=61.5,
        stepping_s=4000.0,
        lost_steps=12,
    )
    first, *further = look.fold(f"   1 of 20  {trial_line(trial, look)}", 12)
    assert further and all(line.startswith(" " * 12) for line in further)
    summary = {"p50": 61.5, "p95": 119.5, "max": 12}
    row = {
        "fault": "slow_worker",
        "position": "coordinator",
        "trials": 100,
        "recovered": 99,
        "noticed_s": summary,
        "stepping_s": summary,
        "lost_steps": summary,
        "problems": ["the run has not made a step for 120 s: " + "a cause " * 9],
    }
    errors = Errors(
        group="bloom_bigscience",
        rows=1234,
        mean=0.104,
        p90=0.2,
        bias=-0.021,
        after_one=0.049,
        inside68=0.92,
        inside95=1.0,
        fitted=0.039,
    )
    pages = [
        drill_page.table([row], look),
        accuracy_page.page(Score([errors], [errors], [], {})),
    ]
    lines = [first, *further, *(line for text in pages for line in text.splitlines())]
    assert max(len(re.sub(r"\033\[[0-9;]*m", "", line)) for line in lines) <= 80


def test_cases_side_by_side_go_on_below_one_another():
    from orchestrator.cli.verbs.whatif import column
    from tests.planner import configs

    columns = [column(f"case {number}", configs.main_line(), None) for number in range(5)]
    printed_page = page(columns, 80)
    assert max(map(len, printed_page.splitlines())) <= 80 and "\n\n" in printed_page
    assert [f"case {number}" in printed_page for number in range(5)] == [True] * 5
    assert len(page(columns, 400).split("\n\n")) == 1
