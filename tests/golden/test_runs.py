"""Run folders of e2cf075: every reading verb still reads them, with no scheduler in reach, and the
real one goes on.

`run_local` is a real run of two ranks that was cancelled at step 18 of 300. The other two are what
`orch render` wrote of the same job, with the events, metrics and logs of the real run and its state
while it ran.
"""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.beds.recorded_runs import environment, restore, write_text

from .lines import orch


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with the three runs, as their user's only environment."""
    for name in set(os.environ) - {"PYTHONPATH"}:
        monkeypatch.delenv(name)
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    mask = os.umask(0o022)
    write_text(tmp_path)
    for name in ("local", "slurm", "kubernetes"):
        restore(name, tmp_path)
    yield tmp_path
    os.umask(mask)


def read(*arguments: str) -> dict | list:
    output = orch([*arguments, "--json"])
    assert (output.exit, output.err) == (0, "")
    return json.loads(output.out)


def test_all_are_listed(home):
    states = {row["state"]["run_id"]: row["state"]["state"] for row in read("list")}
    assert states == {"local": "cancelled", "slurm": "running", "kubernetes": "running"}
    output = orch(["list"])
    assert output.exit == 0 and "unreadable" not in output.out
    assert all(name in output.out for name in states)


@pytest.mark.parametrize(("name", "missing"), [("slurm", "PATH"), ("kubernetes", "KUBECONFIG")])
def test_a_run_whose_scheduler_is_away_has_the_state_of_its_folder(home, name, missing):
    status = read("status", name)
    assert (status["state"]["state"], status["state"]["epoch"]) == ("running", 0)
    assert missing in status["state"]["reason"]
    assert status["live"]["step"] > 0
    output = orch(["status", name])
    assert output.exit == 0 and f"{name}://{name}" in output.out
    assert read("report", name)["plan_hash"] == status["state"]["plan_hash"]


def test_the_ended_run_is_read(home):
    status = read("status", "local")
    report = read("report", "local")
    assert (status["state"]["exit_code"], status["state"]["reason"]) == (
        75,
        "cancelled by the user",
    )
    assert status["live"]["step"] == report["steps"]["completed"] == saved_step(home)
    assert report["plan_hash"] == status["state"]["plan_hash"]
    assert report["memory"]["params"]["measured"] > 0
    for arguments in (["status", "local"], ["report", "local"], ["logs", "local"]):
        output = orch(arguments)
        assert (output.exit, output.err) == (0, "") and output.out


@pytest.mark.process
def test_the_ended_run_goes_on_from_its_checkpoint(home):
    saved = saved_step(home)
    total = 300
    assert 10 <= saved < total
    output = orch(["resume", "local"])
    assert (output.exit, output.out.strip()) == (0, "local://local"), output.err
    end = time.monotonic() + 240
    while (state := read("status", "local")["state"])[
        "exit_code"
    ] is None and time.monotonic() < end:
        time.sleep(0.3)
    if state["exit_code"] is None:
        orch(["cancel", "--force", "local"])
    folder = home / "orch" / "runs" / "local"
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("logs/*")))
    assert (state["state"], state["epoch"], state["exit_code"]) == ("done", 1, 0), logs
    for node in ("node-0", "node-1"):
        metric_rows = [
            json.loads(line)
            for line in (folder / "metrics" / f"{node}.jsonl").read_text().splitlines()
        ]
        assert [row["step"] for row in metric_rows if row["epoch"] == 1] == list(
            range(saved + 1, total + 1)
        )
    assert read("report", "local")["steps"]["completed"] == total


def saved_step(home) -> int:
    (manifest,) = (home / "orch" / "runs" / "local" / "checkpoints").glob("step-*/manifest.json")
    return json.loads(manifest.read_text())["step"]
