"""The Python API: a program is planned, submitted, watched, ended, resumed and reported without the
command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from orchestrator import api as orch
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
    plan = orch.plan(*overrides)
    assert main(["plan", *overrides, "--json"]) == 0
    assert f'"hash":"{plan.hash}"' in capsys.readouterr().out.replace(" ", "")
    with pytest.raises(orch.OrchError, match="unknown group or key") as refused:
        orch.plan("clutser=h100x64")
    assert refused.value.exit == Exit.USAGE
    program = ["sh", "-c", "exit"]
    assert main(["submit", "--dry-run", "--json", "nproc=8", "--", *program]) == 0
    request = json.loads(capsys.readouterr().out)
    assert orch.plan("nproc=8", command=program).hash == request["plan_hash"]
    assert not home.exists()


def test_importing_orchestrator_imports_nothing_more():
    """Every process of a run imports the package, and every verb the API."""
    for module, others in (("orchestrator", "orchestrator."), ("orchestrator.api", "msgspec")):
        code = f"""
import sys, {module}
sys.exit(any(name.startswith('{others}') for name in sys.modules))
"""
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0, module
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = orch.nothing


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"command": "python train.py"}, "command='python train.py' is one text"),
        ({"command": ["python", "train.py", "--lr", 3]}, "command: 3 is not text"),
        ({"command": ["python"], "env": "HF_TOKEN"}, "env='HF_TOKEN' is one text"),
    ],
)
def test_words_that_are_no_list_of_texts_are_refused(home, arguments, complaint):
    with pytest.raises(orch.OrchError, match=complaint) as refused:
        orch.submit("nproc=1", **arguments)
    assert refused.value.exit == Exit.USAGE


def caller() -> dict[str, object]:
    """What a notebook shares with the functions that it calls."""
    status = Path("/proc/self/status").read_text()
    return {
        "umask": re.search(r"Umask:\s*(\d+)", status)[1],
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "warnings": list(warnings.filters),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
    }


@pytest.fixture
def open_umask(monkeypatch):
    """With this umask, a file is private only if whoever writes it says so. Nobody changes it: it
    belongs to all threads of the process."""
    before = os.umask(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "umask", lambda mask: pytest.fail(f"umask {mask:o}"))
        yield
    os.umask(before)


def loose(folder: Path) -> list[Path]:
    """The files and folders in a folder that others could read."""
    return [
        path
        for path in (folder, *folder.rglob("*"))
        if not path.is_symlink() and path.lstat().st_mode & 0o077
    ]


@pytest.mark.process
def test_a_call_leaves_its_caller_as_it_is_and_the_run_is_private(home, open_umask, tmp_path):
    """Whatever is done to runs from a notebook, the files that it writes itself can be read by
    others, also those that another thread writes at the same time; its own Hydra stays."""
    from orchestrator.cli.main import main

    Path("inner/folder").mkdir(parents=True)
    Path("inner/folder/program.py").write_text("")
    umask_file = tmp_path / "umask"
    command = ["sh", "-c", f"umask > {umask_file}; exit 1"]
    before = caller()
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        run = orch.submit("nproc=1", "backend.max_restarts=0", command=command, in_place=False)
        assert GlobalHydra.instance().is_initialized()
    assert run.wait(PATIENCE_S).state == "failed"
    assert umask_file.read_text().strip() == "0077" and loose(run.folder.path) == []
    umask_file.unlink()
    run.resume()
    assert run.wait(PATIENCE_S).state == "failed"
    assert umask_file.read_text().strip() == "0077" and loose(run.folder.path) == []
    with pytest.raises(orch.OrchError):
        orch.submit("nproc=1", command=["./missing"])
    assert caller() == before
    argv = ["backend=slurm", "cluster=h100x64", "parallel=tp8", "backend.options.topology=none"]
    assert main(["render", *argv, "--", "sh"]) == 0
    assert main(["submit", "--multirun", "nproc=1", "backend.max_restarts=0,1", "--", "true"]) == 0
    assert loose(home) == [] and caller() == before


@pytest.mark.process
def test_two_threads_submit_at_once(home):
    """Neither is the main thread, where Python handles signals. Their configurations are new, so
    both compose them."""
    before = caller()
    start = Barrier(2)

    def submit_and_wait(name: str) -> tuple[str, str]:
        start.wait(PATIENCE_S)
        layout = orch.plan("nproc=1", f"run.name={name}", command=["true"]).parallel
        run = orch.submit("nproc=1", f"run.name={name}", command=["true"])
        assert layout == run.plan().parallel
        return run.id[: len(name)], run.wait(PATIENCE_S).state

    names = [f"{name}-{os.urandom(4).hex()}" for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(submit_and_wait, names)) == [(name, "done") for name in names]
    assert caller() == before


FAILING_ONCE = """
import os, sys, orch_report
epoch = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for step in range(1, 6):
    orch_report.report(step=step, loss=1 / step, tokens=32)
    print("epoch", epoch, "step", step)
if epoch == 0 and os.environ["RANK"] == "1":
    sys.exit(3)
"""


@pytest.mark.process
def test_what_happens_comes_as_values(home):
    Path("program.py").write_text(FAILING_ONCE)
    overrides = ["nproc=2", "backend.max_restarts=1"]
    with orch.submit(*overrides, command=[sys.executable, "program.py"]) as run:
        updates = list(run.follow())
    states = [update.state for update in updates if isinstance(update, orch.StateUpdate)]
    steps = [update for update in updates if isinstance(update, orch.StepUpdate)]
    (fault,) = [update for update in updates if isinstance(update, orch.FaultUpdate)]
    assert updates[-1] == orch.EndUpdate(state=run.state) and run.state.state == "done"
    assert (
        states
        and "done" not in states
        and [step.step for step in steps if step.epoch]
        == [
            1,
            2,
            3,
            4,
            5,
        ]
    )
    assert all(step.loss == 1 / step.step and step.tokens == 32 for step in steps)
    assert (fault.cause.kind, fault.cause.rank, fault.cause.code) == ("worker_exit", 1, 3)
    assert fault.next_epoch == 1
    later_steps = [step for step in updates[updates.index(fault) :] if step in steps]
    assert later_steps == [step for step in steps if step.epoch == 1], "in the order of events"
    # Either rank may be the first that reports a step, so only the times may differ.
    followed_later = [
        (update.epoch, update.step, update.loss, update.tokens)
        for update in run.follow()
        if isinstance(update, orch.StepUpdate)
    ]
    followed = [(step.epoch, step.step, step.loss, step.tokens) for step in steps]
    assert followed_later == followed, "the same for who comes later"
    merged = list(run.logs())
    assert {f"[rank {rank}] epoch 1 step 5" for rank in (0, 1)} <= set(merged)
    assert list(run.logs(last=1)) == [f"[rank {rank}] epoch 1 step 5" for rank in (0, 1)]
    with pytest.raises(orch.OrchError, match="has no rank 2: 0 to 1"):
        list(run.logs(2))


@pytest.mark.process
def test_what_is_to_be_describe_left_out_a_run_is_a_warning(home):
    with pytest.warns(
        UserWarning, match="2 nodes of 1 workers are simulated on this machine"
    ) as caught_warnings:
        run = orch.submit("cluster=local_nodes", "cluster.gpus_per_node=1", command=["true"])
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
    monkeypatch.setattr("orchestrator.api.run._CANCEL_S", 0.1)
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
    run = orch.submit("nproc=2", command=command, run_id="mine-1")
    assert (run.id, run.handle, repr(run)) == ("mine-1", "local://mine-1", "Run('local://mine-1')")
    with pytest.raises(TimeoutError, match="mine-1 is "):
        run.wait(timeout_s=0.0)
    found_run = orch.Run.find("mine")
    wait_for(lambda: list(run.logs(1)) == ["starts after step 0"], what="first line of rank 1")
    assert not run.wait(PATIENCE_S, step=3).is_final
    assert found_run.status().live.loss is not None and found_run.status().spent.ettr is not None
    with ThreadPoolExecutor(1) as pool:
        with failing(run.folder.state):
            waiting = pool.submit(run.wait, 0.0)
            assert futures.wait([waiting], 1.0).not_done, (
                "a state that cannot be read ends no waiting"
            )
        with pytest.raises(TimeoutError, match="mine-1 is running"):
            waiting.result(PATIENCE_S)
    with pytest.raises(orch.OrchError, match="cancel it first"):
        run.resume()
    with pytest.raises(KeyError), run:  # whatever ends the block ends the run
        raise KeyError
    assert run.state.state == "cancelled" and not run.backend.is_alive(run.folder)
    with pytest.raises(orch.OrchError, match="has ended: cancelled"):
        run.cancel()
    for rank in range(2):
        (run.folder.checkpoints / f"rank-{rank}").write_text(str(steps - 2))
    assert run.resume() == run.handle
    assert run.wait(PATIENCE_S, step=1).epoch == 1, "the steps of the attempt before do not count"
    lines = list(run.logs(1, follow=True))
    assert lines[0] == "starts after step 0" and lines[-1] == f"starts after step {steps - 2}"
    assert list(run.logs(1, last=1)) == lines[-1:]
    assert run.wait(timeout_s=PATIENCE_S, step=steps + 1).state == "done"
    assert run.report()["steps"]["completed"] == steps and run.plan().program
    with pytest.raises(orch.OrchError, match="is done"):
        run.resume()
    with pytest.raises(orch.OrchError, match="no run 'other'"):
        orch.Run.find("other")
