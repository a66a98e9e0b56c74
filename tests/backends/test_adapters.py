"""orch_report's callbacks with the real packages: steps and losses, a save when asked, and going on
from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.run.folder import RunFolder
from tests.beds.bundles import wait_end, wait_for

from .test_verbs import home, orch

__all__ = ["home"]  # the fixture
PROGRAMS = Path(__file__).parents[1] / "beds" / "programs"
NEEDS = {
    "hf_trainer.py": ("transformers", "accelerate"),
    "lightning_trainer.py": ("pytorch_lightning",),
}


def needed(program: str) -> str:
    for package in NEEDS[program]:
        pytest.importorskip(package, reason=f"{package} is not installed: .ci/setup installs it")
    return str(PROGRAMS / program)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(NEEDS))
def test_steps_losses_a_save_when_asked_and_going_on(home, capsys, program, tmp_path):
    script = [sys.executable, needed(program)]
    argv = [
        "nproc=2",
        "backend.grace_s=120",
        "--json",
        "--",
        *script,
        "100000",
        str(tmp_path / "saved"),
        "0.02",
    ]
    code, out, err = orch(capsys, "submit", *argv)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))

    def live() -> dict:
        return json.loads(orch(capsys, "status", folder.run_id, "--json")[1])["live"]

    wait_for(
        lambda: (live()["step"] or 0) >= 6 and live()["loss"] is not None,
        what="a loss after step 6",
    )
    assert orch(capsys, "cancel", folder.run_id)[0] == 0
    assert wait_end(folder).state == "cancelled", folder.rank_log(0).read_text()
    step = live()["saved"]["step"]
    assert step >= 6 and (step == live()["step"])
    lines = [json.loads(line) for line in folder.metrics("node-0").read_text().splitlines()]
    losses: list[dict[int, float]] = []
    for rank in range(2):
        ours = [line for line in lines if line["rank"] == rank]
        assert [line["step"] for line in ours] == list(range(1, step + 1))  # each once, in order
        losses.append({line["step"]: line["loss"] for line in ours if "loss" in line})
    assert (
        losses[0].keys() == set(range(2, step + 1, 2)) and losses[0] == losses[1]
    )  # of the global batch
    assert orch(capsys, "resume", folder.run_id)[0] == 0
    wait_for(lambda: (live()["step"] or 0) > step, what="a step after the restart")
    assert orch(capsys, "cancel", folder.run_id)[0] == 0
    wait_end(folder)
    starts = [
        line
        for line in folder.rank_log(0).read_text().splitlines()
        if line.startswith("starts from")
    ]
    assert starts[0].endswith("None") and f"{step}" in starts[1]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["hf_trainer.py", pytest.param("lightning_trainer.py", marks=pytest.mark.full)]
)
def test_outside_orch_the_callbacks_do_nothing(program, tmp_path):
    """Both ask `orch_report.active()`: one of them is tried in every test run, an import of
    Lightning being costly."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ORCH_", "TORCHELASTIC"))
    }
    argv = [sys.executable, needed(program), "4", str(tmp_path / "saved"), "0"]
    done = subprocess.run(
        argv, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "trained to 4" in done.stdout, done.stderr
    assert not list(tmp_path.glob("saved/*.ckpt"))


@pytest.mark.process
def test_the_tracker_of_accelerate_reports_what_is_logged():
    pytest.importorskip("accelerate", reason="accelerate is not installed: .ci/setup installs it")
    code = """
import accelerate, orch_report
accelerator = accelerate.Accelerator(cpu=True, log_with=orch_report.accelerate_tracker())
accelerator.init_trackers("x", config={"lr": 1})
accelerator.log({"train_loss": 2.5, "tokens": 64, "other": 1}, step=3)
accelerator.log({"accuracy": 0.5})
accelerator.log({"lr": 0.1}, step=4)
accelerator.log({"loss": 2.25}, step=4)
accelerator.log({"accuracy": 0.5}, step=4)
accelerator.log({"loss": 9.0}, step=4)
accelerator.log({"lr": 0.2}, step=5)
accelerator.end_training()
"""
    read, write = os.pipe2(os.O_NONBLOCK)
    env = {**os.environ, "ORCH_REPORT_FD": str(write)}
    subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[write], check=True, timeout=300)
    reports = [json.loads(line) for line in os.read(read, 1 << 16).splitlines()]
    steps = [report for report in reports if report["kind"] == "step"]
    names = ("step", "loss", "tokens", "lr")
    assert [[report.get(name) for name in names] for report in steps] == [
        [3, 2.5, 64, None],
        [4, 2.25, 0, 0.1],
        [5, None, 0, 0.2],
    ], "each step once"
    os.close(read)
    os.close(write)
