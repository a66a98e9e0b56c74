"""Rows of a benchmark, each a plan with its measured step, correct the plans that follow."""

from __future__ import annotations

import json
from math import log

import pytest

from benchmarks.gpu_node.cases import SMALL, Where, plan_of
from orchestrator.cli.main import main
from orchestrator.plan import Exit
from orchestrator.plan.codec import to_json

SHAPES = {
    "compiled": ("train.seq_len=4096", "train.global_batch_samples=2"),
    "long": ("train.seq_len=8192", "train.global_batch_samples=4"),
}
WORDS = ("parallel=dp1", "parallel.micro_batch_size=1")


@pytest.fixture
def answer(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))

    def run(*arguments: str) -> dict:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def rows(path, factor: float, **changes: object):
    """A file in which steps take `factor` of their planned seconds; a row that failed, too."""
    measured: dict[str, object] = {"eager": {"failed": "out of memory"}}
    for name, words in SHAPES.items():
        plan = plan_of(SMALL, (*WORDS, *words), 1, Where(dry=False, cuda=True))
        row = {"plan": json.loads(to_json(plan)), "step_s": factor * plan.time.step_s}
        measured[name] = row | changes
    path.write_text(json.dumps({"device": "NVIDIA H100", "rows": measured}))
    return str(path)


def test_rows_move_the_prediction_of_their_steps_and_of_other_plans(answer, tmp_path):
    job = ["cluster=h100x8", "model=llama3_8b", "parallel=tp8"]
    before = answer("plan", *job)["time"]["step_s"]
    path = rows(tmp_path / "gpu_single.json", 0.7)
    fit = answer("calibrate", "--from", path, "cluster=h100x8")
    assert set(fit["steps"]) == set(SHAPES)
    for facts in fit["steps"].values():
        assert facts["measured_s"] == pytest.approx(0.7 * facts["before_s"])
        assert abs(log(facts["after_s"] / facts["measured_s"])) < 0.05
    after = answer("plan", *job)["time"]
    assert after["step_s"] < 0.9 * before and after["profile"] == fit["profile"]
    assert main(["calibrate", "--from", path, "cluster=h100x8"]) == Exit.USAGE, "rows count once"


@pytest.mark.parametrize(
    ("content", "overrides", "message"),
    [
        ("", ["cluster=h100x8"], "rows.json: "),
        ("{}", ["cluster=h100x8"], "missing required field `rows`"),
        ('{"rows": {"a": {"step_s": 1}}}', ["cluster=h100x8"], "no row has both plan and step_s"),
        (None, ["cluster=a100x64"], "(hopper), but cluster a100x64 has A100-SXM4-80GB (a100)"),
    ],
)
def test_rows_that_cannot_be_used_are_refused(
    content, overrides, message, answer, tmp_path, capsys
):
    path = tmp_path / "rows.json"
    if content is None:
        rows(path, 0.9)
    else:
        path.write_text(content)
    assert main(["calibrate", "--from", str(path), *overrides]) == Exit.CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0, -1, "soon"])
def test_a_step_must_take_time(seconds, answer, tmp_path, capsys):
    path = rows(tmp_path / "rows.json", 1.0, step_s=seconds)
    assert main(["calibrate", "--from", path, "cluster=h100x8"]) == Exit.CONFIG
    assert f"row 'compiled': step_s is {seconds!r}" in capsys.readouterr().err
