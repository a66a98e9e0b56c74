"""Programs that report with `orch_report`: progress, goodput, a save before the end, and the plan's
mesh."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import orch_report
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import read_state
from tests.beds.bundles import wait_end, wait_for
from tests.beds.programs import SIMULATED_NODES
from tests.patience import PATIENCE_S
from trainer.verify.ranks import run_ranks

from .test_verbs import home, orch, program

__all__ = ["home"]  # the fixture
#: What the program says that a step took: what a busy machine makes of its sleeps is not tested.
TOLD_STEP_S = 0.25
PROGRAMS = Path(__file__).parents[1] / "beds" / "programs"


def status(capsys, folder: RunFolder) -> dict:
    return json.loads(orch(capsys, "status", folder.run_id, "--json")[1])


@pytest.mark.process
def test_reports_give_progress_goodput_and_a_save_before_the_end(home, capsys):
    script = [sys.executable, str(PROGRAMS / "reporting.py")]
    argv = ["nproc=2", "--json", "--", *script, "100000", "0.05", str(TOLD_STEP_S)]
    code, out, err = orch(capsys, "submit", *argv)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))

    def steps() -> list[int]:
        lines = (
            folder.metrics("node-0").read_text().splitlines()
            if folder.metrics("node-0").exists()
            else []
        )
        reports = [json.loads(line) for line in lines]
        return [
            max((line["step"] for line in reports if line["rank"] == rank), default=0)
            for rank in range(2)
        ]

    wait_for(lambda: min(steps()) >= 3, what="step 3 of both")
    run_status = status(capsys, folder)
    assert run_status["live"]["loss"] == pytest.approx(1 / run_status["live"]["step"])
    assert run_status["live"]["tokens_per_s"] == pytest.approx(100 / TOLD_STEP_S)
    assert run_status["goodput"]["ettr"] > 0
    assert "progress" not in orch(capsys, "status", folder.run_id)[1]
    assert orch(capsys, "cancel", folder.run_id)[0] == 0
    assert wait_end(folder).state == "cancelled"
    saved = [int((folder.path / "checkpoints" / f"rank-{rank}").read_text()) for rank in range(2)]
    assert min(saved) >= 3 and status(capsys, folder)["live"]["saved"]["step"] in saved
    for rank in range(2):
        (folder.path / "checkpoints" / f"rank-{rank}").write_text("99998")
    assert orch(capsys, "resume", folder.run_id, "--follow")[0] == 0
    assert folder.rank_log(1).read_text().endswith("starts after step 99998\n")
    report = json.loads(orch(capsys, "report", folder.run_id, "--json")[1])
    assert report["steps"]["completed"] == 100_000
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
    monkeypatch.setenv("ORCH_REPORT_PID", "")  # what the first report sets is taken back
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


#: How a process comes to have a worker's variables without its pipe: what it runs first.
WITHOUT_THE_PIPE = {
    "closed": "os.close(3); os.open('mine', os.O_CREAT | os.O_WRONLY)",
    "another pipe": "ends = os.pipe(); os.dup2(ends[1], 3)",
    "a file by dup2": "os.dup2(os.open('mine', os.O_CREAT | os.O_WRONLY), 3)",
    "nothing at the number": "os.close(3)",
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("pipe_loss", WITHOUT_THE_PIPE)
def test_a_descriptor_that_is_not_the_agent_s_pipe_is_never_written_to(tmp_path, pipe_loss, late):
    """`late`: the program itself closes its descriptors after it has imported orch_report."""
    first = ("import orch_report", WITHOUT_THE_PIPE[pipe_loss])
    order = first if late else reversed(first)
    code = "; ".join(
        ["import os", *order, "orch_report.report(step=5)", "assert not orch_report.active()"]
    )
    assert reports_of(code, tmp_path) == []
    assert not (tmp_path / "mine").exists() or (tmp_path / "mine").read_bytes() == b""


@pytest.mark.parametrize(
    "child",
    [
        "os.system(again)",
        "subprocess.run(again, shell=True, close_fds=False)",
        "os.fork() or report(step=9)",
    ],
)
def test_children_of_the_process_that_reports_are_silent_though_they_have_its_pipe(tmp_path, child):
    again = f"{sys.executable} -c 'import orch_report; orch_report.report(step=9)'"
    code = (
        f"import os, subprocess; from orch_report import report; again = {again!r}; report(step=1);"
        f" {child}"
    )
    assert steps_of(code, tmp_path) == [1]


def test_a_program_below_a_shell_and_one_that_executes_itself_again_report(tmp_path):
    code = (
        "import os, sys, orch_report; orch_report.report(step=int(sys.argv[1])); "
        "sys.argv[1] == '1' and os.execv(sys.executable, [*sys.orig_argv[:-1], '2'])"
    )
    shell = f"import os; os.system({shlex.join([sys.executable, '-c', code, '1'])!r})"
    assert steps_of(shell, tmp_path) == [1, 2]


def test_phases_are_no_part_of_a_step_and_last_until_the_next_sign(tmp_path):
    code = (
        "import time, orch_report\n"
        "orch_report.report(step=7)\n"
        "with orch_report.phase('evaluation', limit_s=60):\n"
        "    orch_report.alive()\n"
        "    with orch_report.phase('save'):\n"
        "        time.sleep(0.5)\n"
        "orch_report.alive('compile', limit_s=9)\n"
        "orch_report.report(step=8, own_s=0.25)\n"
    )
    reports = reports_of(code, tmp_path)
    pulses = [report for report in reports if report["kind"] == "pulse"]
    assert [(pulse["phase"], pulse.get("limit_s")) for pulse in pulses] == [
        ("train", None),
        ("evaluation", 60.0),
        ("evaluation", 60.0),
        ("save", 1800.0),
        ("evaluation", 60.0),
        ("train", None),
        ("compile", 9.0),
        ("train", None),
    ]
    assert [pulse["step"] for pulse in pulses] == [8] * 7 + [9]  # the step in progress
    step = reports[-2]
    assert step["phase_s"]["checkpoint"] >= 0.5 > step["step_s"] and step["own_s"] == 0.25


def test_a_worker_of_a_data_loader_reports_nothing_and_a_forked_child_can_be_ended(tmp_path):
    """A pool of multiprocessing that cannot end its processes waits for them without end."""
    code = """
import multiprocessing, os, signal, torch.utils.data
import orch_report

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        orch_report.report(step=99)
        return index

orch_report.save_requested()
os.environ.pop("ORCH_REPORT_PID")  # as if no process had reported yet
assert list(torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=None)) == [0, 1]
child = multiprocessing.get_context("fork").Process(target=signal.pause)
child.start()
child.terminate()
child.join()
assert child.exitcode == -signal.SIGTERM and not orch_report.save_requested()
orch_report.report(step=1)
"""
    assert steps_of(code, tmp_path) == [1]


@pytest.mark.process
def test_numbers_that_json_does_not_know_keep_no_step_from_its_report(tmp_path):
    """In fp16 an infinite norm is usual; a limit of `alive` counts inside a phase, too."""
    code = """
import orch_report
orch_report.report(step=1, loss=float("nan"), grad_norm=float("inf"), lr=0.5)
with orch_report.phase("evaluation"):
    orch_report.alive(limit_s=7200)
orch_report.saved(1, seconds=True)
"""
    step, _pulse, entered, alive, left, event = reports_of(code, tmp_path)
    assert step["lr"] == 0.5 and not step.keys() & {"loss", "grad_norm"}
    assert (entered["limit_s"], alive["limit_s"], left.get("limit_s")) == (1800.0, 7200.0, None)
    assert event["fields"]["seconds"] == 1.0


def test_a_first_call_in_another_thread_says_where_it_belongs(monkeypatch):
    monkeypatch.setattr(orch_report, "_worker", orch_report._Worker())
    errors: list[str] = []

    def call() -> None:
        try:
            orch_report.must_save()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "must first be called in the main thread" in errors[0]


@pytest.mark.process
@pytest.mark.parametrize("step_s", [0.0005, 1.1])
def test_the_ranks_agree_on_one_call_and_rarely_where_steps_are_short(step_s, monkeypatch):
    """The second rank alone gets the signal. Long steps are answered at once."""

    def train(rank: int) -> list[int]:
        orch_report._worker = orch_report._Worker()
        orch_report.save_requested()
        exchanges: list[int] = []
        all_reduce = torch.distributed.all_reduce
        torch.distributed.all_reduce = lambda *args, **options: (
            exchanges.append(1),
            all_reduce(*args, **options),
        )
        signal_at = 1 if step_s > 1 else 300
        for call in range(1, 2000):
            time.sleep(step_s)
            if rank == 1 and call == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if orch_report.must_save():
                return [call, len(exchanges)]
        return []

    first, second = run_ranks(train, 2)
    assert first == second
    calls, exchanges = first
    if step_s > 1:
        assert calls == exchanges == 1
    else:
        assert 300 <= calls <= 350 and exchanges <= calls / 20


@pytest.mark.parametrize("name", ["RANK", "ORCH_EPOCH", "ORCH_REPORT_FD", "ORCH_REPORT_PID"])
@pytest.mark.parametrize("value", ["", "x", "-1", "99999999999999999999"])
def test_variables_that_are_no_numbers_end_no_import(tmp_path, name, value):
    reports_of("import orch_report; orch_report.report(step=1)", tmp_path, {name: value})


def steps_of(code: str, folder: Path) -> list[int]:
    """The steps that a worker that runs this code reports."""
    return [line["step"] for line in reports_of(code, folder) if line["kind"] == "step"]


def reports_of(code: str, folder: Path, extra: dict[str, str] | None = None) -> list[dict]:
    """What a worker that runs this code reports: descriptor 3 is its pipe."""
    read, low = os.pipe()
    write = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 20)  # out of the way of the worker's number
    os.close(low)
    stat = os.fstat(write)
    env = {"ORCH_REPORT_FD": "3", "ORCH_REPORT_PIPE": f"{stat.st_dev}:{stat.st_ino}"}
    shell = f'exec 3>&{write} {write}>&-; exec "$@"'
    root = str(Path(orch_report.__file__).parent)
    with os.fdopen(read, "rb") as pipe:
        done = subprocess.run(
            ["bash", "-c", shell, "bash", sys.executable, "-c", code],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": root, **env, **(extra or {})},
            pass_fds=[write],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        os.close(write)
        assert (done.returncode, done.stderr) == (0, "")
        return [json.loads(line) for line in pipe.read().splitlines()]


@pytest.mark.process
def test_a_child_of_a_worker_does_not_write_into_its_own_files(home, capsys):
    """The pipe is the worker's: `subprocess` closes it, so the child's third descriptor is a file
    of the child's."""
    (Path.cwd() / "child.py").write_text(
        "import orch_report\n"
        "with open('mine', 'w') as file:\n"
        "    orch_report.report(step=5)\n"
        "    print(file.fileno(), file=file)\n"
    )
    program(
        "import orch_report, subprocess, sys\n"
        "orch_report.report(step=1)\n"
        "subprocess.run([sys.executable, 'child.py'], check=True)\n"
        "orch_report.report(step=2)\n"
    )
    code, out, err = orch(capsys, "submit", "nproc=1", "--json", "--", "python", "my_train.py")
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done", folder.rank_log(0).read_text()
    assert (Path.cwd() / "mine").read_text() == "3\n"
    steps = [json.loads(line)["step"] for line in folder.metrics("node-0").read_text().splitlines()]
    assert steps == [1, 2]


@pytest.mark.process
@pytest.mark.slow
def test_a_slow_node_a_long_save_and_a_hung_rank_of_a_program(home, capsys, tmp_path):
    """All in one run, as each rank imports torch: the slow node is named and not the one that waits
    for it, a save longer than the limit for hangs is none, and the rank that stands still is at
    fault."""
    script = str(PROGRAMS / "watched.py")
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--detach", "--json"]
    limits = ["backend.hang_after_s=6", "backend.hang_after_steps=1"]
    argv = [*words, *SIMULATED_NODES, *limits, script, str(tmp_path), "0.05"]
    code, out, err = orch(capsys, "run", *argv)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))

    wait_for(lambda: read_state(folder).slow, what="a slow node")
    assert list(read_state(folder).slow) == ["node-1"]
    (tmp_path / "save").touch()
    wait_for((tmp_path / "saved").exists, what="the end of the save")
    assert read_state(folder).restarts == 0
    (tmp_path / "hang").touch()
    cause = wait_for(lambda: read_state(folder).epochs[0].cause, what="a hang")
    assert (cause.kind, cause.rank) == ("worker_stuck", 1), cause.text
    assert "did not enter all-reduce of gradients" in cause.text
    wait_end(folder)


@pytest.mark.process
@pytest.mark.slow
def test_fsdp_and_tensor_parallelism_over_the_plan_s_mesh(home, capsys):
    """tp 2 x dp 2 by our mesh gives the losses of dp 2 under torchrun: the same sums, another
    layout."""
    script = str(PROGRAMS / "fsdp_tp.py")
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        script,
        "4",
    ]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=PATIENCE_S)
    theirs = (
        done.stdout.splitlines()
    )  # how torchrun ends is its own: threads of torch may abort at a process' end
    assert sum(line.startswith("step") for line in theirs) == 4, done.stderr
    argv = ["nproc=4", "parallel=tp2", "--json", "--", sys.executable, script, "4"]
    code, out, err = orch(capsys, "submit", *argv)
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done", folder.rank_log(0).read_text()
    ours = [line for line in folder.rank_log(0).read_text().splitlines() if line.startswith("step")]
    losses = [
        [float(line.split()[-1]) for line in lines if line.startswith("step")]
        for lines in (ours, theirs)
    ]
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], abs=2e-5)
    assert status(capsys, folder)["live"]["loss"] == pytest.approx(losses[0][-1], abs=1e-5)
