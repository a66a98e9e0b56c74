"""The final checkpoint: nodes that are too few to train write the newest replica to disk, or say
why not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from orchestrator.plan.worker import committed
from tests.beds.plans import make_plan
from tests.trainer.states import Recorder, no_room
from tests.trainer.test_replicas import FOUR, folder_of, one_answer, replicate, restored
from trainer.checkpoint.fence import Fence
from trainer.checkpoint.format import step_name
from trainer.checkpoint.replicas.final_checkpoint import save_newest_replica
from trainer.checkpoint.replicas.store import ReplicaStore
from trainer.checkpoint.save import Target
from trainer.errors import TrainerError
from trainer.verify.ranks import run_ranks

pytestmark = pytest.mark.process


def final_checkpoint(
    rank: int, home: Path, nodes: list[str], epoch: int = 1, full: int = -1
) -> list:
    """[the step that was saved, the error, events]; the disk of process `full` is."""
    reporter = Recorder()
    memory = ReplicaStore(folder_of(home, nodes[rank]))
    target = Target(home / "disk", Fence("run", epoch), FOUR, rank)
    if rank == full:
        os.fsync = no_room
    try:
        step = save_newest_replica(target, len(nodes), memory, 2, reporter)
        error = ""
    except TrainerError as problem:
        step = None
        error = f"{type(problem).__name__}: {problem}"
    return [
        step,
        error,
        [[event.name, event.step, event.fields["source"]] for event in reporter.events],
    ]


def steps(home: Path) -> list[int]:
    return [step for step, _ in committed(home / "disk")]


def test_the_nodes_that_are_left_save_the_newest_state_between_them(tmp_path):
    """node1 is lost. The others, among them a spare that holds nothing, save step 6, and three
    ranks go on from it."""
    run_ranks(replicate, 4, tmp_path, FOUR, 3)
    shutil.rmtree(folder_of(tmp_path, "node1"))
    remaining_nodes = ["spare", "node0", "node2", "node3"]
    answers = run_ranks(final_checkpoint, 4, tmp_path, remaining_nodes, 1, 3)
    assert {(step, error) for step, error, _ in answers} == {(None, answers[0][1])}
    assert (
        answers[0][1].startswith("SaveError: checkpoint of step 6: rank-")
        and "No space left" in answers[0][1]
    )
    assert steps(tmp_path) == [3] and not list((tmp_path / "disk").glob(".tmp*")), (
        "a full disk leaves what was there"
    )
    answers = run_ranks(final_checkpoint, 4, tmp_path, remaining_nodes, 2)
    assert [step for step, _, _ in answers] == [6] * 4 and answers[0][2] == [
        ["checkpoint_saved", 6, "memory"]
    ]
    assert not any(events for _, _, events in answers[1:]) and steps(tmp_path) == [6, 3]
    assert not any(folder_of(tmp_path, node).exists() for node in remaining_nodes), (
        "the memory is given back"
    )
    fewer = make_plan(
        dp=3, zero=1, node_names=["spare", "node2", "node3"], micro_batches=4, copy_every_steps=1
    )
    assert one_answer(run_ranks(restored, 3, tmp_path, fewer, 3)) == (6, "disk")


def test_what_no_node_holds_any_more_is_said_and_the_last_checkpoint_stays(tmp_path):
    run_ranks(replicate, 4, tmp_path, FOUR, 3)
    for node in ("node1", "node2"):  # peers
        shutil.rmtree(folder_of(tmp_path, node))
    for _, error, events in run_ranks(final_checkpoint, 2, tmp_path, ["node0", "node3"]):
        assert (
            error == "SaveError: replica of step 6: 1 of 4 files were lost with their nodes"
            and not events
        )
    assert steps(tmp_path) == [3] and folder_of(tmp_path, "node0").exists(), (
        "who was cut off may be back"
    )


def test_nothing_is_written_where_the_disk_is_as_new_or_somebody_else_writes(tmp_path):
    run_ranks(replicate, 4, tmp_path, FOUR, 6)
    nodes = ["node0", "node1", "node2", "node3"]
    before = (tmp_path / "disk" / step_name(6)).stat().st_mtime_ns
    assert run_ranks(final_checkpoint, 4, tmp_path, nodes, 5) == [[None, "", []]] * 4
    assert (
        steps(tmp_path) == [6] and (tmp_path / "disk" / step_name(6)).stat().st_mtime_ns == before
    )
    assert all(
        error.startswith("Fenced")
        for _, error, _ in run_ranks(final_checkpoint, 4, tmp_path, nodes, 4)
    )
