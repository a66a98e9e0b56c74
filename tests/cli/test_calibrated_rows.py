"""Rows of a benchmark, each a plan with its measured step, correct the plans that follow."""

from __future__ import annotations

import json
from math import log
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.gpu_node.cases import SMALL, Where, plan_of
from orchestrator.cli.main import main
from orchestrator.cli.verbs import calibrate
from orchestrator.cost.profile import shipped
from orchestrator.errors import OrchError
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


def rows(path, factor: float, names=tuple(SHAPES), **changes: object):
    """A file in which steps take `factor` of their planned seconds; a row that failed, too."""
    measured: dict[str, object] = {"eager": {"failed": "out of memory"}}
    for name in names:
        words = SHAPES[name]
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
        ("{}", ["cluster=h100x8"], "no `rows`: an older program wrote it"),
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


DEEP = "[" * 5000 + "]" * 5000


def test_a_row_counts_once_whatever_is_added_to_its_file(answer, tmp_path, capsys):
    path = rows(tmp_path / "rows.json", 0.9, names=("compiled",))
    job = ("calibrate", "--from", path, "cluster=h100x8")
    assert set(answer(*job)["steps"]) == {"compiled"}
    rows(tmp_path / "rows.json", 0.9)
    assert main(list(job)) == 0
    out = capsys.readouterr().out
    assert "row 'compiled' is part of profile" in out and "step of long" in out
    assert "step of compiled" not in out
    assert main(list(job)) == Exit.USAGE


@pytest.mark.parametrize("step_s", [1e300, 1e-300, 146.0])
def test_a_step_in_another_unit_changes_no_profile(step_s, answer, tmp_path, capsys):
    good = rows(tmp_path / "good.json", 0.9, names=("long",))
    profile = Path(answer("calibrate", "--from", good, "cluster=h100x8")["file"])
    before = profile.read_bytes()
    path = rows(tmp_path / "rows.json", 1.0, names=("compiled",), step_s=step_s)
    assert main(["calibrate", "--from", path, "cluster=h100x8"]) == Exit.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert f"row 'compiled': {step_s:.3g} s measured and 0." in line and "predicted" in line
    assert profile.read_bytes() == before


def test_a_profile_that_no_plan_can_read_is_not_written(tmp_path):
    parameter, *others = shipped().parameters
    unbounded = structs.replace(parameter, value=float("inf"))
    path = tmp_path / "profile.json"
    with pytest.raises(OrchError, match="none is written: profile"):
        calibrate._write(structs.replace(shipped(), parameters=[unbounded, *others]), path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("plan", "message"), [("{}", "plan schema is missing"), (DEEP, "recursion")]
)
def test_a_row_whose_plan_cannot_be_read_is_named(plan, message, answer, tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(f'{{"rows": {{"a": {{"plan": {plan}, "step_s": 1}}}}}}')
    assert main(["calibrate", "--from", str(path), "cluster=h100x8"]) == Exit.CONFIG
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and (plan == DEEP or "row 'a': " in line)


def test_a_file_that_is_too_large_is_not_read(answer, tmp_path, capsys):
    path = tmp_path / "rows.json"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    assert main(["calibrate", "--from", str(path), "cluster=h100x8"]) == Exit.CONFIG
    assert "more than 32 MiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "best"), [("gpu_single.jsn", "gpu_single.json"), ("benhc", "bench")]
)
def test_a_misspelt_source_is_told(source, best, answer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "gpu_single.json", 0.9)
    assert main(["calibrate", "--from", source, "cluster=h100x8"]) == Exit.USAGE
    message = f"--from {source}: no such file or run; did you mean {best!r}?"
    assert message in capsys.readouterr().err


def test_a_file_of_another_name_is_told_what_its_name_must_have(answer, tmp_path, capsys):
    path = rows(tmp_path / "rows.txt", 0.9)
    assert main(["calibrate", "--from", path, "cluster=h100x8"]) == Exit.USAGE
    assert "a file of rows has a name that ends in .json" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0, -1, "soon", True, pytest.param(10**399, id="400 digits")])
def test_a_step_must_take_time(seconds, answer, tmp_path, capsys):
    path = rows(tmp_path / "rows.json", 1.0, step_s=seconds)
    shown = json.dumps(seconds)[:40]
    assert main(["calibrate", "--from", path, "cluster=h100x8"]) == Exit.CONFIG
    assert f"row 'compiled': step_s is {shown}" in capsys.readouterr().err
