"""Workers forked from a preloaded process: what is theirs alone, and what happens when that process
is not there.

What they share with plain workers is tested for both in test_workers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from pathlib import Path

import pytest

from orchestrator.agent.node.worker_supervisor import PendingFork, WorkerSupervisor
from orchestrator.run.processes import descendants, identity, is_alive
from tests.patience import PATIENCE_S

from .test_workers import ROOT, Harness

pytestmark = pytest.mark.process

WHO = """
import os, sys
loaded = sys.modules.get('tests.agent.preloadable.preload')
print(getattr(loaded, 'PRELOADED_BY', None), os.environ.get('FORKED'), os.environ['MINE'], os.getcwd(), flush=True)
"""


@pytest.fixture
def h(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return Harness(tmp_path, forked=True)


@pytest.fixture
def waits(tmp_path, monkeypatch):
    """While this file exists, the fork server does not get ready."""
    monkeypatch.setenv("PRELOAD_WAITS", str(tmp_path / "waits"))
    return tmp_path / "waits"


async def test_every_epoch_comes_from_one_import_and_is_the_supervisors_child(h, tmp_path):
    fork_server_pids = set()
    for life in range(2):
        for rank in (0, 1):
            h.start(WHO + "import time; time.sleep(0.5)", rank, {"MINE": f"{life}-{rank}"})
        while not all(h.workers.pids.values()):
            await asyncio.sleep(0.01)
        for rank, pid in h.workers.pids.items():
            await h.until_logged(f"{life}-{rank}", rank)
            assert Path(f"/proc/{pid}/comm").read_text() == f"orch-rank-{rank}\n"
            assert f"\nPPid:\t{h.supervisor_pid}\n" in Path(f"/proc/{pid}/status").read_text()
        await h.until_empty()
        for rank in (0, 1):
            by, forked, worker_name, cwd = h.log(rank).read_text().split()[-4:]
            assert (forked, worker_name, cwd) == ("yes", f"{life}-{rank}", str(tmp_path))
            fork_server_pids.add(by)
        assert h.ended == {0: (0, False), 1: (0, False)}
        h.ended.clear()
    assert len(fork_server_pids) == 1 and h.workers.warm
    assert descendants(h.supervisor_pid) == [int(fork_server_pids.pop())]


@pytest.mark.parametrize("when", ["before", "between"])
async def test_without_a_fork_server_workers_start_the_plain_way(h, waits, tmp_path, when):
    """It cannot import the program, or somebody killed it: before a worker was asked of it, or
    while one waits."""
    if when == "between":
        waits.touch()
    h.workers.open()
    while not (fork_server_pid := descendants(h.supervisor_pid)):
        await asyncio.sleep(0.01)
    if when == "between":
        h.start(WHO, 0, {"MINE": "x", "PRELOAD_WAITS": ""})
        await asyncio.sleep(0.2)
        os.kill(fork_server_pid[0], signal.SIGKILL)
    else:
        os.kill(fork_server_pid[0], signal.SIGKILL)
        while descendants(h.supervisor_pid):
            await asyncio.sleep(0.01)
        h.start(WHO, 0, {"MINE": "x"})
    await h.until_empty()
    assert h.log().read_text().split() == ["None", "None", "x", str(tmp_path)]
    assert h.ended == {0: (0, False)}


async def test_a_worker_is_prepared_before_it_is_forked(h):
    h.start("import os; print(os.environ['PREPARED'], os.getpid())", 0, {"PREPARED": "no"})
    await h.until_empty()
    (fork_server_pid,) = descendants(h.supervisor_pid)
    where, prepared_by, worker_pid = h.log().read_text().split()
    assert (where, prepared_by) == ("in", str(fork_server_pid)) and worker_pid != prepared_by


async def test_a_program_that_cannot_be_preloaded_says_so_in_its_own_log(h, tmp_path, monkeypatch):
    """The plain start fails as it would have without a fork server, with the program's own
    words."""
    (tmp_path / "broken").touch()
    monkeypatch.setenv("PRELOAD_BROKEN", str(tmp_path / "broken"))
    h.start("import tests.agent.preloadable.preload", 0)
    await h.until_empty()
    assert "RuntimeError: cannot be imported" in h.log().read_text()
    assert h.ended == {0: (1, False)}


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_worker_told_to_end_before_it_is_born_has_ended(h, waits, end):
    waits.touch()
    h.start("print('ran')", 0)
    h.start("print('ran')", 1)
    if end == "stop":
        h.workers.stop(signal.SIGTERM, 2 * PATIENCE_S)
    else:
        h.workers.kill()
    await h.until_empty()
    code = -15 if end == "stop" else -9
    assert h.ended == {0: (code, True), 1: (code, True)}
    assert not h.workers.warm
    waits.unlink()
    h.ended.clear()
    h.start(
        "print('next life')", 0
    )  # from the same fork server, which has meanwhile borne two that nobody wants
    await h.until_empty()
    assert h.ended == {0: (0, False)}
    assert h.log(0).read_text() == "next life\n" and h.log(1).read_text() == ""


@pytest.mark.parametrize("victim", ["worker supervisor", "fork server"])
async def test_nothing_is_left_when_a_supervisor_dies_and_workers_outlive_a_fork_server(
    h, tmp_path, victim
):
    wait = "while not os.path.exists('go'): time.sleep(0.05)"
    h.start(f"import os, time\nprint('up', flush=True)\n{wait}")
    await h.until_logged("up")
    worker = h.workers.pids[0]
    async with asyncio.timeout(PATIENCE_S):  # what bore the worker may still be going
        while len(pids := [pid for pid in descendants(h.supervisor_pid) if pid != worker]) > 1:
            await asyncio.sleep(0.01)
    (fork_server_pid,) = pids
    seen = [identity(worker), identity(fork_server_pid)]
    if victim == "worker supervisor":
        os.kill(h.supervisor_pid, signal.SIGKILL)
    else:
        os.kill(fork_server_pid, signal.SIGKILL)
        while is_alive(seen[1]):
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
    await h.until_empty()
    if victim == "worker supervisor":
        assert h.ended == {0: (-9, False)}
    else:
        assert h.ended == {0: (0, False)}
    assert not any(is_alive(process_identity) for process_identity in seen)


async def test_a_stopped_fork_server_owes_no_worker_for_long(h):
    """It is continued; one that is stopped again and again is killed, and workers start the plain
    way."""
    h.start("print('first')", 0)
    await h.until_empty()
    (fork_server,) = descendants(h.supervisor_pid)
    h.ended.clear()
    os.kill(fork_server, signal.SIGSTOP)
    h.start("print('second')", 0)
    await h.until_empty()
    assert h.ended == {0: (0, False)} and is_alive(identity(fork_server))
    h.ended.clear()
    h.start("print('third')", 0)
    while not h.ended:
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork_server, signal.SIGSTOP)
        await asyncio.sleep(0.0005)
    assert h.ended == {0: (0, False)} and h.log(0).read_text() == "first\nsecond\nthird\n"


async def test_a_traceback_and_an_exit_code_are_the_programs_own(h):
    h.start("raise ValueError('mine')", 0)
    h.start("import sys; sys.exit('words')", 1)
    await h.until_empty()
    assert h.ended == {0: (1, False), 1: (1, False)}
    assert h.log(0).read_text().endswith("ValueError: mine\n")
    assert h.log(1).read_text() == "words\n"


def test_a_worker_that_died_before_its_go_ahead_does_not_end_the_supervisor(tmp_path):
    ours, agents = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fork_server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, go_ahead = os.pipe2(os.O_CLOEXEC)
    os.close(read)  # the worker held it
    supervisor = WorkerSupervisor(ours)
    supervisor._fork_server = fork_server
    log = os.open(os.devnull, os.O_WRONLY)
    report = os.open(os.devnull, os.O_WRONLY)
    supervisor._pending[7] = PendingFork({"rank": 3}, log, report, go_ahead)
    with ours, agents, fork_server, theirs:
        theirs.send(json.dumps({"ticket": 7, "pid": 12345}).encode())
        supervisor._on_fork_server(fork_server)
        assert json.loads(agents.recv(1024)) == {"started": 3, "pid": 12345}
