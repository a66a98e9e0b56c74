"""Whole local runs: supervisors, agents and stand-in workers as real processes; faults as real
signals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys

import msgspec
import psutil
import pytest

from orchestrator.backends.base import read_record
from orchestrator.backends.local.backend import LocalBackend, LocalRecord
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import Identity, descendants, identity, is_alive, send_signal
from orchestrator.run.request import read_request
from orchestrator.run.state import read_state, true_state
from tests.beds.bundles import (
    events,
    make_bundle,
    submit,
    submitted,
    wait_end,
    wait_for,
    wait_state,
    wait_step,
)
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.process
#: Who waited for this grace would exceed the patience of a test.
UNHURRIED = {"grace_s": 2 * PATIENCE_S}


def plan(nodes: int = 2, ranks: int = 4, **fields):
    return make_plan(dp=ranks, nodes=nodes, **fields)


def processes(folder: RunFolder) -> dict[str, Identity]:
    """Identities of everything a run's workers wrote down: worker pids and their grandchildren."""
    identities = {}
    for path in [*folder.path.glob("pid-*"), *folder.path.glob("grandchild-*")]:
        if path.read_text() and (process := identity(int(path.read_text()))):
            identities[path.name] = process
    return identities


def wait_gone(these: dict[str, Identity]) -> None:
    wait_for(
        lambda: not any(is_alive(process) for process in these.values()),
        what=f"end of {list(these)}",
    )


def wait_workers(folder: RunFolder, count: int, epoch: int = 0) -> None:
    def said() -> int:
        return sum(1 for path in folder.path.glob(f"pid-{epoch}-*") if path.read_text())

    wait_for(lambda: said() == count, what=f"{count} workers")


def resume(folder: RunFolder) -> None:
    LocalBackend().resume(folder, read_request(folder), os.environ)


def agents(folder: RunFolder) -> dict[str, int]:
    return wait_for(lambda: (r := read_record(folder, LocalRecord)) and r.agents, what="agents")


def test_a_run_from_submit_to_done(runs):
    folder = submit(plan(), runs)
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.epoch) == ("done", 0, 0)
    report = json.loads(folder.report.read_text())
    assert report["steps"] == {"planned": 4, "completed": 3, "replayed": 0, "tokens": 384}
    assert report["memory"]["params"]["measured"] == 103  # the worst rank
    assert report["loss"] == {"first": 5.0, "last": 5.0 / 3}
    assert not folder.discovery.exists()
    assert {oct(p.stat().st_mode & 0o777) for p in folder.path.rglob("*") if p.is_file()} == {
        "0o600"
    }
    assert {
        oct(p.stat().st_mode & 0o777) for p in [folder.path, *folder.path.rglob("*")] if p.is_dir()
    } == {"0o700"}


CODES = {code: code for code in (64, 65, 70, 74, 76, 77, 78)} | dict.fromkeys(
    (1, 3, 127, -9, -11), 1
)
#: Of these one is passed on, one is any other, and one is a signal.
QUICK_CODES = (74, 3, -11)


@pytest.mark.parametrize(
    ("worker", "run"),
    [
        pytest.param(*pair, marks=() if pair[0] in QUICK_CODES else pytest.mark.full)
        for pair in CODES.items()
    ],
)
def test_what_a_workers_code_makes_of_the_run(runs, worker, run):
    state = wait_end(submit(plan(nodes=1, ranks=2), runs, DIE=f"1:2:{worker}"))
    assert (state.state, state.exit_code) == ("failed", run)
    assert (state.cause.rank, state.cause.node, state.cause.code) == (1, "node0", worker)
    assert state.cause.tail[-1] == f"dying with {worker} before step 2"


def test_the_first_cause_is_named_and_the_others_are_stopped(runs):
    folder = submit(plan(), runs, STEPS=9, HOLD=1)
    wait_step(folder, 3)
    alive = processes(folder)
    victim = alive.pop("pid-0-2")
    os.kill(victim.pid, signal.SIGKILL)
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.cause.rank, state.cause.code) == (
        "failed",
        1,
        2,
        -9,
    )
    assert state.reason.startswith("rank 2 on node1: killed by SIGKILL after step")
    assert state.cause.log == "logs/rank-00002.log"
    assert not any(is_alive(process) for process in alive.values())


def test_workers_that_do_not_listen_are_killed_after_the_grace(runs):
    folder = submit(plan(), runs, STEPS=9, HOLD=1, DEAF=1, DIE="0:3:5", backend={"grace_s": 0.5})
    assert wait_end(folder).cause.code == 5


@pytest.mark.parametrize("which", [0, 1])
def test_killing_an_agent_leaves_no_orphan(runs, which):
    """Its workers go at once, while those of the other node are given their grace."""
    wishes = {"HOLD": 1, "SPAWN": 1, "DEAF": 1}
    folder = submit(plan(), runs, backend=UNHURRIED, **wishes)
    wait_workers(folder, 4)
    alive = processes(folder)
    of_node = {name: process for name, process in alive.items() if int(name[-1]) // 2 == which}
    assert len(alive) == 8 and len(of_node) == 4  # a worker and a grandchild each
    os.kill(agents(folder)[f"node{which}"], signal.SIGKILL)
    wait_gone(of_node)
    for name in alive.keys() - of_node.keys():
        if name.startswith("pid-"):
            assert send_signal(alive[name], signal.SIGKILL), "it is given its grace"
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.cause.kind) == ("failed", 76, "node_lost")
    assert f"node{which}" in state.reason
    assert not any(is_alive(process) for process in alive.values())


@pytest.mark.parametrize(
    ("victim", "signum", "reason"),
    [
        ("supervisor", signal.SIGKILL, "node[01]: the supervisor is gone"),
        ("node1", signal.SIGTERM, "node1: got SIGTERM"),
    ],
)
def test_a_dead_supervisor_or_a_schedulers_signal_to_one_agent_saves_everywhere(
    runs, victim, signum, reason
):
    folder = submit(plan(), runs, HOLD=1, SAVE=1, SPAWN=1)
    wait_workers(folder, 4)
    wait_step(folder, 2)
    alive = processes(folder)
    os.kill(agents(folder).get(victim) or read_record(folder, LocalRecord).supervisor[0], signum)
    state = wait_end(folder)
    assert (state.state, state.exit_code) == ("stopped", 75)
    assert re.fullmatch(reason, state.reason)
    assert len(list(folder.path.glob("saved-*"))) == 4
    assert not any(is_alive(process) for process in alive.values())


def test_when_everything_is_killed_the_state_is_told_truthfully_and_the_run_can_be_resumed(runs):
    folder = submit(plan(), runs, HOLD=1, DEAF=1, backend=UNHURRIED)
    wait_step(folder, 2)
    alive = processes(folder)
    for pid in [read_record(folder, LocalRecord).supervisor[0], *agents(folder).values()]:
        with contextlib.suppress(ProcessLookupError):  # agents end with their supervisor
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not folder.is_alive())
    assert read_state(folder).state in (
        "running",
        "restarting",
        "stopping",
    )  # nobody could write any more
    state = true_state(folder, folder.is_alive())
    assert (state.state, state.exit_code, state.cause.kind) == ("failed", 76, "supervisor_lost")
    wait_gone(alive)
    (folder.path / "go").touch()
    resume(folder)
    state = wait_end(folder)
    assert (state.state, state.epoch) == ("done", 1)


def submit_with_second_agent(runs, code: str, join_timeout_s: float) -> RunFolder:
    """A run whose second agent is another program."""
    bundle = make_bundle(plan(), runs, join_timeout_s=join_timeout_s)
    first, second = bundle.request.agents
    second = msgspec.structs.replace(second, argv=[sys.executable, "-c", code])
    request = msgspec.structs.replace(bundle.request, agents=[first, second])
    return submitted(msgspec.structs.replace(bundle, request=request))


def test_a_supervisor_that_dies_before_the_agents_have_met(runs):
    """The first agent hosts the coordinator; it must not wait for a second one that nobody will
    start."""
    folder = submit_with_second_agent(runs, "input()", 2 * PATIENCE_S)
    wait_state(folder, "starting")
    os.kill(read_record(folder, LocalRecord).supervisor[0], signal.SIGKILL)
    state = wait_end(folder)
    assert (state.state, state.exit_code) == ("stopped", 75)


def test_restart_from_the_last_save_while_the_budget_lasts(runs):
    folder = submit(
        plan(), runs, STEPS=8, STEP_S=0.05, SAVE=1, DIE="3:4:9:0", backend={"max_restarts": 1}
    )
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.epoch, state.restarts) == ("done", 0, 1, 1)
    first, second = state.epochs
    assert (first.outcome, first.counted, first.cause.rank, first.cause.code) == (
        "restart",
        True,
        3,
        9,
    )
    assert (second.outcome, second.counted) == ("done", False)
    assert "--- orch: epoch 1" in folder.rank_log(3).read_text()
    assert json.loads(folder.report.read_text())["steps"]["completed"] == 8


def test_the_budget_ends(runs):
    folder = submit(plan(nodes=1, ranks=2), runs, DIE="0:1:7", backend={"max_restarts": 2})
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.epoch, state.restarts) == ("failed", 1, 2, 2)
    assert [epoch.counted for epoch in state.epochs] == [True, True, False]


def test_saved_and_wants_restart_costs_no_budget_but_is_bounded(runs):
    folder = submit(plan(nodes=1, ranks=2), runs, DIE="0:1:75,1:1:75")
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.restarts) == ("stopped", 75, 0)
    assert len(state.epochs) == 6 and "without a new step" in state.reason


def test_cancel_saves_first_and_resume_goes_on(runs):
    folder = submit(plan(), runs, STEPS=5, SAVE=1, HOLD=1)
    wait_step(folder, 2, workers=4)
    for _ in range(3):  # to cancel again is not to force it
        LocalBackend().cancel(folder, force=False)
        wait_state(folder, "stopping", "cancelled")
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.reason) == (
        "cancelled",
        75,
        "cancelled by the user",
    )
    saved = int((folder.path / "saved-0").read_text())
    assert 2 <= saved < 5 and len(list(folder.path.glob("saved-*"))) == 4
    (folder.path / "go").touch()
    resume(folder)
    state = wait_end(folder)
    assert (state.state, state.exit_code, state.epoch) == ("done", 0, 1)
    assert f"starts after step {saved}" in folder.rank_log(0).read_text()


def test_a_forced_cancel_does_not_wait(runs):
    folder = submit(plan(), runs, HOLD=1, DEAF=1, SPAWN=1, backend=UNHURRIED)
    wait_workers(folder, 4)
    alive = processes(folder)
    LocalBackend().cancel(folder, force=True)
    state = wait_end(folder)
    assert (state.state, state.exit_code) == ("cancelled", 75)
    assert not any(is_alive(process) for process in alive.values())


def test_the_second_signal_kills(runs):
    folder = submit(plan(), runs, HOLD=1, DEAF=1, backend=UNHURRIED)
    wait_step(folder, 2)
    agent = agents(folder)["node1"]
    os.kill(agent, signal.SIGTERM)
    wait_state(folder, "stopping")
    os.kill(agent, signal.SIGTERM)
    state = wait_end(folder)
    assert (state.state, state.exit_code) == ("stopped", 75)
    assert state.reason.endswith("not every worker saved")


def test_a_frozen_agent_is_a_lost_node(runs):
    backend = {"heartbeat_timeout_s": 5.0, "grace_s": 1.0}
    folder = submit(plan(), runs, HOLD=1, SPAWN=1, backend=backend)
    wait_workers(folder, 4)
    wait_state(folder, "running")
    alive = processes(folder)
    agent = agents(folder)["node1"]
    os.kill(agent, signal.SIGSTOP)
    state = wait_state(folder, "failed")
    assert (state.exit_code, state.cause.kind, state.cause.node) == (76, "node_lost", "node1")
    os.kill(agent, signal.SIGCONT)  # it wakes up late, and is told that it is fenced
    wait_end(folder)
    assert read_record(folder, LocalRecord).exit_codes["node1"] == 77
    assert not any(is_alive(process) for process in alive.values())


def test_a_killed_supervisor_takes_the_workers_with_it_and_the_run_restarts(runs):
    """All of them are gone before the next epoch has a worker."""
    folder = submit(plan(nodes=1), runs, HOLD=1, SPAWN=1, backend={"max_restarts": 1})
    wait_step(folder, 2)
    alive = processes(folder)
    worker = alive["pid-0-0"].pid
    supervisor = psutil.Process(worker).ppid()
    for path in folder.path.glob("grandchild-*"):
        path.unlink()
    os.kill(supervisor, signal.SIGKILL)
    wait_for(lambda: list(folder.path.glob("pid-1-*")), what="a worker of the next epoch")
    assert not any(is_alive(process) for process in alive.values())
    (folder.path / "go").touch()
    state = wait_end(folder)
    assert (state.state, state.reason, state.epoch) == ("done", "all workers are done", 1)


def test_a_stopped_worker_supervisor_hides_no_dead_rank(runs):
    """A rank that dies while nobody reaps it is heard of within seconds, not after the longest
    time-out."""
    folder = submit(make_plan(dp=2, nodes=1), runs, HOLD=1, SAVE=1)
    wait_state(folder, "running")
    (agent,) = read_record(folder, LocalRecord).agents.values()
    (watcher,) = [child.pid for child in psutil.Process(agent).children()]
    os.kill(watcher, signal.SIGSTOP)
    os.kill(descendants(watcher)[-1], signal.SIGKILL)
    cause = wait_end(folder).cause
    assert (cause.kind, cause.code) == ("worker_exit", -9)
    assert [event["reason"] for event in events(folder, "worker_supervisor_stopped")]


def test_a_program_that_cannot_be_started_is_refused_once(runs, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    state = wait_end(submit(plan(), runs, command=[str(script)], backend={"max_restarts": 3}))
    assert (state.state, state.exit_code, state.epoch) == ("failed", 64, 0)
    assert "cannot start" in state.cause.tail[-1] and "No such file" in state.cause.tail[-1]


def test_two_runs_at_once_do_not_meet(runs):
    port = 29_900 + os.getpid() % 90
    folders = [
        submit(plan(metrics_port=port), runs, run_id=f"run-{index}", STEPS=10) for index in range(2)
    ]
    assert [wait_end(folder).state for folder in folders] == ["done", "done"]


def test_a_metrics_page_that_cannot_be_served_ends_no_run(runs):
    folder = submit(plan(nodes=1, ranks=2, metrics_host="203.0.113.1"), runs)
    state = wait_end(folder)
    assert state.state == "done" and state.nodes["node0"].metrics is None
    assert [event["host"] for event in events(folder, "metrics_not_served")] == ["203.0.113.1"]


@pytest.mark.parametrize(
    "names",
    [
        ["a b", "../../x"],
        ["nœud/1", ".hidden"],
        ["x" * 300, "quote'\"$(id)"],
        ["new\nline", "tab\t"],
    ],
)
def test_odd_node_names(runs, names):
    folder = submit(make_plan(dp=2, node_names=names), runs)
    state = wait_end(folder)
    assert state.state == "done" and list(state.nodes) == names
    assert len(list((folder.path / "metrics").iterdir())) == 2
    assert [path for path in runs.iterdir() if path != folder.path] == []


def test_a_node_that_never_comes(runs):
    folder = submit_with_second_agent(runs, "import time; time.sleep(3600)", 3.0)
    state = wait_state(folder, "failed")
    assert (state.exit_code, state.reason) == (76, "node1 did not join within 3 s")
    os.kill(agents(folder)["node1"], signal.SIGKILL)
    wait_end(folder)


def test_garbage_on_the_report_pipe_is_counted_and_changes_nothing(runs):
    folder = submit(plan(nodes=1, ranks=2), runs, GARBAGE=1)
    assert wait_end(folder).state == "done"
    assert len(events(folder, "report_unreadable")) == 5
    assert len(folder.metrics("node0").read_text().splitlines()) == 6
