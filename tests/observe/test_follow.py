"""Watching a run: every fault is told once, and what cannot be read for a moment ends no
watching."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from orchestrator.errors import OrchError
from orchestrator.observe import follow as module
from orchestrator.observe.follow import follow, follow_program
from orchestrator.plan import to_json
from orchestrator.run.folder import RunFolder, write_private
from orchestrator.run.state import Cause, EpochState, NodeState, RunState, finish, read_state
from orchestrator.style import Style
from tests.beds.coordinated import PLAN, make_folder


@pytest.fixture
def folder(tmp_path, monkeypatch) -> RunFolder:
    monkeypatch.setattr(module, "_POLL_S", 0.0)
    folder = make_folder(tmp_path, state="running", epoch=0)
    write_private(folder.plan, to_json(PLAN))
    folder.rank_log(0).write_text("hello\n")
    return folder


def epoch(number: int, fault_text: str = "") -> EpochState:
    cause = Cause(kind="worker_exit", text=fault_text, epoch=number) if fault_text else None
    return EpochState(epoch=number, started_at=1.0, cause=cause)


def watched(watch, folder: RunFolder, looks: Sequence[RunState | Exception]) -> str:
    """What is said of these looks, after which the run is done."""
    pending_looks = [*looks, finish(read_state(folder), "done", 0, "done")]

    def look(_: RunFolder) -> RunState:
        observed = pending_looks.pop(0)
        if isinstance(observed, Exception):
            raise observed
        return observed

    out = io.StringIO()
    watch(folder, look, out, Style())
    assert not pending_looks
    return out.getvalue()


@pytest.mark.parametrize("again", ["rank 1 fell over", "rank 1 fell over again"])
def test_each_fault_is_told_once_and_none_is_left_out(folder, again):
    """Two epochs may end between two looks, and for the same reason."""
    state = read_state(folder)
    before = replace(state, epochs=[epoch(0)])
    later = replace(
        state, epoch=2, epochs=[epoch(0, "rank 1 fell over"), epoch(1, again), epoch(2)]
    )
    resized = replace(later, epoch=4, epochs=[*later.epochs[1:], epoch(3), epoch(4)])
    output = watched(follow_program, folder, [before, later, later, resized])
    faults = [line for line in output.splitlines() if "restarting" in line]
    assert faults == [
        "orch: rank 1 fell over; restarting as epoch 1",
        f"orch: {again}; restarting as epoch 2",
    ]


def test_faults_of_an_earlier_attempt_are_not_told_again(folder):
    state = replace(read_state(folder), first_epoch=1, epoch=2)
    output = watched(
        follow_program,
        folder,
        [replace(state, epochs=[epoch(0, "old"), epoch(1, "new"), epoch(2)])],
    )
    assert "orch: new; restarting as epoch 2" in output and "old" not in output


@pytest.mark.parametrize("watch", [follow, follow_program])
@pytest.mark.parametrize(
    "error", [OrchError("unreadable", 65), OSError(5, "Input/output error")], ids=["bad", "EIO"]
)
def test_a_state_that_cannot_be_read_for_a_moment_ends_no_watching(folder, watch, error):
    state = read_state(folder)
    assert "done" in watched(watch, folder, [error, state, error, error])


def test_without_a_plan_the_ranks_are_those_of_the_state(folder):
    folder.plan.write_bytes(b"{")
    state = replace(read_state(folder), nodes={"node0": NodeState(state="running", ranks=[0])})
    assert "[rank 0] hello" in watched(follow_program, folder, [state])
