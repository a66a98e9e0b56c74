"""The supervisor of a local run may be stopped, killed, or find no room on the disk: intent is obeyed, runs go on."""

from __future__ import annotations

import errno
import os
import signal
import time
from types import SimpleNamespace

import pytest

from orchestrator.backends.base import get_backend, read_record
from orchestrator.backends.local import supervisor as module
from orchestrator.backends.local.backend import LocalRecord
from orchestrator.backends.local.supervisor import Supervisor
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import descendants, holders, identity, is_alive
from tests.beds.bundles import kill_runs, wait_for

from .test_contract import ended, running, start


@pytest.fixture
def run(tmp_path):
    """A run that holds at its first step, and its supervisor's pid."""
    backend = get_backend("local")
    folder = start(backend, tmp_path / "runs")
    running(backend, folder)
    yield backend, folder, read_record(folder, LocalRecord).supervisor[0]
    kill_runs(tmp_path / "runs")


@pytest.mark.process
def test_a_pause_of_the_supervisor_is_no_signal(run):
    """CPython's sigtimedwait made a signal up when its time had passed while the process was stopped."""
    backend, folder, pid = run
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    assert backend.state(folder).state == "running"
    backend.cancel(folder, force=False)
    assert (ended(backend, folder).state, ended(backend, folder).exit_code) == ("cancelled", Exit.RESTART)


@pytest.mark.process
@pytest.mark.parametrize("force", [False, True])
def test_a_stopped_supervisor_does_not_keep_a_run_alive(run, force):
    backend, folder, pid = run
    os.kill(pid, signal.SIGSTOP)
    backend.cancel(folder, force)
    assert ended(backend, folder).state == "cancelled"


@pytest.mark.process
@pytest.mark.parametrize("force", [False, True])
def test_a_run_without_supervisor_is_cancelled(run, force):
    """Its agents are stopped, so they do not end by themselves; without force they go on first."""
    backend, folder, pid = run
    agents = [one for one in holders(folder.lock) if one.pid != pid]
    assert len(agents) == 2
    for agent in agents:
        os.kill(agent.pid, signal.SIGSTOP)
    supervisor = identity(pid)
    assert supervisor
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(supervisor), what="the supervisor's death")
    below = [identity(one) for agent in agents for one in descendants(agent.pid)]
    assert below
    backend.cancel(folder, force)
    if not force:
        for agent in agents:
            os.kill(agent.pid, signal.SIGCONT)
    assert ended(backend, folder).state == "cancelled"
    wait_for(lambda: not any(one and is_alive(one) for one in below), what="the end of all processes")


def test_a_full_disk_ends_no_healthy_run(tmp_path, monkeypatch):
    """The record of the run is written when there is room again."""
    written, room = [], [False]

    def write(folder, record):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(record)

    monkeypatch.setattr(module, "write_record", write)
    monkeypatch.setattr(module, "reap_children", lambda: [(7, 0)] if not written and not room[0] else [])
    monkeypatch.setattr(module, "read_state", lambda folder: SimpleNamespace(is_final=False))
    one = object.__new__(Supervisor)
    one._folder, one._network, one._deadline, one._asked, one._began_with = RunFolder(tmp_path), None, None, False, 0
    one._agents, one._codes, one._back = {"a": SimpleNamespace(pid=7, returncode=None)}, {}, {}
    one._options, one._unwritten = SimpleNamespace(restart_lost_nodes_after_s=None), False
    one._hear([])
    assert one._codes == {"a": 0} and not written
    room[0] = True
    one._hear([])
    assert [record.exit_codes for record in written] == [{"a": 0}]
    one._hear([])
    assert len(written) == 1
