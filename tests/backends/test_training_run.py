"""The bundled trainer under its agents: killed, restarted from a checkpoint, cancelled, resumed, and the same loss."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from orchestrator.backends.local.backend import LocalBackend
from orchestrator.cli.main import main
from orchestrator.plan import Plan
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import from_bytes
from tests.beds.bundles import events, make_bundle, reports, wait_end, wait_for, wait_step
from tests.beds.plans import make_plan

pytestmark = [pytest.mark.process, pytest.mark.slow]


def plan(corpus, tmp_path, steps: int, **fields) -> Plan:
    more = {"data_paths": [str(corpus)], "cache_dir": str(tmp_path / "cache"), "checkpoint_every_steps": 5}
    return make_plan(**{"dp": 2, "nodes": 2, "zero": 1, "steps": steps, "seq_len": 32, **more, **fields})


def start(tmp_path, plan: Plan, run_id: str, **backend) -> RunFolder:
    bundle = make_bundle(plan, tmp_path / "runs", run_id=run_id, command=(), backend={"grace_s": 30, **backend})
    LocalBackend().submit(bundle, os.environ)
    return RunFolder(tmp_path / "runs" / run_id)


def losses(folder: RunFolder) -> dict[int, float]:
    """The loss of every step, the last telling of it."""
    found = {}
    for line in reports(folder.path / "metrics"):
        if line.get("loss") is not None:
            found[line["step"]] = line["loss"]
    return found


def test_killed_workers_and_a_cancel_do_not_change_the_loss(tmp_path, corpus, monkeypatch, capsys):
    steps = 40
    spec = plan(corpus, tmp_path, steps, trace_steps=2)
    whole = start(tmp_path, plan(corpus, tmp_path, steps, trace_steps=2, nodes=1), "whole")  # the same layout
    assert wait_end(whole).state == "done", whole.rank_log(0).read_text()
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    assert main(["report", "whole", "--rank", "1", "--json"]) == 0
    timeline = json.loads(capsys.readouterr().out)["timeline"]
    assert [step["name"] for step in timeline["steps"]] == ["step 1", "step 2"]
    assert all(step["peak"]["activations"] > 0 for step in timeline["steps"])

    broken = start(tmp_path, spec, "broken", max_restarts=1)
    wait_step(broken, 12, workers=2)
    pids = json.loads(broken.backend.read_text())["agents"]
    victim = next(pid for pid in children_of(children_of(pids["node1"])[0]) if comm(pid).startswith("orch-rank-"))
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: any(e["epoch"] == 1 for e in events(broken, "resumed")), what="resuming")
    wait_for(lambda: max(losses(broken), default=0) > 20, what="progress")
    LocalBackend().cancel(broken, force=False)
    state = wait_end(broken)
    assert (state.state, state.reason) == ("cancelled", "cancelled by the user")
    assert state.epochs[0].cause.code == -9 and state.epochs[0].cause.node == "node1"
    LocalBackend().resume(broken, from_bytes(broken.request.read_bytes()), os.environ)
    state = wait_end(broken)
    assert (state.state, state.epoch) == ("done", 2), broken.rank_log(0).read_text()
    assert losses(broken) == losses(whole)  # to the bit, over a crash and a cancel
    report = json.loads(broken.report.read_text())
    assert report["steps"]["completed"] == steps and report["memory"]["params"]["measured"] > 0


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]
