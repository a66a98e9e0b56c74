"""A real run on this machine, its report, the site's profile from it, and the plan after."""

from __future__ import annotations

import json
from math import log
from typing import Any

import pytest

from orchestrator.cli.main import main
from orchestrator.plan import Exit

JOB = ["+cluster=local", "cluster.gpus_per_node=1", "cluster.nodes=1", "train.steps=6"]


@pytest.mark.process
def test_a_run_corrects_the_plans_that_follow(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def said(*arguments: str) -> Any:
        capsys.readouterr()
        assert main([*arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    before = said("plan", *JOB)
    assert said("submit", *JOB, "--follow", "--run-id", "measured")["state"] == "done"
    report = said("report", "measured")["step_s"]
    assert (
        report["planned"] == before["time"]["step_s"]
        and report["low"] < report["planned"] < report["high"]
    )
    assert report["inside"] is (report["low"] <= report["measured"] <= report["high"])
    assert ("attribution" in report) is (abs(report["z"]) > 1)
    fit = said("calibrate", "--from", "measured")
    assert fit["measured_s"] == report["measured"] and fit["before_s"] == pytest.approx(
        report["planned"]
    )
    after = said("plan", *JOB)
    assert after["time"]["step_s"] == pytest.approx(fit["after_s"], rel=1e-3)
    assert after["time"]["profile"] == fit["profile"] and after["time"]["parameters"]
    away = [abs(log(plan["time"]["step_s"] / report["measured"])) for plan in (before, after)]
    assert away[1] < 0.15 or away[1] < 0.3 * away[0]
    assert after["time"]["sd"] < before["time"]["sd"]
    assert said("whatif", *JOB)[0]["step_s"] == after["time"]["step_s"]
    assert main(["calibrate", "--from", "measured"]) == Exit.USAGE, "a run counts once"
    assert said("submit", *JOB, "--dry-run")["plan_hash"] == after["hash"]
