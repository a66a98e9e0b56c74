"""A few fault schedules in every test run, those that once broke something among them. `search.py`
plays thousands."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from orchestrator.backends.base import write_record
from orchestrator.backends.local.backend import LocalRecord
from orchestrator.run.folder import RunFolder
from orchestrator.run.processes import identity, send_signal

from .play import failure, victim
from .schedule import Action, Schedule, make, shrunk

#: Seeds whose schedules broke a run once: 145 a forced cancel that a resize overtook.
REGRESSIONS = (145,)
#: With those they do every deed to every kind of victim, at every moment (asserted below). Chosen
#: among the first 300 greedily, by what is new in their schedules to the seconds that they ask for.
COVERING = (218, 243, 285, 208, 202)
QUICK = (*REGRESSIONS, *COVERING, 8, 12, 23, 27)
FULL = [pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 30) if seed not in QUICK]


def kinds(seed: int) -> set[str]:
    """What a schedule has: deeds with their kind of victim, moments, and whether nodes come
    back."""
    schedule = make(seed)
    deeds = {f"{action.deed} {action.victim.rstrip('0123456789')}" for action in schedule.actions}
    moments = {f"at {action.moment}" for action in schedule.actions if action.moment}
    return deeds | moments | ({"back"} if schedule.back_s else set())


@pytest.mark.process
@pytest.mark.parametrize("seed", [*QUICK, *FULL])
def test_whatever_happens_a_run_ends_truthfully_and_goes_on(runs, seed):
    schedule = make(seed)
    broke = failure(runs, schedule)
    assert not broke, f"{schedule}\n{broke}"


def test_a_seed_is_a_schedule_and_all_deeds_and_victims_come_up():
    assert make(7) == make(7) != make(8)
    many = [action for seed in range(2000) for action in make(seed).actions]
    assert {action.deed for action in many} == {
        "kill",
        "pause",
        "delete",
        "cancel",
        "force",
        "resize",
        "resume",
        "submit_signal",
    }
    assert len({action.victim for action in many}) == 1 + 11 + 4
    assert set().union(*map(kinds, QUICK)) == set().union(*map(kinds, range(2000)))


def test_a_process_that_only_has_the_number_of_a_victim_is_none(tmp_path):
    """It belongs to run seed-12, or is no process of a run at all."""
    folder = RunFolder(tmp_path / "seed-1")
    folder.create()
    sleep = "import time; time.sleep(3600)"
    stranger = subprocess.Popen([sys.executable, "-c", sleep, str(tmp_path / "seed-12")])
    agent = subprocess.Popen([sys.executable, "-c", sleep, str(folder.path)])
    try:
        agents = {"node0": stranger.pid, "node1": agent.pid}
        write_record(folder, LocalRecord(supervisor=(stranger.pid, 1), agents=agents))
        assert victim(folder, "agent0") is None
        assert victim(folder, "agent1") == identity(agent.pid)
        assert not send_signal(victim(folder, "supervisor"), signal.SIGKILL)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        agent.kill()
        stranger.wait()
        agent.wait()


def test_shrinking_leaves_what_is_needed_and_nothing_else():
    actions = [Action("kill", 0.0, victim=f"agent{node}") for node in (0, 1, 2)]
    full = Schedule(0, [*actions, Action("cancel", 0.1)])

    def fails(schedule: Schedule) -> bool:
        victims = {action.victim for action in schedule.actions}
        return {"agent0", "agent2"} <= victims

    assert [action.victim for action in shrunk(full, fails).actions] == ["agent0", "agent2"]
