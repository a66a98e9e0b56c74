"""The Python API: a program is planned, submitted, watched, ended, resumed and reported without the
command line."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import orchestrator
from orchestrator import api
from orchestrator.backends.slurm.backend import SlurmBackend
from orchestrator.plan.exits import Exit
from orchestrator.run.state import read_state
from tests.backends.test_verbs import home
from tests.beds.failing_disk import failing
from tests.patience import PATIENCE_S, wait_for

__all__ = ["home"]  # the fixture
PROGRAM = Path(__file__).parents[1] / "beds" / "programs" / "reporting.py"


def test_a_plan_is_that_of_the_command_line(home, capsys):
    from orchestrator.cli.main import main

    overrides = ["cluster=h100x64", "parallel=tp8_pp4_zero1"]
    plan = orchestrator.plan_job(*overrides)
    assert main(["plan", *overrides, "--json"]) == 0
    assert f'"hash":"{plan.hash}"' in capsys.readouterr().out.replace(" ", "")
    with pytest.raises(orchestrator.OrchError, match="unknown group or key") as refused:
        orchestrator.plan_job("clutser=h100x64")
    assert refused.value.exit == Exit.USAGE


def test_importing_orchestrator_imports_nothing_more():
    code = (
        "import sys, orchestrator; sys.exit(any(n.startswith(('orchestrator.', 'msgspec')) for n in"
        " sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = orchestrator.nothing


@pytest.fixture
def umask():
    """The caller's: what it is now, when asked."""
    before = os.umask(0o022)

    def now() -> int:
        current_umask = os.umask(0o022)
        os.umask(current_umask)
        return current_umask

    yield now
    os.umask(before)


@pytest.mark.process
def test_the_umask_of_the_caller_stays_and_the_run_is_private(home, umask, tmp_path):
    """Whatever is done to runs from a notebook, the files that it writes itself later can be read
    by others."""
    from orchestrator.cli.main import main

    umask_file = Path("here")
    command = ["sh", "-c", f"umask > {umask_file}; exit 1"]
    run = orchestrator.submit_job("nproc=1", "backend.max_restarts=0", command=command)
    assert umask() == 0o022 and run.wait(PATIENCE_S).state == "failed"
    assert umask_file.read_text().strip() == "0077" and run.folder.state.stat().st_mode & 0o077 == 0
    umask_file.unlink()
    run.resume()
    assert umask() == 0o022 and run.wait(PATIENCE_S).state == "failed"
    assert umask_file.read_text().strip() == "0077"
    with pytest.raises(orchestrator.OrchError):
        orchestrator.submit_job("nproc=1", command=["./missing"])
    assert umask() == 0o022
    argv = ["backend=slurm", "cluster=h100x64", "parallel=tp8", "backend.options.topology=none"]
    assert main(["render", "--in-place", *argv, "--", "sh"]) == 0
    assert main(["submit", "--multirun", "nproc=1", "backend.max_restarts=0,1", "--", "true"]) == 0
    assert umask() == 0o022


@pytest.mark.process
def test_what_is_to_be_describe_left_out_a_run_is_a_warning(home):
    with pytest.warns(
        UserWarning, match="2 nodes of 1 workers are simulated on this machine"
    ) as caught_warnings:
        run = orchestrator.submit_job(
            "cluster=local_nodes", "cluster.gpus_per_node=1", command=["true"]
        )
    assert caught_warnings[0].filename == __file__
    assert run.wait(PATIENCE_S).state == "done"


def test_a_cancel_of_what_does_not_end_ends_itself(home, monkeypatch, capsys):
    """A supervisor that hangs, a job that its scheduler does not let go: the command says so and
    returns."""
    from orchestrator.cli.main import main

    overrides = [
        "backend=slurm",
        "cluster=h100x64",
        "parallel=tp8",
        "backend.options.topology=none",
        "backend.grace_s=0.1",
    ]
    assert main(["render", "--in-place", "--run-id", "stuck", *overrides, "--", "sh"]) == 0
    monkeypatch.setattr(SlurmBackend, "is_alive", lambda *_: True)
    monkeypatch.setattr(SlurmBackend, "state", lambda _, folder: read_state(folder))
    cancels = []
    monkeypatch.setattr(SlurmBackend, "cancel", lambda _, folder, force: cancels.append(force))
    monkeypatch.setattr(api, "_CANCEL_S", 0.1)
    for damaged in (False, True):
        if damaged:
            (home / "runs" / "stuck" / "request.json").write_text("{")
        capsys.readouterr()
        assert main(["cancel", "stuck"]) == Exit.CAPACITY
        err = capsys.readouterr().err
        assert (
            "run stuck still runs" in err
            and "orch cancel --force stuck" in err
            and err.count("\n") == 1
        )
    assert cancels == [False, False]


@pytest.mark.process
def test_a_run_from_its_start_to_its_report(home):
    steps = 100_000  # an hour or more: what is done to the run comes before its end
    command = [sys.executable, str(PROGRAM), str(steps), "0.05"]
    run = orchestrator.submit_job("nproc=2", command=command, run_id="mine-1")
    assert (run.id, run.handle, repr(run)) == ("mine-1", "local://mine-1", "Run('local://mine-1')")
    with pytest.raises(TimeoutError, match="mine-1 is "):
        run.wait(timeout_s=0.0)
    found_run = orchestrator.Run.find("mine")
    wait_for(lambda: list(run.logs(1)) == ["starts after step 0"], what="first line of rank 1")
    wait_for(lambda: (found_run.status().live.step or 0) >= 3, what="step 3")
    assert found_run.status().live.loss is not None and found_run.status().spent.ettr is not None
    with ThreadPoolExecutor(1) as pool:
        with failing(run.folder.state):
            waiting = pool.submit(run.wait, 0.0)
            assert futures.wait([waiting], 1.0).not_done, (
                "a state that cannot be read ends no waiting"
            )
        with pytest.raises(TimeoutError, match="mine-1 is running"):
            waiting.result(PATIENCE_S)
    with pytest.raises(orchestrator.OrchError, match="cancel it first"):
        run.resume()
    assert run.cancel().state == "cancelled"
    with pytest.raises(orchestrator.OrchError, match="has ended: cancelled"):
        run.cancel()
    for rank in range(2):
        (run.folder.checkpoints / f"rank-{rank}").write_text(str(steps - 2))
    assert run.resume() == run.handle
    lines = list(run.logs(1, follow=True))
    assert lines[0] == "starts after step 0" and lines[-1] == f"starts after step {steps - 2}"
    assert list(run.logs(1, last=1)) == lines[-1:]
    assert run.wait(timeout_s=PATIENCE_S).state == "done"
    assert run.report()["steps"]["completed"] == steps and run.plan().program
    with pytest.raises(orchestrator.OrchError, match="is done"):
        run.resume()
    with pytest.raises(orchestrator.OrchError, match="no run 'other'"):
        orchestrator.Run.find("other")
