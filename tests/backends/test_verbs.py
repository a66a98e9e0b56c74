"""The verbs from the command line to real runs: a user's own program, dry run, list, status, logs,
cancel, resume."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from orchestrator.cli.main import main
from orchestrator.plan.worker import PINS, pin_file
from orchestrator.run.folder import RunFolder
from orchestrator.run.state import read_state
from tests.beds.bundles import kill_runs, wait_end, wait_for


def small(gpus: int) -> list[str]:
    cluster = ["cluster=local_nodes", f"cluster.gpus_per_node={gpus}"]
    return [*cluster, "parallel=tp1", "backend.max_restarts=0"]


SMALL = small(2)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home for runs and a folder with a program in it, which is also the current one."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    yield tmp_path / "home"
    kill_runs(tmp_path / "home" / "runs")


def program(source: str, name: str = "my_train.py") -> str:
    Path(name).write_text(textwrap.dedent(source))
    return name


def orch(capsys, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def submit(capsys, *arguments: str, home: Path, cluster: list[str] = SMALL) -> RunFolder:
    code, out, err = orch(capsys, "submit", *cluster, *arguments)
    assert code == 0, err
    handle = out.strip()
    assert re.fullmatch(r"local://[a-z0-9-]+", handle)
    return RunFolder(home / "runs" / handle.removeprefix("local://"))


@pytest.mark.process
@pytest.mark.slow
def test_a_torchrun_script_runs_unchanged(home, capsys):
    """The usual torchrun program: process group from the environment, an all-reduce, its own
    arguments. One rank a node, since each imports torch; the variables of several on one are
    asserted below."""
    program("""
        import argparse, json, os
        import torch, torch.distributed as dist

        parser = argparse.ArgumentParser()
        parser.add_argument("--word")
        args = parser.parse_args()
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        plan = json.load(open(os.environ["ORCH_PLAN"]))
        assert total.item() == world * (world - 1) / 2
        assert world == int(os.environ["WORLD_SIZE"]) == len(plan["ranks"])
        assert plan["ranks"][rank]["node"] == os.environ["ORCH_NODE"]
        assert plan["ranks"][rank]["gpu"] == int(os.environ["LOCAL_RANK"])
        assert int(os.environ["LOCAL_WORLD_SIZE"]) == 1
        print(f"rank {rank} of {world} got {args.word!r}")
        dist.destroy_process_group()
        """)
    argument = "two words; $(reboot) 'quoted' \"twice\" ü"
    folder = submit(
        capsys, "--", "python", "my_train.py", "--word", argument, home=home, cluster=small(1)
    )
    state = wait_end(folder)
    assert (state.state, state.exit_code) == ("done", 0), folder.rank_log(0).read_text()
    for rank in range(2):
        assert f"rank {rank} of 2 got {argument!r}" in folder.rank_log(rank).read_text()
    assert state.summary["program"].startswith("python my_train.py")


@pytest.mark.process
def test_the_exit_code_of_the_users_program_becomes_1_and_its_words_are_shown(home, capsys):
    program("""
        import os, sys
        if os.environ["RANK"] == "2":
            print("something went wrong in my code")
            sys.exit(3)
        import time; time.sleep(60)
        """)
    code, out, _ = orch(capsys, "submit", *SMALL, "--follow", "--", "python", "my_train.py")
    assert code == 1
    assert "First cause" in out and "rank 2 on node-1: exit code 3" in out
    assert "something went wrong in my code" in out
    code, out, _ = orch(capsys, "status")
    assert code == 0 and "failed" in out and "something went wrong in my code" in out


@pytest.mark.process
def test_dry_run_prints_what_submit_sends_and_writes_nothing(home, capsys):
    program("print('hello')")
    arguments = [*SMALL, "--run-id", "golden-1", "--", "python", "my_train.py"]
    code, shown, _ = orch(capsys, "submit", "--dry-run", "--json", *arguments)
    assert code == 0 and not home.exists()
    code, out, _ = orch(capsys, "submit", *arguments)
    folder = RunFolder(home / "runs" / "golden-1")
    assert (code, out) == (0, "local://golden-1\n")
    assert folder.request.read_text() == shown
    assert wait_end(folder).state == "done"
    sent = json.loads(shown)
    assert sent["plan_hash"] == json.loads(folder.plan.read_text())["hash"]
    assert [file["path"] for file in sent["files"]] == ["config.yaml", "plan.json", "secret.key"]


def test_dry_run_for_a_cluster_that_is_not_here(home, capsys, monkeypatch):
    from orchestrator.backends.local import backend as local

    monkeypatch.setattr(local, "gpus_here", lambda: 0)
    overrides = ["+cluster=h100x64", "parallel=tp8_pp4_zero1", "backend=local"]
    code, out, _ = orch(capsys, "submit", *overrides, "--dry-run")
    assert code == 0 and not home.exists()
    assert "tp=8" in out and "Request" in out and "8, one per node, from node-0 to node-7" in out
    assert (
        "would refuse to submit it" in out
        and "h100x64 is 8 nodes of 8 GPUs; this machine has no GPU" in " ".join(out.split())
    )
    code, out, err = orch(capsys, "submit", *overrides)
    assert code == 76 and err.count("\n") == 1 and "this machine has no GPU" in err
    assert not (home / "runs").exists()


@pytest.mark.process
def test_the_copy_runs_not_what_is_changed_later(home, capsys):
    held = "import os, time, pathlib; go = pathlib.Path(os.environ['ORCH_RUN_DIR'], 'go')\n"
    held += "while not go.exists(): time.sleep(0.05)\n"
    program(held + "import other; print('got', other.WORD, pathlib.Path.cwd().name)")
    program("WORD = 'submitted'", "other.py")
    folder = submit(capsys, "--snapshot", "--", "python", "my_train.py", home=home)
    program("WORD = 'changed later'", "other.py")
    (folder.path / "go").touch()
    assert wait_end(folder).state == "done"
    assert folder.rank_log(3).read_text() == "got submitted code\n"
    folder = submit(capsys, "--", "python", "my_train.py", home=home)  # in place, as torchrun
    (folder.path / "go").touch()
    assert wait_end(folder).state == "done"
    assert folder.rank_log(3).read_text() == "got changed later project\n"


@pytest.mark.process
def test_the_variables_of_the_shell_and_those_of_torchrun_reach_the_workers(
    home, capsys, monkeypatch
):
    monkeypatch.setenv("MY_SECRET_TOKEN", "hush-1")
    monkeypatch.setenv("MY_OTHER", "hush-2")
    program("""
        import json, os
        rank, plan = int(os.environ["RANK"]), json.load(open(os.environ["ORCH_PLAN"]))
        assert int(os.environ["WORLD_SIZE"]) == len(plan["ranks"]) == 4
        assert plan["ranks"][rank]["node"] == os.environ["ORCH_NODE"]
        assert plan["ranks"][rank]["gpu"] == int(os.environ["LOCAL_RANK"]) == rank % 2
        assert int(os.environ["LOCAL_WORLD_SIZE"]) == 2 and int(os.environ["GROUP_RANK"]) == rank // 2
        print({k: v for k, v in sorted(os.environ.items()) if k.startswith("MY_")})
        """)
    folder = submit(capsys, "--env", "MY_SECRET_TOKEN", "--", "python", "my_train.py", home=home)
    assert wait_end(folder).state == "done"
    assert folder.rank_log(0).read_text() == "{'MY_OTHER': 'hush-2', 'MY_SECRET_TOKEN': 'hush-1'}\n"
    written = [
        path for path in folder.path.rglob("*") if path.is_file() and b"hush" in path.read_bytes()
    ]
    assert {path.parent.name for path in written} == {
        "logs"
    }  # what the program itself printed, and nothing else


@pytest.mark.process
def test_list_status_logs_cancel_resume(home, capsys):
    program("""
        import json, os, signal, sys, time
        rank, stop = int(os.environ["RANK"]), []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        for step in range(1, 100000):
            line = {"kind": "step", "rank": rank, "epoch": int(os.environ["ORCH_EPOCH"]), "step": step, "samples": step}
            line |= {"tokens": 100, "step_s": 0.05, "loss": 2.0, "mfu": 0.5, "memory_bytes": {"total": 12345}}
            os.write(int(os.environ["ORCH_REPORT_FD"]), json.dumps(line).encode() + b"\\n")
            print(f"step {step}", flush=True)
            if os.path.exists(os.environ["ORCH_RUN_DIR"] + "/finish"):
                sys.exit(0)
            if stop:
                sys.exit(75)
            time.sleep(0.05)
        """)
    folder = submit(
        capsys, "run.name=first", "train.steps=1000", "--", "python", "my_train.py", home=home
    )
    assert folder.run_id.startswith("first-")

    def told() -> dict:
        code, out, _ = orch(capsys, "status", "first", "--json")
        assert code == 0
        return json.loads(out)

    def runs() -> bool:
        run_status = told()
        steps = [node["step"] or 0 for node in run_status["live"]["nodes"].values()]
        return run_status["state"]["state"] == "running" and min(steps, default=0) >= 3

    # What a worker prints is in its log before an agent has written what it reports, and that is
    # there before the coordinator has read it: only status tells all of it.
    wait_for(runs, what="step 3 of both nodes of a run that runs")
    run_status = told()
    assert run_status["live"]["step"] >= 3
    assert run_status["live"]["nodes"]["node-1"]["memory_bytes"] == {"total": 12345}
    assert abs(run_status["live"]["tokens_per_s"] - 2000) < 1
    code, out, _ = orch(capsys, "status")
    assert "running" in out and "2,000 tokens/s" in out and "MFU 50.0%" in out and "/metrics" in out
    code, out, _ = orch(capsys, "list")
    assert code == 0 and folder.run_id in out and "running" in out
    code, out, _ = orch(capsys, "list", "--active", "--json")
    assert [row["state"]["run_id"] for row in json.loads(out)] == [folder.run_id]

    code, out, _ = orch(capsys, "logs", "first", "--rank", "2", "--tail", "1")
    assert code == 0 and re.fullmatch(r"step \d+\n", out)
    code, out, _ = orch(capsys, "logs", "--node", "node-1")
    assert {line.split("]")[0] for line in out.splitlines()} == {"[rank 2", "[rank 3"}
    code, out, _ = orch(capsys, "logs", "--agents")
    assert (
        code == 0 and "[agent node-0] " in out and "[agent node-1] " in out and "[rank" not in out
    )

    code, _, err = orch(capsys, "resume", "first")
    assert code == 64 and "is running: cancel it first" in err
    code, out, _ = orch(capsys, "cancel", folder.run_id)
    assert code == 0 and "cancelled by the user" in out
    assert read_state(folder).state == "cancelled" and not folder.is_alive()
    code, _, err = orch(capsys, "cancel", folder.run_id)
    assert code == 64 and "has ended: cancelled" in err

    (folder.path / "finish").touch()
    pins = [pin_file(folder.path, pin) for pin in PINS.values()]
    pins[0].parent.mkdir()
    for pin in pins:
        pin.touch()
    code, out, _ = orch(capsys, "resume", folder.run_id, "--follow", "--allow", "fresh-start")
    assert code == 0 and "done" in out and [pin.exists() for pin in pins] == [True, False]
    assert read_state(folder).epoch == 1
    code, _, err = orch(capsys, "resume", folder.run_id)
    assert code == 64 and "is done" in err


@pytest.mark.process
def test_logs_follow_until_the_end(home, capsys):
    program(
        "import os, time; print('first', flush=True); time.sleep(1); print('no line end', end='')"
    )
    folder = submit(capsys, "--", "python", "my_train.py", home=home)
    argv = [sys.executable, "-m", "orchestrator.cli.main", "logs", "-f", "--rank", "1"]
    followed = subprocess.run(
        argv, capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert followed.stdout == "first\nno line end\n", followed.stderr
    assert wait_end(folder).state == "done"


@pytest.mark.process
def test_the_submitting_shell_may_go_away(home, capsys):
    """Submitted from a process group that is then killed as a terminal's would be: with SIGHUP to
    everybody in it."""
    held = "import os, time; path = os.path.join(os.environ['ORCH_RUN_DIR'], 'go')\n"
    program(held + "while not os.path.exists(path): time.sleep(0.05)\nprint('still here')")
    submit_arguments = ["submit", *SMALL, "--run-id", "lonely", "--", "python", "my_train.py"]
    argv = [sys.executable, "-m", "orchestrator.cli.main", *submit_arguments]
    shell = subprocess.Popen(
        argv, start_new_session=True, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert shell.communicate(timeout=300)[0] == "local://lonely\n"
    with pytest.raises(ProcessLookupError):
        os.killpg(shell.pid, 1)  # nobody of the run is in that group any more
    folder = RunFolder(home / "runs" / "lonely")
    (folder.path / "go").touch()
    assert wait_end(folder).state == "done"
    assert folder.rank_log(0).read_text() == "still here\n"


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["status", "nothing"], 64, "there are no runs in"),
        (["logs"], 64, "there are no runs in"),
        (["cancel"], 64, "run"),
        (["resume", "x"], 64, "there are no runs in"),
        (["submit", *SMALL, "--run-id", "A_B"], 64, "run id 'A_B' is not usable"),
        (["submit", *SMALL, "--run-id", "../../x"], 64, "is not usable"),
        (["submit", *SMALL, "--env", "A=B"], 64, "--env 'A=B' is not the name"),
        (["submit", *SMALL, "--", "no-such-program"], 64, "'no-such-program' is not on PATH"),
        (["submit", *SMALL, "--", "python", "missing.py"], 64, "script 'missing.py' is not in"),
        (["submit", *SMALL, "--"], 64, "needs a program to run"),
        (["submit", *SMALL, "backend.env.HF_TOKEN=abc"], 78, "looks like a secret"),
        (["submit", *SMALL, "cluster.gpu.memory_gib=0.0001"], 65, "does not fit"),
        (["list", "extra"], 64, "does not take 'extra'"),
    ],
)
def test_refusals(home, capsys, arguments, code, complaint):
    exit_code, _, err = orch(capsys, *arguments)
    assert exit_code == code and complaint in err and err.count("\n") == 1
    assert not list(home.glob("runs/*"))


def test_an_empty_list_is_no_error(home, capsys):
    assert orch(capsys, "list")[:2] == (0, "no runs\n")
    assert json.loads(orch(capsys, "list", "--json")[1]) == []


def test_a_home_that_others_may_write_to_is_refused(home, capsys):
    home.mkdir()
    home.chmod(0o777)
    code, _, err = orch(capsys, "submit", *SMALL)
    assert code == 78 and "writable by others" in err
