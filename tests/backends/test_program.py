"""A user's program from the command line: a job of its own kind, without anything of a model that
it does not train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.backends.local import gpus
from orchestrator.run.folder import RunFolder
from tests.beds.bundles import wait_end

from .test_verbs import home, orch, program

__all__ = ["home"]  # the fixture


@pytest.mark.process
def test_a_program_needs_no_model_and_is_told_of_none(home, capsys):
    """Five ranks on two nodes, which are no multiple of anything. Nothing that is shown or kept of
    the run names a model, a batch, a memory or a rate; where progress is unknown, it says so."""
    program(
        "import os; print('rank', *(os.environ[name] for name in ('RANK', 'WORLD_SIZE',"
        " 'GROUP_WORLD_SIZE')))"
    )
    words = ("cluster=local_nodes", "nproc=5", "--json")
    code, out, err = orch(capsys, "submit", *words, "--", "python", "my_train.py")
    assert code == 0, err
    folder = RunFolder(Path(json.loads(out)["run_dir"]))
    assert wait_end(folder).state == "done"
    assert [folder.rank_log(rank).read_text().split("\n")[-2] for rank in range(5)] == [
        f"rank {rank} 5 2" for rank in range(5)
    ]
    pages = {}
    for verb in ("list", "status", "report"):
        for flag in ([], ["--json"]):
            code, pages[verb, bool(flag)], _ = orch(capsys, verb, *flag)
            assert code == 0
    assert folder.run_id.startswith("my-train-")
    assert "python my_train.py on local_nodes, 5 workers on 2 nodes" in pages["status", False]
    assert "progress    unknown" in pages["status", False]
    assert json.loads(pages["status", True])["goodput"]["ettr"] is None
    report = json.loads(pages["report", True])
    assert report["step_s"]["planned"] is None and report["mfu"] == {
        "planned": None,
        "measured": None,
    }
    assert not report["memory"]
    for model_term in ("tiny", "ETTR", "MFU", "stdlib"):
        for (verb, as_json), page_text in pages.items():
            assert as_json or model_term not in page_text, (verb, model_term)
            assert model_term != "tiny" or model_term not in page_text, verb
        for path in (folder.plan, folder.config, folder.request):
            assert model_term not in path.read_text(), (path, model_term)


#: For every process of a run: four GPUs in /dev.
FOUR_GPUS = """
import os
real = os.listdir
os.listdir = lambda path=".": real(path) + ([f"nvidia{index}" for index in range(4)] if path == "/dev" else [])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("visible_gpus", "seen"), [(None, ["0,1", "2,3"]), ("3,1,2,0", ["3,1", "2,0"]), ("", ["", ""])]
)
def test_each_simulated_node_has_gpus_of_its_own(home, capsys, monkeypatch, visible_gpus, seen):
    Path("sitecustomize.py").write_text(FOUR_GPUS)
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible_gpus is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_gpus)
    monkeypatch.setattr(gpus, "gpus_here", lambda: 4)
    program(
        "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'], sep=':')"
    )
    flags = ("cluster=local_nodes", "--nnodes", "2", "--nproc-per-node", "2")
    code, _, err = orch(capsys, "run", *flags, "my_train.py")
    assert code == 0, err
    assert "orch: 2 nodes of 2 workers are simulated on this machine" in err
    (run,) = (home / "runs").iterdir()
    seen_gpus = [RunFolder(run).rank_log(rank).read_text().split("\n")[-2] for rank in range(4)]
    assert seen_gpus == [f"{seen[rank // 2]}:{rank % 2}" for rank in range(4)]


def test_the_dry_run_of_a_program_names_nothing_of_a_model(home, capsys):
    program("")
    _, out, _ = orch(capsys, "submit", "parallel=tp2", "--dry-run", "--", "python", "my_train.py")
    assert "Plan of a program" in out and "tp=2  dp=4" in out
    for model_term in ("tiny", "MFU", "Memory", "tokens", "stdlib", "adamw"):
        assert model_term not in out, model_term
    _, judged, _ = orch(
        capsys, "submit", "model=tiny", "parallel=tp2", "--dry-run", "--", "python", "my_train.py"
    )
    assert (
        "MFU" in judged and "tiny" in judged
    )  # a program is judged by the model that is named for it


def test_the_run_is_named_by_what_it_runs(home, capsys):
    Path("pkg").mkdir()
    Path("pkg/my_loop.py").touch()
    program("", "a b.py")
    named = {
        ("python", "-u", "a b.py"): "a-b-",
        ("python", "-m", "pkg.my_loop"): "pkg-my-loop-",
        ("python", "-um", "pkg.my_loop", "-m", "x"): "pkg-my-loop-",
        ("python", "-mpkg.my_loop", "other.py"): "pkg-my-loop-",
        ("python", "a b.py", "-m", "of-the-script"): "a-b-",
        ("python", "-W", "ignore", "-Xdev", "-X", "utf8", "a b.py", "-c", "9"): "a-b-",
        ("python", "-u", "-c", "print()"): "python-",
        ("python", "-"): "python-",
        ("python", "a b.py"): "a-b-",
        ("/bin/echo", "hello"): "echo-",
    }
    for command, name in named.items():
        _, out, _ = orch(capsys, "submit", "nproc=1", "--dry-run", "--json", "--", *command)
        assert json.loads(out)["run_id"].startswith(name), command
    _, out, _ = orch(
        capsys, "submit", "nproc=1", "run.name=mine", "--dry-run", "--json", "--", "/bin/echo"
    )
    assert json.loads(out)["run_id"].startswith("mine-")


#: Variables of torchrun whose values another launcher gives otherwise, and why.
OTHERWISE = {
    "MASTER_ADDR": "the address of rank 0's node",
    "MASTER_PORT": "a free port there",
    "TORCHELASTIC_RUN_ID": "the run's id",
    "TORCHELASTIC_ERROR_FILE": "in the run's folder",
    "TORCHELASTIC_MAX_RESTARTS": "orch restarts unless told not to",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 opens the store",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "which signals the launcher passes on",
}


@pytest.mark.process
@pytest.mark.slow
def test_the_environment_is_torchrun_s_variable_by_variable(home, capsys, monkeypatch):
    """Two workers on one node under both launchers; all of torchrun's variables are there, those
    that are not the launcher's own to choose with the same values. What the user has set stays."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    dump = program(
        "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1] + os.environ['RANK'],"
        " 'w'))"
    )

    def told(who: str) -> dict[str, dict[str, str]]:
        return {rank: json.loads(Path(who + rank).read_text()) for rank in ("0", "1")}

    def submitted(who: str) -> dict[str, dict[str, str]]:
        code, out, err = orch(capsys, "submit", "nproc=2", "--json", "--", "python", dump, who)
        assert code == 0, err
        assert wait_end(RunFolder(Path(json.loads(out)["run_dir"]))).state == "done"
        return told(who)

    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        dump,
        "theirs",
    ]
    subprocess.run(torchrun, capture_output=True, timeout=300, check=True)
    theirs = told("theirs")
    ours = submitted("ours")
    launchers = {
        name for name in theirs["0"] if name not in {*os.environ, "COLUMNS", "LINES", "LC_CTYPE"}
    }
    assert launchers >= {"RANK", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS", *OTHERWISE}
    for rank in ("0", "1"):
        for name in launchers:
            assert name in ours[rank], name
            assert name in OTHERWISE or ours[rank][name] == theirs[rank][name], name
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    environ = submitted("kept")["1"]
    assert (environ["OMP_NUM_THREADS"], environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("3", "0")


@pytest.mark.process
@pytest.mark.slow
def test_orch_run_is_a_drop_in_for_torchrun(home, capsys):
    """The same script under both: exit codes, what it prints, and files that it writes into the
    folder."""
    script = program("""
        import os, pathlib, sys, time
        rank, (who, code) = os.environ["RANK"], sys.argv[1:]
        os.write(1, f"hello from {rank}\\n".encode())  # one write: torchrun's ranks share a pipe, print may write twice
        pathlib.Path(f"out-{who}-{code}-{rank}.txt").write_text(os.environ["WORLD_SIZE"])
        first = pathlib.Path(f"out-{who}-{code}-0.txt")  # it is ended once rank 1 fails
        while not (first.exists() and first.read_text()):
            time.sleep(0.01)
        sys.exit(int(code) if rank == "1" else 0)
        """)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    orch_run = [sys.executable, "-m", "orchestrator", "run", "--nproc-per-node", "2"]
    for code in (0, 7):
        theirs = subprocess.run(
            [*torchrun, script, "t", str(code)], capture_output=True, text=True, timeout=300
        )
        ours = subprocess.run(
            [*orch_run, script, "o", str(code)], capture_output=True, text=True, timeout=300
        )
        assert bool(theirs.returncode) == bool(ours.returncode) == bool(code)
        printed_lines = {
            line.partition("] ")[2]
            for line in ours.stdout.splitlines()
            if line.startswith("[rank ")
        }
        assert (
            printed_lines
            >= {line for line in theirs.stdout.splitlines() if line.startswith("hello")}
            != set()
        )
        for rank in range(2):
            ours_wrote, theirs_wrote = (
                Path(f"out-{who}-{code}-{rank}.txt").read_text() for who in "ot"
            )
            assert ours_wrote == theirs_wrote == "2"
    assert "rank 1" in ours.stdout and "First cause" in ours.stdout


@pytest.mark.process
def test_following_a_program_shows_what_its_ranks_print_and_its_faults(home, capsys):
    """Rank 1 dies in the first epoch: its lines, the first cause, and the lines of the second epoch
    are one view."""
    script = program("""
        import os, sys, time
        epoch = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("epoch", epoch, flush=True)
        if epoch == "0":
            time.sleep(0.2)
            sys.exit(5 if os.environ["RANK"] == "1" else time.sleep(60))
        """)
    code, out, _ = orch(capsys, "submit", "nproc=2", "--follow", "--", "python", script)
    assert code == 0
    for rank in (0, 1):
        lines = [line for line in out.splitlines() if line.startswith(f"[rank {rank}] epoch")]
        assert lines == [f"[rank {rank}] epoch 0", f"[rank {rank}] epoch 1"]
    assert "orch: " in out and "restarting as epoch 1" in out
    assert out.splitlines()[-1].startswith("done")
