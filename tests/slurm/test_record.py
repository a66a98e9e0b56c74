"""A run's true state from the run folder and Slurm's answer together. Pure."""

from __future__ import annotations

import pytest

from orchestrator.backends.base import After
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.job import task
from orchestrator.backends.slurm.job.node_assignment import read_probe
from orchestrator.backends.slurm.queue import Job
from orchestrator.backends.slurm.record import (
    SlurmRecord,
    combined_state,
    find_job,
    last_log_error,
    record_job,
    script_exit_code,
    state_without_slurm,
)
from orchestrator.backends.slurm.states import JOB_STATES
from orchestrator.backends.slurm.submission import JobWatcher
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import FINAL, SCHEMA, RunState, read_state, write_state


def state(phase: str, code: int | None = None, reason: str | None = None) -> RunState:
    return RunState(
        schema=SCHEMA, run_id="r", state=phase, created_at=0, updated_at=0, writer="backend", backend="slurm",
        plan_hash="h", exit_code=code, reason=reason,
    )  # fmt: skip


def job(state_name: str, **fields: object) -> Job:
    return Job(id="7", state=state_name, **fields)


@pytest.mark.parametrize(
    ("folder", "slurm", "cancelled", "want", "code"),
    [
        (("pending", None), "PENDING", False, "pending", None),
        (("pending", None), "RUNNING", False, "starting", None),
        (("running", None), "RUNNING", False, "running", None),
        (("stopped", 75), "PENDING", False, "pending", None),  # requeued after a save
        (
            ("stopped", 75),
            "RUNNING",
            False,
            "restarting",
            None,
        ),  # the next attempt has not written its state yet
        (("done", 0), "RUNNING", False, "stopping", None),  # its script has not ended yet
        (("cancelled", 75), "RUNNING", False, "stopping", None),
        (
            ("stopped", 75),
            "FAILED",
            False,
            "stopped",
            75,
        ),  # saved, not requeued: the script's 75 is no failure
        (("done", 0), "COMPLETED", False, "done", 0),
        (("done", 0), "COMPLETING", False, "stopping", None),
        (("failed", 1), "FAILED", False, "failed", 1),
        (("failed", 65), "FAILED", False, "failed", 65),
        (("running", None), "PREEMPTED", False, "stopped", 75),
        (("running", None), "TIMEOUT", False, "stopped", 75),
        (("running", None), "NODE_FAIL", False, "stopped", 74),
        (("running", None), "OUT_OF_MEMORY", False, "failed", 1),
        (("stopped", 75), "CANCELLED", False, "cancelled", 75),
        (("running", None), "CANCELLED by 0", True, "cancelled", 75),
        (("stopped", 75), "CANCELLED", True, "cancelled", 75),
        (("done", 0), "CANCELLED", True, "done", 0),  # too late to be cancelled
        (("pending", None), "COMPLETED", False, "done", 0),
        (("running", None), "FAILED", False, "failed", 76),
        (("pending", None), "", True, "cancelled", 75),  # Slurm forgets it without accounting
        (("pending", None), "", False, "failed", 76),
    ],
)
def test_both_together(folder, slurm, cancelled, want, code):
    run_state = combined_state(state(*folder), job(slurm) if slurm else None, cancelled)
    assert (run_state.state, run_state.exit_code) == (want, code)


@pytest.mark.parametrize("name", sorted(JOB_STATES))
@pytest.mark.parametrize("phase", ["pending", "running", "stopped", "done", "failed", "cancelled"])
def test_a_final_state_is_given_when_the_job_is_over_or_waits_although_the_run_is(name, phase):
    """Slurm 24.11 requeues a job that ended well in its GraceTime: pending, but there is nothing
    left to do."""
    code = {"done": 0, "failed": 1, "stopped": 75, "cancelled": 75}.get(phase)
    run_state = combined_state(state(phase, code), job(name), cancel_asked=False)
    waits = JOB_STATES[name].phase in ("pending", "starting") and phase in (
        "done",
        "failed",
        "cancelled",
    )
    assert (
        (run_state.state in FINAL)
        == (run_state.exit_code is not None)
        == (JOB_STATES[name].ended or waits)
    )
    if waits:
        assert (run_state.state, run_state.exit_code) == (phase, code)
    if phase != "stopped":
        assert run_state.state != "restarting", "no attempt follows"


@pytest.mark.parametrize("name", ["CANCELLED by 0", "TIMEOUT", "PREEMPTED"])
def test_what_slurm_says_does_not_hide_the_runs_own_reason(name):
    run_reason = "n0: got SIGTERM; rank 1 on n0 was asked to save and failed: exit code 3"
    run_state = combined_state(state("stopped", 75, run_reason), job(name), cancel_asked=False)
    assert (
        run_state.reason.startswith(f"{run_reason}; job 7: ")
        and run_state.exit_code == Exit.RESTART
    )


def test_waiting_says_why_and_until_when():
    run_state = combined_state(
        state("pending"), job("PENDING", reason="Resources", start="2026-11-21T14:00:00"), False
    )
    queue_reason = "waiting in the queue; Resources: waiting for nodes to become free"
    assert run_state.reason == f"job 7: {queue_reason}; expected to start 2026-11-21T14:00:00"


def test_a_job_that_is_ending_is_not_expected_to_start():
    run_state = combined_state(
        state("running"), job("COMPLETING", start="2026-11-21T14:00:00"), False
    )
    assert run_state.reason == "job 7: ending, some processes are left"


def test_a_script_that_has_left_is_not_pending_again():
    capped = state("stopped", 75, "saved")
    assert combined_state(capped, job("PENDING"), False, script_exit=75) == capped
    assert combined_state(capped, job("PENDING"), False).state == "pending"


@pytest.mark.parametrize(
    ("reason", "script_exit", "last_line", "code", "explanation"),
    [
        ("RaisedSignal:53(Real-time_signal_19)", None, "", Exit.NODE, "does it see the run folder"),
        (
            "NonZeroExitCode",
            65,
            "orch: error: no node has what the run needs: image",
            65,
            "failed; orch: error: no node",
        ),
        ("NonZeroExitCode", None, "", Exit.CAPACITY, "job 7: failed"),
        ("JobLaunchFailure", None, "", Exit.NODE, "a failed prolog?"),
    ],
)
def test_what_failed_before_the_agents_is_told(reason, script_exit, last_line, code, explanation):
    run_state = combined_state(
        state("pending"),
        job("FAILED", reason=reason),
        False,
        script_exit=script_exit,
        last_line=last_line,
    )
    assert (run_state.state, run_state.exit_code) == ("failed", code)
    assert explanation in run_state.reason and run_state.cause.text == run_state.reason


def test_the_last_error_of_the_newest_job_log(tmp_path):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    assert last_log_error(folder) == "" and script_exit_code(folder) is None
    (folder.logs / "slurm-7.log").write_text(
        "Loading\nslurmstepd: error: execve(): \x1b[1mno\nbye\n\n"
    )
    (folder.logs / "slurm-7-agents.log").write_text("error: not this one\n")
    assert last_log_error(folder) == "slurmstepd: error: execve():  [1mno"
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "over").write_text("65\n")
    assert script_exit_code(folder) == 65


def test_a_job_that_slurm_has_forgotten():
    assert combined_state(state("done", 0), None, False).state == "done"
    lost = combined_state(state("running"), None, False)
    assert (lost.state, lost.exit_code) == (
        "failed",
        Exit.CAPACITY,
    ) and "does not know the job" in lost.reason
    assert combined_state(state("pending"), None, False, submitted=False).state == "pending"


@pytest.mark.parametrize(
    ("folder", "over", "want"),
    [
        (("running", None), False, "running"),
        (("stopped", 75), False, "restarting"),  # saved; whether it comes back Slurm alone knows
        (("failed", 74), False, "restarting"),
        (("failed", 76), False, "restarting"),
        (("stopped", 75), True, "stopped"),  # come back often enough
        (("failed", 76), True, "failed"),
        (("failed", 1), False, "failed"),
        (("done", 0), False, "done"),
        (("cancelled", 75), False, "cancelled"),
    ],
)
def test_while_slurm_does_not_answer(folder, over, want):
    run_state = state_without_slurm(state(*folder, "why it ended"), over, "scontrol: no answer")
    assert run_state.state == want and (run_state.exit_code is None) == (not run_state.is_final)
    assert run_state.is_final or run_state.reason.startswith("scontrol: no answer")


def test_a_job_submitted_by_hand_is_found_by_its_name():
    jobs = {"3": job("RUNNING", name="orch-r"), "12": Job(id="12", state="PENDING", name="orch-r")}
    assert find_job("r", None, jobs).id == "12"
    assert find_job("other", None, jobs) is None
    assert find_job("r", SlurmRecord(job_id="3", submitted_at=0), jobs).state == "RUNNING"


@pytest.mark.parametrize(
    ("end", "waits"),
    [
        (("done", 0), False),
        (("running", None), True),
        (("stopped", 75), True),
    ],  # a requeue may follow a 75
)
def test_a_run_that_is_done_is_not_waited_for_while_its_job_ends(tmp_path, monkeypatch, end, waits):
    """Slurm may call the job PREEMPTED in a moment, and what waits for a good end would never
    start."""
    folder = RunFolder(tmp_path / "r")
    folder.create()
    write_state(folder, state(*end))
    backend = SlurmBackend()
    monkeypatch.setattr(backend, "_find_job", lambda _: job("RUNNING"))
    awaited_runs = [After("ok", folder)]
    assert backend.after({}, awaited_runs) == ({"dependency": "afterok:7"} if waits else {})


def test_a_run_that_ended_since_slurm_s_answer_is_asked_for_again(tmp_path, monkeypatch):
    """A short run was done, then about to end, because the answer was from before its start."""
    answers = iter(["PENDING", "RUNNING", "COMPLETED"])
    slurm = Slurm()
    monkeypatch.setattr(slurm, "jobs", lambda ids: {"7": job(next(answers))})
    backend = SlurmBackend()
    monkeypatch.setattr(backend, "_watcher", JobWatcher(slurm, delay_s=60))
    folder = RunFolder(tmp_path / "r")
    folder.create()
    record_job(folder, "7")
    write_state(folder, state("pending"))
    assert backend.state(folder).state == "pending"
    write_state(folder, state("done", 0))
    assert backend.state(folder).state == "stopping"
    backend._watcher.clear()
    assert backend.state(folder).state == "done"


def test_what_the_nodes_answer():
    probe_output = "orch-node 0 n0 spine.leaf0.n0\nbanner\n\norch-node 1 n1 n1 image\n"
    assert read_probe(probe_output) == {"n0": "spine.leaf0.n0", "n1": "n1"}
    for broken_output in (
        "orch-node 0 n0\n",
        "0 n0 a\n",
        "slurmstepd: error: x y z\n",
        "orch-node x n0 a\n",
    ):
        assert read_probe(broken_output) == {}
    with pytest.raises(Exception, match="answered twice") as refused:
        read_probe("orch-node 0 n0 a\norch-node 1 n0 a\n")
    assert refused.value.exit == Exit.NODE


@pytest.mark.parametrize(
    ("srun", "code", "phase"), [(143, Exit.RESTART, "stopped"), (137, Exit.CAPACITY, "failed")]
)
def test_an_attempt_whose_agents_were_killed_before_they_wrote_a_state(tmp_path, srun, code, phase):
    """A notice that comes while agents start ends them; that is no fault of a node."""
    folder = RunFolder(tmp_path / "r")
    folder.create()
    write_state(folder, state("pending"))
    assert task.main(["outcome", "--run-dir", str(folder.path), "--code", str(srun)]) == code
    run_state = read_state(folder)
    assert (run_state.state, run_state.exit_code, run_state.cause.code) == (phase, code, srun)
    write_state(folder, state("failed", 1))
    assert task.main(["outcome", "--run-dir", str(folder.path), "--code", str(srun)]) == 1, (
        "it stays"
    )
