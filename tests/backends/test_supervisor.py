"""The supervisor of a local run may be stopped, killed, or find no room on the disk: intent is
obeyed, runs go on."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.backends.base import get_backend, read_record
from orchestrator.backends.local.backend import LocalBackend, LocalRecord
from orchestrator.cli.main import main
from orchestrator.plan.exits import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import children_of, descendants, holders, identity, is_alive
from tests.agent import test_elastic as elastic
from tests.beds.bundles import kill_runs, submit, wait_end, wait_for
from tests.beds.failing_disk import failing, without_room
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

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
    """CPython's sigtimedwait made a signal up when its time had passed while the process was
    stopped."""
    backend, folder, pid = run
    for _ in range(2):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.3)
    assert backend.state(folder).state == "running"
    backend.cancel(folder, force=False)
    assert (ended(backend, folder).state, ended(backend, folder).exit_code) == (
        "cancelled",
        Exit.RESTART,
    )


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
    """Its agents are stopped, so they do not end by themselves; without force they are continued,
    and save."""
    backend, folder, pid = run
    agents = [process for process in holders(folder.lock) if process.pid != pid]
    assert len(agents) == 2
    for agent in agents:
        os.kill(agent.pid, signal.SIGSTOP)
    supervisor = identity(pid)
    assert supervisor
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(supervisor), what="the supervisor's death")
    below = [identity(process) for agent in agents for process in descendants(agent.pid)]
    assert below
    backend.cancel(folder, force)
    assert ended(backend, folder).state == "cancelled"
    wait_for(
        lambda: not any(process and is_alive(process) for process in below),
        what="the end of all processes",
    )


@pytest.mark.process
def test_a_record_that_cannot_be_written_ends_no_healthy_run(runs):
    """The one of the backend, here: it is written when the disk takes it again."""
    folder = elastic.start(runs, 3, 2)
    first = elastic.running(folder, "node0", "node1", "node2")
    lost = next(node for node in first.nodes if node != first.writer)
    pid = elastic.agent(folder, lost)
    with failing(folder.backend):
        os.kill(pid, signal.SIGKILL)
        elastic.running(folder, *first.nodes.keys() - {lost}, after=first.epoch)
        wait_for(
            lambda: "backend.json cannot be written" in supervisor_log(folder),
            what="a refused record",
        )
    wait_for(lambda: read_record(folder, LocalRecord).exit_codes == {lost: -9}, what="the record")
    assert elastic.cancel(folder).state == "cancelled"


def supervisor_log(folder: RunFolder) -> str:
    return (folder.logs / "supervisor.log").read_text()


@pytest.mark.process
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_whose_first_agent_is_stopped_is_given_up(runs, nodes):
    """It coordinates. Its peers leave for want of it, and nobody would ever say how the run has
    ended."""
    backend = LocalBackend()
    rules = {"heartbeat_timeout_s": 3.0, "grace_s": 1.0}
    folder = submit(make_plan(dp=2, nodes=nodes), runs, STEPS=9, HOLD=1, SAVE=1, backend=rules)
    running(backend, folder)
    pid = elastic.agent(folder, "node0")
    below = [identity(process) for process in descendants(pid)]
    os.kill(pid, signal.SIGSTOP)
    wait_for(
        lambda: (
            f"agent of node0 (pid {pid}) is stopped by a signal"
            in (backend.state(folder).reason or "")
        )
    )
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.cause.kind) == (
        "failed",
        Exit.CAPACITY,
        "node_lost",
    ), state
    assert (state.cause.node, "stopped by a signal for" in state.reason) == ("node0", True)
    assert not any(process and is_alive(process) for process in below)


@pytest.mark.process
def test_a_cancelled_run_goes_on_where_it_was_stopped_and_ends(run):
    """Nobody else would continue the agent that coordinates; it saves then."""
    backend, folder, _ = run
    os.kill(elastic.agent(folder, "node0"), signal.SIGSTOP)
    backend.cancel(folder, force=False)
    assert (ended(backend, folder).state, ended(backend, folder).exit_code) == (
        "cancelled",
        Exit.RESTART,
    )


@pytest.mark.process
@pytest.mark.parametrize("with_peers", [True, False])
def test_what_a_dead_agent_leaves_behind_is_killed(runs, with_peers):
    """Its worker supervisor was stopped before, and so kills nobody: an old worker would live on
    beside the new one."""
    folder = elastic.start(runs, 3, 2)
    first = elastic.running(folder, "node0", "node1", "node2")
    lost = next(node for node in first.nodes if node != first.writer)
    agents = (
        [elastic.agent(folder, lost)]
        if with_peers
        else [elastic.agent(folder, node) for node in first.nodes]
    )
    orphans = [child for agent in agents for child in map(identity, descendants(agent)) if child]
    for agent in agents:
        for worker_supervisor in children_of(agent):
            os.kill(worker_supervisor.pid, signal.SIGSTOP)
        os.kill(agent, signal.SIGKILL)
    wait_for(
        lambda: not any(is_alive(child) for child in orphans),
        what="the end of all that they have left",
    )
    if with_peers:
        elastic.running(folder, *first.nodes.keys() - {lost}, after=first.epoch)
        assert elastic.cancel(folder).state == "cancelled"
    else:
        assert wait_end(folder).exit_code == Exit.CAPACITY


@pytest.mark.process
@pytest.mark.parametrize("cancel_options", [[], ["--force"]])
def test_a_cancel_on_a_full_disk_goes_by_a_signal(run, cancel_options):
    backend, folder, pid = run
    argv = [sys.executable, "-m", "orchestrator.cli.main", "cancel", folder.run_id, *cancel_options]
    environment = os.environ | {"ORCH_HOME": str(folder.path.parents[1])}
    agents = [identity(process) for process in read_record(folder, LocalRecord).agents.values()]
    with without_room([pid]):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = subprocess.Popen(argv, env=environment, preexec_fn=no_room, text=True, **pipes)
        wait_for(
            lambda: not any(process and is_alive(process) for process in agents),
            what="the end of the agents",
        )
    output = command.communicate(timeout=PATIENCE_S)[0]
    assert command.returncode == 0, output
    state = ended(backend, folder)
    assert (state.state, state.exit_code) == ("cancelled", Exit.RESTART)
    assert state.reason == ("cancelled by force" if cancel_options else "cancelled by the user")


@pytest.mark.process
@pytest.mark.parametrize("cancel_options", [[], ["--force"]])
@pytest.mark.parametrize("make", ["fixed", "elastic"])
def test_a_cancel_on_a_full_disk_reaches_agents_without_a_supervisor(runs, make, cancel_options):
    """They were stopped when it died, and hear of its death and of the cancel together."""
    backend = LocalBackend()
    folder = elastic.start(runs, 2, 1) if make == "elastic" else start(backend, runs)
    running(backend, folder)
    supervisor = identity(read_record(folder, LocalRecord).supervisor[0])
    for agent in holders(folder.lock):
        if agent != supervisor:
            os.kill(agent.pid, signal.SIGSTOP)
    os.kill(supervisor.pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(supervisor), what="the supervisor's death")
    argv = [sys.executable, "-m", "orchestrator.cli.main", "cancel", folder.run_id, *cancel_options]
    environment = os.environ | {"ORCH_HOME": str(folder.path.parents[1])}
    done = subprocess.run(
        argv, env=environment, preexec_fn=no_room, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ended(backend, folder).state == "cancelled"


def no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.process
def test_status_tells_of_a_stopped_supervisor(run, capsys, monkeypatch):
    backend, folder, pid = run
    monkeypatch.setenv("ORCH_HOME", str(folder.path.parents[1]))
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: backend.state(folder).reason)
    assert main(["status", folder.run_id]) == 0
    status_text = " ".join(capsys.readouterr().out.split())
    assert (
        f"its supervisor (pid {pid}) is stopped by a signal: kill -CONT {pid}, or orch cancel"
        f" {folder.run_id}" in status_text
    )
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: not backend.state(folder).reason)
    backend.cancel(folder, force=False)
    assert ended(backend, folder).state == "cancelled"
