"""Signals to `orch run`, `orch submit` and what they have started: nobody is left with a run that
nobody told of."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.backends.local import backend as local
from orchestrator.cli.main import main
from orchestrator.run import create
from orchestrator.run.code import snapshot as code_snapshot
from orchestrator.run.folder import RunFolder
from orchestrator.run.held_signals import ENDING
from orchestrator.run.state import read_state
from tests.beds.bundles import wait_end
from tests.patience import PATIENCE_S, wait_for

from .test_verbs import home, program

__all__ = ["home"]  # the fixture

#: A program whose ranks save when they are asked to end.
SAVES = """
    import os, pathlib, signal, sys, time
    rank = os.environ["RANK"]

    def save(*_):
        pathlib.Path("saved-" + rank).touch()
        sys.exit(75)

    signal.signal(signal.SIGTERM, save)
    pathlib.Path("began-" + rank).touch()
    while True:
        time.sleep(0.05)
"""


def heard() -> None:
    """Sets a child's signals as a terminal's shell leaves them, also where the tests run under
    nohup."""
    for signum in ENDING:
        signal.signal(signum, signal.SIG_DFL)


def deaf_to_hangups() -> None:
    """Sets a child's signals as nohup does."""
    heard()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def watch(*arguments: str, ready=heard, program_text=SAVES) -> subprocess.Popen[str]:
    """A verb in a session of its own, once both ranks of its run have begun."""
    program(program_text)
    child = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=ready,
    )
    wait_for(
        lambda: child.poll() is not None or all(Path(f"began-{rank}").exists() for rank in "01"),
        what="ranks",
    )
    return child


RUN = ["run", "--nproc-per-node", "2", "--run-id", "mine", "my_train.py"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("signals", "ready"),
    [
        ([signal.SIGTERM], heard),
        ([signal.SIGHUP], heard),
        ([signal.SIGINT, signal.SIGINT], heard),
        ([signal.SIGHUP, signal.SIGTERM], deaf_to_hangups),
    ],
    ids=["terminated", "hung up", "Ctrl-C twice", "terminated under nohup"],
)
def test_a_run_of_orch_run_ends_with_it(home, signals, ready):
    """The workers save, as torchrun's do, and the code is that of a process which the signal has
    ended."""
    child = watch(*RUN, ready=ready)
    for signum in signals[:-1]:
        child.send_signal(signum)
        if ready is heard:
            assert any("again within" in line for line in child.stderr)
    child.send_signal(signals[-1])
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 128 + signals[-1], err
    assert "ending run local://mine" in err
    assert all(Path(f"saved-{rank}").exists() for rank in "01")
    state = wait_end(RunFolder(home / "runs" / "mine"))
    assert (state.state, state.exit_code) == ("cancelled", 75)


#: One whose ranks then go on.
STUBBORN = SAVES.replace("sys.exit(75)", "pass")


@pytest.mark.process
def test_one_more_signal_kills_a_run_that_does_not_end(home):
    child = watch(*RUN, program_text=STUBBORN)
    child.send_signal(signal.SIGTERM)
    wait_for(
        lambda: all(Path(f"saved-{rank}").exists() for rank in "01"),
        what="ranks that were asked to end",
    )
    child.send_signal(signal.SIGHUP)
    _, err = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 128 + signal.SIGTERM and "SIGHUP: killing run local://mine" in err
    assert wait_end(RunFolder(home / "runs" / "mine")).state == "cancelled"


@pytest.mark.process
@pytest.mark.parametrize("signum", ENDING)
def test_a_submitted_run_goes_on_without_who_watches_it(home, signum):
    child = watch(
        "submit", "nproc=2", "--follow", "--run-id", "mine", "--", "python", "my_train.py"
    )
    child.send_signal(signum)
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 128 + signum
    assert (
        out.startswith("local://mine\n")
        and "The run continues. See it: orch status local://mine" in out
    )
    assert RunFolder(home / "runs" / "mine").is_alive()
    assert main(["cancel", "mine"]) == 0


@pytest.fixture
def interruptible():
    """Ctrl-C reaches Python also where the tests were started without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


#: Where in a submission the signal comes, and whether a run has been started by then.
MOMENTS = {
    "the folder": (RunFolder, "create", False),
    "its files": (create, "write_private", False),
    "the copy of the program": (code_snapshot, "copy", False),
    "its state": (create, "write_state", False),
    "the lock": (RunFolder, "take_lock", True),
    "the supervisor": (local, "identity", True),
    "its record": (local, "write_record", True),
}


@pytest.mark.process
@pytest.mark.parametrize("follow", [[], ["--follow"]], ids=["", "followed"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_while_a_run_is_submitted_leaves_nothing_or_a_run_that_is_told(
    home, capsys, monkeypatch, interruptible, moment, follow
):
    program("import time; time.sleep(600)")
    owner, name, started = MOMENTS[moment]
    real = getattr(owner, name)

    def interrupted(*args, **options):
        monkeypatch.setattr(owner, name, real)
        outcome = real(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return outcome

    monkeypatch.setattr(owner, name, interrupted)
    flags = ["nproc=1", f"run.dir={home.parent / 'elsewhere'}", "--run-id", "mine", *follow]
    code = main(["submit", "--snapshot", *flags, "--", "python", "my_train.py"])
    out = capsys.readouterr().out
    folder = RunFolder(home.parent / "elsewhere" / "mine")
    assert (folder.path.exists(), (home / "runs" / "mine").is_symlink()) == (started, started)
    assert out.startswith("local://mine\n") == started
    assert code == 130
    if started:
        assert ("The run continues" in out) == bool(follow)
        assert folder.is_alive() and not read_state(folder).is_final
        assert main(["cancel", "mine", "--force"]) == 0


@pytest.mark.process
def test_who_takes_no_second_ctrl_c_leaves_the_run(home):
    program(SAVES)
    code = (
        "from orchestrator.cli import owned_run; owned_run._SECOND_S = 0.5; from"
        " orchestrator.cli.main import main;"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", f"{code} raise SystemExit(main())", *RUN],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=heard,
    )
    wait_for(Path("began-1").exists)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 130 and "The run continues" in out
    assert RunFolder(home / "runs" / "mine").is_alive()
    assert main(["cancel", "mine"]) == 0
