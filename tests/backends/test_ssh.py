"""Jobs on another host through a real sshd: what goes there, what comes back, and what is said when
it does not."""

from __future__ import annotations

import gc
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.base import write_record
from orchestrator.backends.ssh import ship, wire
from orchestrator.backends.ssh.backend import SshBackend, SshRecord
from orchestrator.backends.ssh.mirror import parts_of, write_parts
from orchestrator.backends.ssh.session import ConnectionLost, Session
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.remote.__main__ import Host, serve
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import Code, to_bytes
from tests.beds import program_variables, sshd
from tests.beds.bundles import make_bundle, wait_end, wait_for
from tests.beds.plans import make_plan
from tests.beds.program_variables import IN_FULL
from tests.patience import PATIENCE_S

from .test_program_variables import ALLOW, written_pins
from .test_signals import interruptible
from .test_verbs import home, orch

__all__ = ["home", "interruptible"]  # the fixtures

PROGRAM = """
import os, pathlib, sys, time
import helper
print("hello from", os.environ["RANK"], helper.NAME, pathlib.Path("notes/a b.txt").read_text(), flush=True)
pathlib.Path(f"out-{os.environ['RANK']}.txt").write_text(os.environ.get("SITE", "nowhere"))
for step in range(1, 6):
    print(f"step {step}", flush=True)
while "hold" in sys.argv and not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.05)
"""


@pytest.fixture
def site(home, tmp_path, monkeypatch) -> Iterator[sshd.LoginNode]:
    """A host with a home of its own. This machine's current folder has a program, with what git
    ignores beside it."""
    if reason := sshd.install():
        pytest.skip(f"no sshd: {reason}")
    go = tmp_path / "go"
    environ = {
        "ORCH_HOME": str(tmp_path / "site"),
        "SITE": "there",
        "GO": str(go),
        "OMP_NUM_THREADS": "1",
    }
    Path("train.py").write_text(PROGRAM)
    Path("helper.py").write_text("NAME = 'a helper'")
    Path("notes").mkdir()
    Path("notes/a b.txt").write_text("and notes")
    Path("weights.bin").write_bytes(b"x" * 5000)
    Path(".gitignore").write_text("weights.bin\n")
    for argv in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *argv], check=True)
    with sshd.LoginNode(tmp_path / "sshd", environ) as node:
        monkeypatch.setenv("PATH", f"{node.path}:{os.environ['PATH']}")
        monkeypatch.delenv("SITE", raising=False)
        yield node


def submit(capsys, site: sshd.LoginNode, *arguments: str) -> tuple[str, str]:
    """The run's id, and what was said."""
    code, out, err = orch(capsys, "submit", "nproc=2", *site.options(), "--json", *arguments)
    assert code == 0, err
    return json.loads(out)["run_id"], err


@pytest.mark.process
@pytest.mark.slow
def test_a_program_goes_there_and_its_lines_state_and_report_come_back(
    site, home, capsys, tmp_path
):
    submit_options = [
        "--env",
        "SITE",
        "--env",
        "GO",
        r"metrics.pattern=step (?P<step>\d+)",
        "--",
        "python",
        "train.py",
        "hold",
    ]
    run, stderr = submit(capsys, site, *submit_options)
    assert "orch: sends 4 files" in stderr and "to login" in stderr  # .gitignore is one of them
    assert "leaves out weights.bin (4.88 KiB)" in stderr
    local_folder = home / "runs" / run
    there = tmp_path / "site" / "runs" / run
    assert (
        there.is_dir()
        and not (local_folder / "code").exists()
        and not list((tmp_path / "site" / "shipped").iterdir())
    )

    def status() -> dict:
        return json.loads(orch(capsys, "status", run, "--json")[1])

    wait_for(lambda: (status()["live"]["step"] or 0) == 5, what="step 5, as printed there")
    assert status()["state"]["state"] == "running"
    rows = json.loads(orch(capsys, "list", "--json")[1])
    assert [(row["state"]["run_id"], row["state"]["backend"]) for row in rows] == [(run, "ssh")]
    assert orch(capsys, "cancel", run)[0] == 0
    ended = status()["state"]
    assert ended["state"] == "cancelled"
    (tmp_path / "go").write_text("")
    code, out, err = orch(capsys, "resume", run, "--follow")
    assert code == 0, err
    assert "[rank 1] step 5" in out and out.splitlines()[-1].startswith("done")
    _, out, _ = orch(capsys, "logs", run)
    assert {line for line in out.splitlines() if "hello" in line} == {
        f"[rank {rank}] hello from {rank} a helper and notes" for rank in range(2)
    }
    assert orch(capsys, "logs", run, "--rank", "0", "--tail", "1")[1] == "step 5\n"
    assert (
        there / "code" / "out-1.txt"
    ).read_text() == "there"  # of the shell there, not of this one
    assert json.loads(orch(capsys, "report", run, "--json")[1])["steps"]["completed"] == 5
    assert orch(capsys, "rm", run)[0] == 0 and not there.exists() and not local_folder.exists()


@pytest.fixture
def short_home(site, monkeypatch) -> Iterator[Path]:
    """A home whose sockets have names that are short enough, as those of users have; those of tests
    have not, and their commands share no connection."""
    with tempfile.TemporaryDirectory(prefix="orch") as folder:
        monkeypatch.setenv("ORCH_HOME", folder)
        yield Path(folder)
        for name in ("ssh", "own"):
            leave_master(site, Path(folder) / name)


def ask_master(site: sshd.LoginNode, folder: Path, request: str) -> str:
    """What ssh says to a request of the master with its socket in this folder."""
    argv = [site.path / "ssh", "-o", f"ControlPath={folder}/%C", "-O", request, sshd.NAME]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60).stderr


def leave_master(site: sshd.LoginNode, folder: Path) -> None:
    """Ends the master, if there is one."""
    ask_master(site, folder, "exit")
    wait_for(lambda: "pid=" not in ask_master(site, folder, "check"), what="its end")


@pytest.mark.process
@pytest.mark.slow
def test_the_commands_of_a_laptop_share_one_connection(site, short_home, capsys):
    """Also while the master has died or hangs, no command does; and whoever has told ssh how to
    share connections is obeyed."""

    def logins() -> int:
        return (site.folder / "sshd.log").read_text().count("Accepted publickey")

    def master() -> int:
        return int(re.search(r"pid=(\d+)", ask_master(site, short_home / "ssh", "check"))[1])

    def status() -> str:
        code, out, err = orch(capsys, "status", "mine", "--json")
        assert code == 0, err
        state = json.loads(out)["state"]
        assert "as of" not in (state["reason"] or "")
        return state["state"]

    argv = [sys.executable, "-m", "orchestrator", "submit", "nproc=1", "--run-id", "mine"]
    argv += [*site.options(), "--env", "GO", "--", "python", "train.py", "hold"]
    # A reader of its errors sees their end, although the master goes on.
    submitted = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert submitted.returncode == 0, submitted.stderr
    socket = next(path for path in (short_home / "ssh").iterdir() if path.is_socket())
    assert (short_home / "ssh").stat().st_mode & 0o077 == 0 == socket.stat().st_mode & 0o077
    wait_for(lambda: status() == "running", what="running")
    wait_for(lambda: "hello" in orch(capsys, "logs", "mine")[1], what="its first line")
    assert orch(capsys, "cancel", "mine")[0] == 0
    assert status() == "cancelled" and logins() == 1
    os.kill(master(), signal.SIGKILL)
    assert status() == "cancelled" and logins() == 2
    stopped = master()
    os.kill(stopped, signal.SIGSTOP)
    assert status() == "cancelled" and logins() == 3
    os.kill(stopped, signal.SIGCONT)
    assert status() == "cancelled" and logins() == 3
    leave_master(site, short_home / "ssh")
    (short_home / "own").mkdir(mode=0o700)
    with (site.folder / "ssh_config").open("a") as config:
        config.write(f"ControlMaster auto\nControlPersist 60\nControlPath {short_home}/own/%C\n")
    assert status() == status() == "cancelled" and logins() == 4
    assert not any(path.is_socket() for path in (short_home / "ssh").iterdir())


@pytest.mark.process
@pytest.mark.slow
def test_plans_groups_and_refusals_are_those_of_the_host(site, home, capsys, tmp_path):
    Path("conf/backend").mkdir(parents=True)
    Path("conf/.orch").touch()
    options = {"ssh": "login", "ssh_python": sys.executable}
    lines = "".join(f"  {name}: {value}\n" for name, value in options.items())
    Path("conf/backend/there.yaml").write_text(f"name: local\nmax_restarts: 3\noptions:\n{lines}")
    code, out, err = orch(
        capsys,
        "submit",
        "backend=there",
        "nproc=3",
        "--dry-run",
        "--json",
        "--",
        "python",
        "train.py",
    )
    assert code == 0, err
    request = json.loads(out)
    assert (
        request["run_dir"].startswith(str(tmp_path / "site"))
        and request["policy"]["max_restarts"] == 3
    )
    assert request["backend_options"] == {} and not (tmp_path / "site" / "runs").exists()
    code, out, _ = orch(
        capsys, "submit", "backend=there", "nproc=3", "--dry-run", "--", "python", "train.py"
    )
    assert code == 0 and "Plan of a program" in out and "Nothing was started" in out
    code, _, err = orch(
        capsys, "submit", "backend=there", "parallel=tp3", "cluster.nodes=1", "--", "python", "x.py"
    )
    assert code == Exit.CONFIG and err.startswith("orch: ")
    code, _, err = orch(capsys, "submit", *site.options(), "nproc=1", "--", "python", "nothing.py")
    assert code == Exit.USAGE and "login: script 'nothing.py' is not in" in err
    assert not list((home / "runs").glob("*"))
    for arguments, says in (
        (["submit", "--in-place", "nproc=1"], "the host does not see this folder"),
        (["submit", "--multirun", "nproc=1,2"], "one job at a time"),
        (["render", "nproc=1"], "one job at a time"),
    ):
        code, _, err = orch(capsys, *arguments, *site.options(), "--", "python", "train.py")
        assert code == Exit.USAGE and says in err, (arguments, err)


@pytest.mark.process
@pytest.mark.slow
def test_variables_of_this_machine_go_there_by_the_rule_in_memory_only(
    site, home, capsys, monkeypatch, tmp_path
):
    """A resume takes the values of the shell that asks for it."""
    for name, value in (program_variables.SHELL | {"SITE": "here", "GO": "of-this-shell"}).items():
        monkeypatch.setenv(name, value)
    program = program_variables.PROBE + "import sys\n"
    # Rank 0, whose lines are read, is the one that fails: it would be stopped with another.
    program += "sys.exit(os.environ['RANK'] == '0' and os.environ['NCCL_DEBUG'] != 'INFO')"
    words = (*IN_FULL, "--env", "GO", "backend.max_restarts=0", "--", "python", "-c", program)
    run, err = submit(capsys, site, *words)
    _, _, message = " ".join(err.split()).partition("variables not passed on: ")
    assert "HF_TOKEN" in message.partition("(look like secrets)")[0] and "HF_HOME" in message
    there = RunFolder(tmp_path / "site" / "runs" / run)
    assert wait_end(there).state == "failed"

    def variables() -> list[dict[str, str]]:
        lines = there.rank_log(0).read_text().splitlines()
        return [program_variables.printed(line) for line in lines if program_variables.MARK in line]

    (first,) = variables()
    passed = ("NCCL_DEBUG", "WANDB_MODE", "MY_DATA", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert {name: first[name] for name in passed} == {
        name: program_variables.SHELL[name] for name in passed
    }
    assert first["MY_TOKEN"] == program_variables.digest("MY_TOKEN")
    assert (first["GO"], first["SITE"]) == ("of-this-shell", "there")
    assert not {"HF_TOKEN", "HF_HOME", "MY_OTHER"} & {*first}
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    with monkeypatch.context() as shell:
        shell.delenv("MY_TOKEN")
        code, _, err = orch(capsys, "resume", run)
        assert code == 65 and "--env MY_TOKEN, not set in this shell" in err
    assert orch(capsys, "resume", run, "--follow")[0] == 0
    second = variables()[-1]
    assert {name: second[name] for name in passed} == {
        **{name: first[name] for name in passed},
        "NCCL_DEBUG": "INFO",
    }
    assert second["MY_TOKEN"] == first["MY_TOKEN"] and second["GO"] == first["GO"]
    assert not {"HF_TOKEN", "HF_HOME", "MY_OTHER"} & {*second}
    assert not program_variables.holders(tmp_path)


@pytest.mark.process
def test_a_host_that_does_not_answer_or_has_no_orch_is_one_line(site, home, capsys):
    argv = ["submit", "nproc=1", "backend.options.ssh=login"]
    code, _, err = orch(
        capsys, *argv, "backend.options.ssh_python=/usr/bin/python3", "--", "python", "train.py"
    )
    assert (
        code == Exit.CAPACITY
        and "login has no orch under /usr/bin/python3 (exit code 1): install the same version"
        in err
    )
    site.stop()
    code, _, err = orch(capsys, *argv, "--", "python", "train.py")
    assert code == Exit.CAPACITY and "ssh login cannot reach the host (exit code 255)" in err


@pytest.mark.process
def test_a_host_that_goes_away_costs_news_and_not_the_run(site, home, capsys, tmp_path):
    run, _ = submit(capsys, site, "--env", "GO", "--", "python", "train.py", "hold")

    def state() -> str:
        return json.loads(orch(capsys, "status", run, "--json")[1])["state"]["state"]

    wait_for(lambda: state() == "running", what="running")
    site.stop()
    code, out, _ = orch(capsys, "status", run)
    assert code == 0 and "running" in out and "as of" in out and "cannot reach the host" in out
    assert orch(capsys, "cancel", run)[0] == Exit.CAPACITY
    site.start()
    (tmp_path / "go").write_text("")
    there = RunFolder(tmp_path / "site" / "runs" / run)
    wait_for(lambda: json.loads(there.state.read_text())["state"] == "done", what="its end")
    assert state() == "done"


@pytest.mark.process
def test_a_resume_that_the_host_refuses_changes_nothing_there(site, home, capsys, tmp_path):
    run, _ = submit(
        capsys, site, "backend.max_restarts=0", "--", "python", "-c", "raise SystemExit(3)"
    )
    there = RunFolder(tmp_path / "site" / "runs" / run)
    wait_end(there)
    pins = written_pins(there)
    request = json.loads(there.request.read_text())
    there.request.write_text(json.dumps(request | {"backend_options": {"nonsense": 1}}))
    state = there.state.read_text()
    code, _, err = orch(capsys, "resume", run, *ALLOW)
    assert code == Exit.CONFIG and "login: backend.options.nonsense is not an option" in err
    assert list(there.path.glob("pins/*")) == pins and there.state.read_text() == state
    there.request.write_text(json.dumps(request))
    assert orch(capsys, "resume", run, *ALLOW)[0] == 0
    assert wait_end(there).epoch == 1 and not list(there.path.glob("pins/*"))


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "a b", "", "a;b", "$(x)"])
def test_hosts_and_interpreters_that_are_none_are_refused(host):
    with pytest.raises(OrchError) as refused:
        Session(host, "python3")
    assert refused.value.exit == Exit.CONFIG
    with pytest.raises(OrchError):
        Session("login", f"python3{host or ' '}'")


@pytest.fixture
def ended(tmp_path, monkeypatch) -> Path:
    """A file that an ssh on PATH makes, a moment after its input was closed. Whatever it is asked,
    it answers that it is done, twice at most."""
    answers = tmp_path / "answers"
    with answers.open("wb") as stream:
        stream.write(wire.GREETING + f"{wire.VERSION} 0\n".encode())
        for _ in range(2):
            wire.write(stream, wire.encode(wire.Done()))
    ended = tmp_path / "ended"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\ncat {answers}\ncat > /dev/null\nsleep 0.2\ntouch {ended}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    return ended


def test_ssh_ends_with_the_last_reference_to_its_session(ended):
    session = Session("login", "python3")
    session.ask(wire.Cancel(run="mine", force=False))
    process = session._process
    del session
    gc.collect()
    assert process.returncode == 0 and ended.exists()


def test_ssh_ends_when_its_session_is_closed_once_or_again(ended):
    session = Session("login", "python3")
    session.close()
    session.ask(wire.Cancel(run="mine", force=False))
    process = session._process
    session.close()
    assert process.returncode == 0 and ended.exists()
    session.close()
    session.ask(wire.Cancel(run="mine", force=False))  # over another ssh
    assert session._process not in (None, process)
    session.close()


def test_ssh_ends_before_the_process_that_holds_its_session(ended):
    source = """
from orchestrator.backends.ssh import wire
from orchestrator.backends.ssh.session import Session

session = Session("login", "python3")
session.ask(wire.Cancel(run="mine", force=False))
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=PATIENCE_S)
    assert ended.exists()


def test_a_question_that_is_not_utf_8_is_refused_and_the_connection_stays(ended):
    session = Session("login", "python3")
    session.ask(wire.Cancel(run="mine", force=False))
    process = session._process
    with pytest.raises(OrchError, match="ssh login: an argument or a path is not UTF-8") as refused:
        session.ask(wire.Cancel(run="caf\udce9", force=False))
    assert refused.value.exit == Exit.USAGE
    session.ask(wire.Cancel(run="mine", force=False))
    assert session._process is process
    session.close()


def test_an_answer_that_is_not_utf_8_does_not_end_the_connection(monkeypatch):
    """The name of a file on the host may be any bytes."""

    def refuse(*_: object) -> None:
        raise OrchError("caf\udce9 is not there", Exit.CONFIG)

    monkeypatch.setattr(Host, "answer", refuse)
    questions = io.BytesIO()
    for _ in range(2):
        wire.write(questions, wire.encode(wire.Look(run="x")), b"")
    questions.seek(0)
    answers = io.BytesIO()
    serve(questions, answers)
    answers.seek(0)
    answers.readline()
    answers.readline()
    for _ in range(2):
        assert wire.read_answer(answers) == (wire.Refused("caf? is not there", exit=65), b"")


def test_a_job_with_text_that_is_not_utf_8_is_refused_before_anything_is_sent(
    home, capsys, monkeypatch
):
    submit_words = ("submit", "nproc=1", "backend.options.ssh=login", "--", "python", "train.py")
    code, _, err = orch(capsys, *submit_words, "caf\udce9")
    assert code == Exit.USAGE and "argument 2 of the program is not UTF-8" in err
    monkeypatch.setenv("HF_X", "caf\udce9")
    code, _, err = orch(capsys, *submit_words)
    assert code == Exit.USAGE and "unset HF_X" in err and "caf" not in err


@pytest.fixture
def restarted(tmp_path, monkeypatch):
    """Resumes and resizes a run in a shell; returns the variables that each sends to the host. The
    run was given LR and MY_DATA by name, and the others by a pattern."""
    names = ["HF_HOME", "LR", "MY_DATA", "NCCL_DEBUG"]
    folder = RunFolder(tmp_path / "runs" / "test-run")
    request = make_bundle(
        make_plan(),
        folder.path.parent,
        backend={"pass_env": ["LR", "MY_DATA"]},
        names=names,
    ).request
    folder.create()
    folder.request.write_bytes(to_bytes(request))
    record = SshRecord(host="login", python="python3", run_dir="/there", variables=names)
    write_record(folder, record, durable=False)
    sent = []

    def ask(session, question, payload=b""):
        sent.append(question.variables)
        raise ConnectionLost("no answer", Exit.CAPACITY)

    def restart(shell: dict[str, str]) -> list[dict[str, str]]:
        sent.clear()
        with pytest.raises(ConnectionLost):
            SshBackend().resume(folder, request, shell)
        with pytest.raises(ConnectionLost):
            SshBackend().resize(folder, request, 2, shell)
        return sent

    monkeypatch.setattr(Session, "ask", ask)
    return restart


def test_the_next_start_gets_no_path_of_this_machine_that_a_pattern_passes(restarted):
    shell = {"HF_HOME": "hub", "LR": "1", "MY_DATA": "/data", "NCCL_DEBUG": "INFO", "OTHER": "x"}
    passed = {name: value for name, value in shell.items() if name != "OTHER"}
    assert restarted(shell) == [passed, passed]
    shell["HF_HOME"] = "/home/of-the-user/hf"
    del passed["HF_HOME"]
    assert restarted(shell) == [passed, passed]


def test_the_next_start_is_refused_with_a_value_that_is_not_utf_8(restarted):
    with pytest.raises(OrchError, match="unset LR") as refused:
        restarted({"LR": "caf\udce9"})
    assert refused.value.exit == Exit.USAGE


@pytest.mark.parametrize("name", ["../x", "/etc/x", "code/../../x"])
def test_a_tar_cannot_leave_its_folder(tmp_path, name):
    import io
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(OrchError) as refused:
        ship.unpack(out.getvalue(), tmp_path / "in")
    assert refused.value.exit == Exit.SECURITY and not (tmp_path / "x").exists()


def test_a_tar_cannot_write_through_a_link_of_its_own(tmp_path):
    import io
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        link = tarfile.TarInfo("code/out")
        link.type = tarfile.SYMTYPE
        link.linkname = str(tmp_path)
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("code/out/x"), io.BytesIO())
    (tmp_path / "in").mkdir()
    with pytest.raises(OrchError):
        ship.unpack(out.getvalue(), tmp_path / "in")
    assert not (tmp_path / "x").exists()


def test_a_copy_has_modes_links_and_nothing_else(tmp_path):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "run.sh").write_text("echo")
    (root / "sub" / "run.sh").chmod(0o755)
    (root / "link").symlink_to("sub")
    payload, files, size = ship.pack(Code(kind="folder", root=str(root)), None)
    ship.unpack(payload, tmp_path / "in")
    code = tmp_path / "in" / "code"
    assert (files, size) == (1, 4) or (files, size) == (2, 4 + (root / "link").lstat().st_size)
    assert os.access(code / "sub" / "run.sh", os.X_OK)


def test_what_grows_is_sent_once_and_only_into_its_place(tmp_path):
    there = RunFolder(tmp_path / "there")
    local_folder = RunFolder(tmp_path / "here")
    for folder in (there, local_folder):
        folder.create()
    log = there.rank_log(0)
    events = there.events("node-0")
    log.write_text("one\n")
    events.write_text("a\n")
    (there.path / "secret.key").write_text("no")
    (there.path / "checkpoints" / "x.jsonl").write_text("no")

    def look(logs: bool) -> list[tuple[str, int, int]]:
        from orchestrator.backends.ssh.mirror import known

        file_parts, payload, has_more = parts_of(there, known(local_folder), logs)
        write_parts(local_folder, file_parts, payload)
        assert not has_more
        return [(file_part.path, file_part.offset, file_part.size) for file_part in file_parts]

    assert look(False) == [("events/node-0.jsonl", 0, 2)]
    assert look(True) == [("logs/rank-00000.log", 0, 4)]
    with log.open("a") as file:
        file.write("two\n")
    assert (
        look(True) == [("logs/rank-00000.log", 4, 4)]
        and local_folder.rank_log(0).read_text() == "one\ntwo\n"
    )
    log.write_text("x")  # it was made anew
    assert (
        look(True) == [("logs/rank-00000.log", 0, 1)]
        and local_folder.rank_log(0).read_text() == "x"
    )
    for path in ("secret.key", "../x", "logs/../../x", "logs/a/b.log", "/etc/x.json"):
        with pytest.raises(OrchError):
            write_parts(local_folder, [wire.Part(path=path, offset=0, size=1)], b"x")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("news", [True, False], ids=["", "and no news of it"])
def test_ctrl_c_while_it_is_sent_there_leaves_a_run_that_is_told(
    site, home, capsys, monkeypatch, interruptible, tmp_path, news
):
    """The terminal sends it to ssh, too, which does not end in the middle of the answer."""
    real = Session.ask

    def ask(session, question, payload=b""):
        if isinstance(question, wire.Send):
            if os.getpgid(session._process.pid) == os.getpgrp():
                session._process.send_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        elif not isinstance(question, wire.Prepare) and not news:
            raise OrchError("no answer", Exit.CAPACITY)
        return real(session, question, payload)

    monkeypatch.setattr(Session, "ask", ask)
    code, out, _ = orch(
        capsys,
        "submit",
        "nproc=1",
        *site.options(),
        "--run-id",
        "mine",
        "--",
        "python",
        "-c",
        "pass",
    )
    assert (code, out) == (130, "ssh://mine\n")
    monkeypatch.setattr(Session, "ask", real)
    assert wait_for(
        lambda: json.loads(orch(capsys, "status", "mine", "--json")[1])["state"]["state"] == "done"
    )


@pytest.mark.process
@pytest.mark.parametrize("heard", [True, False], ids=["heard", "not heard"])
def test_a_connection_that_is_lost_while_a_job_is_sent_leaves_a_run_that_can_be_asked_for(
    site, home, capsys, monkeypatch, tmp_path, heard
):
    real = Session.ask
    there = RunFolder(tmp_path / "site" / "runs" / "mine")

    def ask(session, question, payload=b""):
        if isinstance(question, wire.Send):
            if heard:
                wire.write(session._process.stdin, wire.encode(question))
                wait_for(there.backend.exists, what="its start there")
            session._process.kill()
            session._process.wait()
        return real(session, question, payload)

    monkeypatch.setattr(Session, "ask", ask)
    argv = ("submit", "nproc=1", *site.options(), "--run-id", "mine", "--", "python", "-c", "pass")
    code, out, err = orch(capsys, *argv)
    assert (code, out) == (Exit.CAPACITY, "")
    (error_line,) = [line for line in err.splitlines() if line.startswith("orch: error: ")]
    assert "the connection was lost" in error_line
    assert error_line.endswith("run mine may have been started there: orch status mine")
    ends = "done" if heard else "failed"

    def state() -> dict:
        return json.loads(orch(capsys, "status", "mine", "--json")[1])["state"]

    wait_for(lambda: state()["state"] == ends, what=ends)
    assert heard or "login: there are no runs" in state()["reason"]
    assert (
        orch(capsys, "rm", "mine")[0] == 0
        and not (home / "runs" / "mine").exists()
        and not there.path.exists()
    )


def test_what_the_host_does_not_start_leaves_nothing_here(site, home, capsys, monkeypatch):
    real = Session.ask

    def ask(session, question, payload=b""):
        if isinstance(question, wire.Send):
            raise OrchError("its disk is full", Exit.CAPACITY)
        return real(session, question, payload)

    monkeypatch.setattr(Session, "ask", ask)
    code, _, err = orch(
        capsys,
        "submit",
        "nproc=1",
        *site.options(),
        "--run-id",
        "mine",
        "--",
        "python",
        "-c",
        "pass",
    )
    assert code == 76 and "its disk is full" in err and not (home / "runs" / "mine").exists()
