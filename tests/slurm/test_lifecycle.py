"""What schedulers do to runs, done for real: preemption, time limits, scancel.

The workers are those of tests/beds/worker.py: on SIGTERM they save their step and exit with 75, and
resume from it.
"""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

from orchestrator.plan.exits import Exit
from tests.beds.base import ROOT
from tests.beds.contract import cancel_and_resume, refusals
from tests.beds.slurm.runs import CONF, LONG, Orch, Run

from .test_runs import two_nodes

WITH_HELPER = ROOT / "tests" / "beds" / "with_helper.py"
pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


def test_preempted_saved_requeued_once_and_done(orch: Orch):
    run = orch.submit(*two_nodes(), worker=LONG)
    run.step(5)
    urgent = orch.cluster.run("sbatch", "--parsable", "-p", "urgent", "-N8", "--exclusive", "--output=/dev/null",
                              "--wrap", "sleep 2").strip()  # fmt: skip
    run.requeued()
    state = run.state()
    assert (state.state == "pending" and "requeued" in state.reason) or "BeginTime" in state.reason
    steps = run.saved()
    assert min(steps) >= 5
    run.until("urgent job is done", lambda: orch.cluster.job_state(urgent) == "COMPLETED")
    run.start_next_attempt()
    state = run.wait("done")
    assert state.exit_code == 0 and state.epoch == 1 and run.restarts == 1 == run.attempts - 1
    assert run.start_of(1) == steps[0], "it goes on where it had saved"
    assert [epoch.outcome for epoch in state.epochs] == ["stopped", "done"]
    assert not state.epochs[0].counted


def test_the_number_of_requeues_is_capped(orch: Orch):
    run = orch.submit(*two_nodes("backend.options.max_requeues=0"), worker=LONG)
    run.step(3)
    orch.cluster.run("scancel", "--signal=USR1", "--batch", run.job)
    state = run.wait("stopped")
    assert state.exit_code == Exit.RESTART and run.restarts == 0
    assert "gave up after 0 requeues" in run.logs()
    run.release()
    again = orch("resume", "--json", run.id)
    assert json.loads(again.stdout)["run_id"] == run.id
    assert run.wait("done").epoch == 1 and run.start_of(1) == run.saved()[0]


def test_time_limits_shorter_than_the_run(orch: Orch):
    """Partition `short` ends jobs after a minute, and the notice comes 10 to 40 s after the start:
    a run that is held until then needs several attempts, and computes what it does in one; with
    max_requeues=0 it is not requeued after the first. On a busy machine the notice may come before
    an attempt's workers have started, which saves and loses nothing.
    """
    short = two_nodes("backend.options.partition=short", "backend.options.notice_s=20")
    learning = LONG | {"STEPS": 40, "LEARN": 1}
    chain = orch.submit(*short, worker=learning)
    capped = orch.submit(*short, "backend.options.max_requeues=0", worker=learning)
    uninterrupted = orch.submit(*two_nodes(), worker=learning | {"STEP_S": 0.001})
    uninterrupted.release()
    chain.requeued()
    chain.finish()
    assert chain.restarts >= 1 and chain.attempts == chain.restarts + 1
    assert "received USR1" in chain.logs() and "requeueing" in chain.logs()
    assert uninterrupted.wait("done").exit_code == 0
    assert chain.losses() == uninterrupted.losses() and sorted(chain.losses()) == list(range(1, 41))
    state = capped.wait("stopped")
    assert state.exit_code == Exit.RESTART and capped.restarts == 0
    assert "gave up after 0 requeues" in capped.logs()


def test_scancel_saves_and_stays_cancelled(orch: Orch):
    """A plain scancel by hand: KillWait is the time to save, and the script must not requeue the
    job."""
    run = orch.submit(*two_nodes(), worker=LONG)
    run.step(3)
    orch.cluster.run("scancel", run.job)
    state = run.wait("cancelled")
    assert state.exit_code == Exit.RESTART and min(run.saved()) >= 3
    assert orch.cluster.job_state(run.job) == "CANCELLED" and run.restarts == 0


@pytest.mark.parametrize("stop_method", ["cancel", "notice"])
def test_a_notice_reaches_no_process_that_a_worker_needs_to_save(orch: Orch, stop_method):
    """Its children must live until it has saved: the script tells the agents alone."""
    run = orch.submit(
        *two_nodes("backend.options.max_requeues=0"), program=(sys.executable, str(WITH_HELPER))
    )
    run.step(3)
    if stop_method == "cancel":
        orch("cancel", run.id)
    else:  # as Slurm does before the time limit
        orch.cluster.run("scancel", "--signal=USR1", "--batch", run.job)
    state = run.wait("cancelled" if stop_method == "cancel" else "stopped")
    assert (
        state.exit_code == Exit.RESTART
        and state.cause is None
        and "died" not in orch("logs", run.id).stdout
    )
    run.release()
    orch("resume", run.id)
    assert run.wait("done").exit_code == 0
    for rank in range(4):
        log = (run.folder / "logs" / f"rank-{rank:05d}.log").read_text()
        first, second = re.findall(r"^starts at (\d+)$", log, re.M)
        assert int(first) == 0 and int(second) >= 3


def test_slurms_own_end_may_end_them_and_then_nothing_is_called_saved(orch: Orch):
    """scancel by hand, as preemption, signals every process of the steps."""
    run = orch.submit(
        *two_nodes("backend.options.max_requeues=0"), program=(sys.executable, str(WITH_HELPER))
    )
    run.step(3)
    orch.cluster.run("scancel", run.job)
    state = run.wait("cancelled")
    assert re.search(
        r"rank \d on n\d (was asked to save and )?failed: .*; job \d+: cancelled", state.reason
    ), state.reason
    assert "saved, wants restart" not in orch("status", run.id).stdout


def test_the_contract_of_every_backend(orch: Orch):
    refusals(orch, ["backend=slurm", "--config-dir", str(CONF), *two_nodes()])
    run = orch.submit(*two_nodes(), worker=LONG)
    run.step(3)

    def saved() -> None:
        assert (
            min(run.saved()) >= 3
            and orch.cluster.job_state(run.job) == "CANCELLED"
            and run.restarts == 0
        )
        run.release()

    cancel_and_resume(orch, run, saved)
    assert run.state().epoch == 1 and run.start_of(1) == run.saved()[0]


def test_cancel_before_the_start_and_by_force(orch: Orch):
    waiting = orch.submit(*two_nodes("backend.options.begin=now+1hour"), worker=LONG)
    state = waiting.state()
    assert state.state == "pending" and "begin time has not come" in state.reason
    orch("cancel", waiting.id)
    assert waiting.state().state == "cancelled"
    running = orch.submit(*two_nodes(), worker=LONG | {"DEAF": 1, "SPAWN": 1})
    running.step(2)
    orch("cancel", "--force", running.id)
    assert running.state().state == "cancelled"
    assert not list(running.folder.glob("saved-*"))
    orch.cluster.wait(lambda: orch.cluster.idle() == 8, 60, "idle nodes, none drained by our doing")


def test_a_run_keeps_what_the_users_variables_of_sbatch_said(orch: Orch):
    """It may be resumed from cron or another shell. Variables for which no option stands are not in
    the way."""
    user_variables = {
        "SBATCH_PARTITION": "urgent,main",
        "SBATCH_TIMELIMIT": "17",
        "SBATCH_EXPORT": "NONE",
    }
    user_variables["SBATCH_NO_REQUEUE"] = "1"
    argv = [
        "submit",
        "--json",
        "--in-place",
        "--config-dir",
        str(CONF),
        *two_nodes(),
        "--",
        "/bin/false",
    ]
    run = Run(orch, json.loads(orch(*argv, env=user_variables).stdout)["run_dir"])
    assert run.wait("failed").exit_code == 1
    for later in ({}, {"SBATCH_TIMELIMIT": "5", "SBATCH_PARTITION": "short"}):
        orch("resume", run.id, env=later)
        shown = orch.cluster.run("scontrol", "show", "job", run.job)
        assert "Partition=urgent" in shown and "TimeLimit=00:17:00" in shown
        run.wait("failed")


def test_a_resume_that_slurm_refuses_changes_nothing(orch: Orch):
    failed = orch.submit(*two_nodes(), program=("/bin/false",))
    waiting = orch.submit(*two_nodes("backend.options.begin=now+1hour"), worker=LONG)
    orch("cancel", waiting.id)
    failed.wait("failed")
    failed.until("the script has left", lambda: (failed.folder / "slurm" / "over").exists())
    (failed.folder / "slurm" / "exclude").write_text("n1\n")
    (failed.folder / "slurm" / "faults").write_text("1 0 74\n")
    cluster = orch.cluster
    cluster.run("scontrol", "update", "PartitionName=main", "State=INACTIVE")
    try:
        for run, final_state in ((failed, "failed"), (waiting, "cancelled")):
            before = all_files(run)
            stderr = orch("resume", run.id, code=Exit.CONFIG).stderr
            assert "sbatch" in stderr and len(stderr.splitlines()) == 1
            assert all_files(run) == before and run.state().state == final_state
    finally:
        cluster.run("scontrol", "update", "PartitionName=main", "State=UP")
    orch("resume", failed.id)
    assert (
        len(failed.wait("failed").pauses) == 1
        and not (failed.folder / "slurm" / "exclude").exists()
    )


def all_files(run: Run) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("force", [False, True])
def test_a_cancel_that_the_disk_does_not_take_reaches_slurm(orch: Orch, force):
    """The disk is full, or has become read-only: the request cannot be written down."""
    run = orch.submit(*two_nodes(), worker=LONG)
    run.step(3)
    shutil.rmtree(run.folder / "intents", ignore_errors=True)
    (run.folder / "intents").touch()  # no file can be made below a file
    orch("cancel", *(["--force"] if force else []), run.id)
    state = run.wait("cancelled")
    assert state.exit_code == Exit.RESTART and run.restarts == 0
    assert orch.cluster.job_state(run.job) == "CANCELLED" and (force or min(run.saved()) >= 3)


def test_one_question_for_all_runs(orch: Orch, tmp_path):
    """`orch list` asks squeue once, however many runs there are."""
    runs = [
        orch.submit(*two_nodes("backend.options.begin=now+1hour"), worker=LONG) for _ in range(4)
    ]
    calls = tmp_path / "calls"
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "squeue").write_text(f'#!/bin/sh\necho x >> {calls}\nexec /usr/bin/squeue "$@"\n')
    (tools / "squeue").chmod(0o755)
    done = orch("list", "--json", env={"PATH": f"{tools}:{orch.cluster.env['PATH']}"})
    assert {row["state"]["run_id"] for row in json.loads(done.stdout)} == {run.id for run in runs}
    assert {row["state"]["state"] for row in json.loads(done.stdout)} == {"pending"}
    assert calls.read_text() == "x\n"
