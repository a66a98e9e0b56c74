"""Programs that report with `orch_report`: progress, goodput, a save before the end, and the plan's mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import orch_report
from orchestrator.run.folder import RunFolder
from tests.beds.bundles import wait_end, wait_for
from tests.patience import PATIENCE_S

from .test_verbs import home, orch

__all__ = ["home"]  # the fixture
#: What the program says that a step took: what a busy machine makes of its sleeps is not tested.
TOLD_STEP_S = 0.25
PROGRAMS = Path(__file__).parents[1] / "beds" / "programs"


def status(capsys, folder: RunFolder) -> dict:
    return json.loads(orch(capsys, "status", folder.run_id, "--json")[1])


@pytest.mark.process
def test_reports_give_progress_goodput_and_a_save_before_the_end(home, capsys):
    script = [sys.executable, str(PROGRAMS / "reporting.py")]
    words = ["nproc=2", "--json", "--", *script, "400", "0.05", str(TOLD_STEP_S)]
    code, out, err = orch(capsys, "submit", *words)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))

    def steps() -> list[int]:
        lines = folder.metrics("node-0").read_text().splitlines() if folder.metrics("node-0").exists() else []
        found = [json.loads(line) for line in lines]
        return [max((line["step"] for line in found if line["rank"] == rank), default=0) for rank in range(2)]

    wait_for(lambda: min(steps()) >= 3, what="step 3 of both")
    found = status(capsys, folder)
    assert found["live"]["loss"] == pytest.approx(1 / found["live"]["step"])
    assert found["live"]["tokens_per_s"] == pytest.approx(100 / TOLD_STEP_S)
    assert found["goodput"]["ettr"] > 0
    assert "progress" not in orch(capsys, "status", folder.run_id)[1]
    assert orch(capsys, "cancel", folder.run_id)[0] == 0
    assert wait_end(folder).state == "cancelled"
    kept = [int((folder.path / "checkpoints" / f"rank-{rank}").read_text()) for rank in range(2)]
    assert min(kept) >= 3 and status(capsys, folder)["live"]["saved"]["step"] in kept
    for rank in range(2):
        (folder.path / "checkpoints" / f"rank-{rank}").write_text("398")
    assert orch(capsys, "resume", folder.run_id, "--follow")[0] == 0
    assert folder.rank_log(1).read_text().endswith("starts after step 398\n")
    report = json.loads(orch(capsys, "report", folder.run_id, "--json")[1])
    assert report["steps"]["completed"] == 400
    assert report["step_s"]["measured"] == pytest.approx(TOLD_STEP_S)


def test_outside_orch_it_is_silent(tmp_path, monkeypatch):
    for name in ("ORCH_REPORT_FD", "ORCH_RUN_DIR", "ORCH_PLAN"):
        monkeypatch.delenv(name, raising=False)
    code = """
import orch_report, os, signal
orch_report.report(step=1, loss=2.0, tokens=3)
orch_report.alive("eval")
assert not orch_report.save_requested() and not orch_report.active()
assert str(orch_report.checkpoint_dir("here")) == "here" and os.path.isdir("here")
os.kill(os.getpid(), signal.SIGTERM)
assert orch_report.save_requested()
orch_report.exit_saved(1)
"""
    copy = tmp_path / "orch_report.py"  # one file: a copy beside a program is enough
    copy.write_text(Path(orch_report.__file__).read_text())
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_full_pipe_drops_and_counts_and_a_lost_agent_is_silent(monkeypatch):
    read, write = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setenv("ORCH_REPORT_FD", str(write))
    monkeypatch.setattr(orch_report, "_worker", orch_report._Worker())
    for step in range(3000):
        orch_report.report(step=step)
    assert orch_report._worker.dropped > 0
    os.close(read)
    monkeypatch.setattr(orch_report._worker, "dropped", 0)
    orch_report.report(step=1)
    assert not orch_report.active()
    os.close(write)
    with pytest.raises(TypeError, match="does not know losss"):
        orch_report.report(step=1, losss=2.0)


@pytest.mark.process
@pytest.mark.slow
def test_fsdp_and_tensor_parallelism_over_the_plan_s_mesh(home, capsys):
    """tp 2 x dp 2 by our mesh gives the losses of dp 2 under torchrun: the same sums, another layout."""
    script = str(PROGRAMS / "fsdp_tp.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, "4"]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    theirs = done.stdout.splitlines()
    words = ["cluster.gpus_per_node=2", "parallel=tp2", "--json", "--", sys.executable, script, "4"]
    code, out, err = orch(capsys, "submit", *words)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done", folder.rank_log(0).read_text()
    ours = [line for line in folder.rank_log(0).read_text().splitlines() if line.startswith("step")]
    losses = [[float(line.split()[-1]) for line in lines if line.startswith("step")] for lines in (ours, theirs)]
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert status(capsys, folder)["live"]["loss"] == pytest.approx(losses[0][-1], abs=1e-5)
