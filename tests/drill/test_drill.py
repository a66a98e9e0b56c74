"""`orch drill` on real runs: it hits the run's own processes, and says what came of it."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import pytest
from msgspec import structs

from orchestrator.backends.base import get_backend
from orchestrator.cli.main import main
from orchestrator.drill.session import check_allowed, open_drill
from orchestrator.errors import OrchError
from orchestrator.observe.goodput.ledger import ledger, uneven
from orchestrator.observe.timeline import StepFollower
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import read_state
from tests.agent.test_elastic import cancel, running, sized
from tests.beds.bundles import kill_runs, make_bundle, refusal, submit, submitted
from tests.patience import PATIENCE_S

TOGETHER = str(Path(__file__).resolve().parents[2] / "benchmarks" / "together.py")

pytestmark = pytest.mark.process

FAULTS = "kill_worker,stop_worker,kill_agent,kill_node,notice"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    yield tmp_path
    kill_runs(tmp_path / "runs")


def start(home, sizes=(3, 2, 1), max_restarts=9, **options) -> RunFolder:
    backend = {
        "grace_s": 5.0,
        "heartbeat_timeout_s": 15.0,
        "max_restarts": max_restarts,
        "options": options,
    }
    plans = {nodes: sized(nodes) for nodes in sizes}
    elastic = plans if len(sizes) > 1 else {}
    command = (sys.executable, TOGETHER)
    return submit(plans[max(sizes)], home / "runs", command=command, backend=backend, sizes=elastic)


@pytest.mark.slow
def test_a_drill_breaks_what_it_says_and_the_run_gets_over_it(home, capsys):
    folder = start(home, restart_lost_nodes_after_s=0.2, grow_after_s=0.2)
    running(folder, "node0", "node1", "node2")
    code = main(
        [
            "drill",
            "test-run",
            "--faults",
            FAULTS,
            "--for-s",
            "1",
            "--limit-s",
            f"{PATIENCE_S:g}",
            "--json",
        ]
    )
    drill_report = json.loads(capsys.readouterr().out)
    assert code == 0, (drill_report["score"], folder.state.read_text()[-3000:])
    trials = drill_report["trials"]
    assert [trial["fault"] for trial in trials] == FAULTS.split(",") and all(
        trial["ok"] for trial in trials
    )
    for trial in trials:
        assert trial["noticed_s"] is not None and trial["stepping_s"] > 0, trial
    assert len(drill_report["score"]) == len(trials) and not drill_report["stopped"]
    lines = (folder.path / "drills.jsonl").read_bytes().splitlines()
    assert [json.loads(line) for line in lines] == trials
    kinds = [epoch.cause.kind for epoch in read_state(folder).epochs if epoch.cause]
    assert kinds[:2] == ["worker_exit", "worker_frozen"] and {
        "node_lost",
        "coordinator_lost",
    } & set(kinds)
    assert cancel(folder).state == "cancelled"
    book = ledger(StepFollower(folder).read(read_state(folder).nodes))
    assert book.problems == [] and uneven(book.entries, 12) == [] and book.samples > 0
    report = json.loads(folder.report.read_bytes())
    assert sum(report["goodput"]["seconds"].values()) == pytest.approx(report["goodput"]["wall_s"])
    assert sum(not fault["planned"] for fault in report["faults"]) == len(kinds)


def test_a_run_that_cannot_spare_it_is_left_alone(home, capsys):
    folder = start(home, sizes=(1,), max_restarts=0)
    before = running(folder, "node0")
    for fault, reason in (
        ("kill_agent", "not elastic"),
        ("kill_worker", "used up"),
        ("partition", "not elastic"),
    ):
        with refusal(reason, 64):
            open_drill(folder, [fault], "any", 5.0)
    with pytest.raises(OrchError, match="did you mean 'node0'"):
        open_drill(folder, ["slow_worker"], "node9", 5.0)
    assert main(["drill", "--faults", "slow_worker,disk_full", "--for-s", "0.5"]) == 0, (
        "these cost time only"
    )
    assert " ".join(capsys.readouterr().out.split()).count("in the same attempt") == 2
    pid = int((folder.path / "pid-0").read_text().split()[0])
    assert resource.prlimit(pid, resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY, (
        "there is room again"
    )
    assert read_state(folder).epoch == before.epoch
    assert cancel(folder).state == "cancelled"
    with pytest.raises(OrchError, match="has ended"):
        open_drill(folder, ["slow_worker"], "any", 5.0)


@pytest.mark.parametrize(
    ("pattern", "reason", "waits"),
    [
        (
            "",
            (
                "it has reported no step, and a drill measures by steps: orch_report or"
                " metrics.pattern"
            ),
            1,
        ),
        (r"step (?P<step>\d+)", "metrics.pattern has found no step in what it prints", 0),
    ],
)
def test_a_program_that_tells_no_steps_is_told_how_to(home, capsys, pattern, reason, waits):
    bundle = make_bundle(
        sized(1), home / "runs", command=("sleep", "3600"), backend={"max_restarts": 1}
    )
    worker = structs.replace(bundle.request.worker, pattern=pattern)
    folder = submitted(
        structs.replace(bundle, request=structs.replace(bundle.request, worker=worker))
    )
    running(folder, "node0")
    assert main(["drill", "--limit-s", "0.5"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert (
        f"run test-run: {reason}" in out and out.count("waits up to 0.5 s for the first") == waits
    )
    assert read_state(folder).epoch == 0, "nothing was injected"
    assert cancel(folder).state == "cancelled"


def test_only_what_was_submitted_for_it_is_drilled_on_a_cluster(tmp_path):
    def asked(backend: str, wish: bool | None) -> None:
        request = make_bundle(
            sized(1), tmp_path, backend={"name": backend, "allow_drills": wish}
        ).request
        check_allowed(request, get_backend(backend))

    for backend, wish, reason in (
        ("slurm", None, "does not allow drills"),
        ("local", False, "allow_drills=false"),
    ):
        with refusal(reason, 78):
            asked(backend, wish)
    asked("local", None)
    asked("slurm", True)


def test_a_run_of_somebody_else_is_refused(home, monkeypatch):
    folder = RunFolder(home / "runs" / "test-run")
    folder.create()
    monkeypatch.setattr(os, "geteuid", lambda: folder.path.stat().st_uid + 1)
    with refusal("only its owner", 78):
        open_drill(folder, ["kill_worker"], "any", 5.0)
