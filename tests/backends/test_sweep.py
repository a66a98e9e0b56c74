"""`orch submit --multirun` where there is no queue: this machine's runs follow one another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "beds" / "worker.py"
ROOT = WORKER.parents[2]

pytestmark = pytest.mark.process


def orch(home: Path, *arguments: str, **wishes: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"ORCH_HOME": str(home), "PYTHONPATH": str(ROOT)}
    env |= {f"ORCH_TEST_{wish}": value for wish, value in wishes.items()}
    argv = [sys.executable, "-m", "orchestrator.cli.main", *arguments]
    return subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, timeout=300)


def test_one_after_another_and_the_first_failure_is_the_exit_code(tmp_path):
    base = [
        "submit",
        "--multirun",
        "--in-place",
        "--env",
        "ORCH_TEST_DIE",
        "cluster=local",
        "cluster.gpus_per_node=2",
    ]
    arguments = [*base, "backend.max_restarts=0", "parallel=tp2,zero1", "--run-id", "s"]
    done = orch(tmp_path, *arguments, "--", sys.executable, str(WORKER), DIE="1:2:5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.index("run 1 of 2: parallel=tp2") < done.stdout.index(
        "run 2 of 2: parallel=zero1"
    )
    ends = [
        json.loads((tmp_path / "runs" / f"s-{index}" / "state.json").read_text())
        for index in (0, 1)
    ]
    assert [end["state"] for end in ends] == ["failed", "failed"]
    assert ends[0]["ended_at"] <= ends[1]["created_at"], "never two at once"


def test_nothing_is_started_when_one_cannot_be(tmp_path):
    done = orch(
        tmp_path, "submit", "--multirun", "cluster=local", "parallel=tp2,tp3", "--", "/bin/true"
    )
    assert (
        done.returncode
        and "parallel=tp3" in done.stderr
        and "none of the 2 runs was sent" in done.stderr
    )
    assert not (tmp_path / "runs").exists() and len(done.stderr.strip().splitlines()) == 1
    dry = orch(
        tmp_path, "submit", "--multirun", "--dry-run", "--json", "cluster=local", "parallel=tp2,tp1"
    )
    assert [request["summary"]["parallel"] for request in json.loads(dry.stdout)] == ["tp2", "tp1"]
    assert not (tmp_path / "runs").exists()
