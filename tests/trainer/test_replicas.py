"""In-memory replicas: complete or absent, restored without any one node, and never older than the
disk."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.plan import Plan
from orchestrator.plan.document import SwitchLevel
from orchestrator.plan.worker import replica_dir
from tests.beds.plans import make_plan
from tests.trainer.states import Recorder, checkpoints, flip_bit, no_room, state
from tests.trainer.test_checkpoint_crashes import lines
from trainer.checkpoint import manager as checkpoint_manager
from trainer.checkpoint.format import StatePiece, rank_file, step_name
from trainer.checkpoint.manager import Checkpoints
from trainer.checkpoint.replicas import replicate as replicate_module
from trainer.checkpoint.replicas.peers import assign_peers, nodes_of, ring_distance
from trainer.checkpoint.replicas.store import DEAD_AFTER_S, ReplicaStore, replica_name
from trainer.verify.ranks import RankError, run_ranks

# ----------------------------------------------------------------------------------------------
#     peer assignment


@given(st.integers(1, 6), st.integers(1, 4))
def test_every_rank_has_a_peer_on_another_node_and_every_node_one_peer_node(nodes, gpus):
    plan = make_plan(dp=nodes * gpus, nodes=nodes)
    peer_of = assign_peers(plan)
    node_of = {seat.rank: seat.node for seat in plan.ranks}
    assert peer_of.keys() == (set(node_of) if nodes > 1 else set())
    assert all(node_of[rank] != node_of[peer] for rank, peer in peer_of.items())
    pairs = {(node_of[rank], node_of[peer]) for rank, peer in peer_of.items()}
    assert len(pairs) == len({peer for _, peer in pairs}) == (nodes if nodes > 1 else 0)
    assert len(set(peer_of.values())) == len(peer_of), (
        "with equally many ranks a node each keeps for one"
    )


def under(plan: Plan, switches: list[list[int]]) -> Plan:
    level = msgspec.structs.replace(plan.cluster.levels[0], switches=switches)
    assert isinstance(level, SwitchLevel)
    return msgspec.structs.replace(
        plan, cluster=msgspec.structs.replace(plan.cluster, levels=[level])
    )


@pytest.mark.parametrize(
    ("switches", "distance"),
    [([[0, 1, 2, 3]], 1), ([[0, 1], [2, 3]], 2), ([[0, 2], [1, 3]], 1), ([[0], [1, 2, 3]], 1)],
)
def test_peers_are_under_other_switches_where_possible(switches, distance):
    assert ring_distance(under(make_plan(dp=4, nodes=4), switches)) == distance


# ---------------------------------------------------------------------------------------------- a
#     node's store


def test_a_folder_that_others_may_enter_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)  # whatever the umask
    with pytest.raises(PermissionError, match="not a private folder"):
        ReplicaStore(tmp_path / "open" / "run" / "node")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        ReplicaStore(tmp_path / "link" / "run" / "node")
    reporter = Recorder()
    assert replicate_module.open_replica_store(tmp_path / "open" / "run" / "node", reporter) is None
    assert "not a private folder" in reporter.named("replica_failed")[0].fields["error"]


def test_what_dead_runs_left_is_swept_and_living_ones_are_not(tmp_path):
    home = tmp_path / "home"
    living = ReplicaStore(home / "living" / "node")
    for name in ("dead", "fresh"):
        (home / name / "node").mkdir(parents=True)
        (home / name / "node" / ".lock").touch()
    long_ago = time.time() - 2 * DEAD_AFTER_S
    for path in (
        home / "dead" / "node" / ".lock",
        home / "dead",
        living.folder / ".lock",
        home / "living",
    ):
        os.utime(path, (long_ago, long_ago))
    ReplicaStore(home / "mine" / "node")
    assert sorted(path.name for path in home.iterdir()) == ["fresh", "living", "mine"]
    living.remove()
    assert not (home / "living").exists()


# ----------------------------------------------------------------------------------------------
#     replicas of ranks


def shard(rank: int, world: int, seed: int) -> list[StatePiece]:
    """A rank's share of `state(seed)`."""
    pieces = []
    for piece in state(seed):
        low, high = (piece.data.numel() * at // world for at in (rank, rank + 1))
        if low < high:
            pieces.append(StatePiece(piece.kind, piece.info, low, piece.data[low:high].clone()))
    return pieces


def same(pieces: list[StatePiece], rank: int, world: int, seed: int) -> bool:
    return all(
        torch.equal(a.data, b.data) for a, b in zip(pieces, shard(rank, world, seed), strict=True)
    )


def test_a_run_of_the_same_name_finds_nothing_of_another(tmp_path):
    """One started at step 128, without a word, with what a killed one in another home had left."""
    first_run = tmp_path / "a" / "runs" / "r"
    second_run = tmp_path / "b" / "runs" / "r"
    first_run.mkdir(parents=True), second_run.mkdir(parents=True)
    (tmp_path / "link").symlink_to(first_run)
    assert (
        replica_dir(first_run, "n")
        == replica_dir(str(tmp_path / "link"), "n")
        != replica_dir(second_run, "n")
    )
    before = replica_dir(first_run, "n")
    first_run.rename(tmp_path / "old")
    first_run.mkdir()
    assert (
        replica_dir(first_run, "n") != before
        and replica_dir(first_run, "m").parent == replica_dir(first_run, "n").parent
    )


FOUR = make_plan(dp=4, zero=1, nodes=4, copy_every_steps=1)


def folder_of(home: Path, node: str) -> Path:
    return home / "memory" / "run" / replica_dir(home, node).name


def manager(home: Path, plan: Plan, rank: int, epoch: int) -> Checkpoints:
    memory = folder_of(home, plan.ranks[rank].node)
    return checkpoints(home / "disk", epoch, rank, plan, memory=memory)


def go_on(rank: int, home: Path, epoch: int, step: int) -> None:
    """Resume, and save a later step."""
    rank_manager = manager(home, FOUR, rank, epoch)
    rank_manager.resume(lambda: shard(rank, 4, 99))
    rank_manager.save(shard(rank, 4, step), step, 10 * step)


def replicated(rank_manager: Checkpoints, *contents: object) -> bool:
    """Whether a replica could be made of these contents."""
    assert rank_manager.replicas is not None
    return rank_manager.replicas.start(*contents) and rank_manager.replicas.settle()


def replicate(
    rank: int, home: Path, plan: Plan = FOUR, disk: int = 0, steps: tuple[int, ...] = (5, 6)
) -> None:
    """Save step `disk`, then copies of steps."""
    rank_manager = manager(home, plan, rank, 0)
    world = plan.parallel.world_size
    rank_manager.resume(lambda: [])
    if disk:
        rank_manager.save(shard(rank, world, disk), disk, 10 * disk)
    torch.manual_seed(rank)
    for step in steps:
        assert replicated(rank_manager, shard(rank, world, step), step, 10 * step, {"x": 1.5})


def restored(rank: int, home: Path, plan: Plan = FOUR, epoch: int = 1) -> list:
    """[step, where from, whether all of it is right]."""
    rank_manager = manager(home, plan, rank, epoch)
    world = plan.parallel.world_size
    live = shard(rank, world, 99)
    manifest = rank_manager.resume(lambda: live)
    sources = [event.fields["source"] for event in rank_manager.reporter.named("resumed")]
    right = (
        manifest is not None
        and same(live, rank, world, manifest.step)
        and manifest.samples == 10 * manifest.step
    )
    return [manifest and manifest.step, sources, right]


def restored_while_deleted(rank: int, home: Path) -> list:
    """Does what `restored` does; somebody deletes node1's memory when all ranks have what they need
    and begin to read it."""

    def restore(*arguments) -> None:
        dist.barrier()
        if rank == 1 and arguments[0].path.parent.name != "disk":
            shutil.rmtree(folder_of(home, "node1"))
        genuine(*arguments)

    genuine = checkpoint_manager.restore
    checkpoint_manager.restore = restore
    try:
        return restored(rank, home)
    except OSError as error:
        return [None, [str(error)], True]
    finally:
        checkpoint_manager.restore = genuine


def one_answer(answers: list[list]) -> tuple:
    """What all ranks say; only rank 0 reports."""
    assert len({answer[0] for answer in answers}) == 1 and all(answer[2] for answer in answers)
    return answers[0][0], answers[0][1][0]


@pytest.mark.process
@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_any_one_node_may_be_lost_with_its_memory(tmp_path, lost):
    """The newest replica comes back to the bit: with an empty node in the place of the lost one,
    and on fewer nodes."""
    run_ranks(replicate, 4, tmp_path)
    shutil.rmtree(folder_of(tmp_path, f"node{lost}"))
    assert one_answer(run_ranks(restored, 4, tmp_path)) == (6, "memory")
    survivors = [name for name in FOUR.cluster.node_names if name != f"node{lost}"]
    shutil.rmtree(folder_of(tmp_path, f"node{lost}"))
    fewer = make_plan(dp=3, zero=1, node_names=survivors, micro_batches=4, copy_every_steps=1)
    assert one_answer(run_ranks(restored, 3, tmp_path, fewer, 2)) == (6, "memory")


@pytest.mark.process
def test_two_peers_lost_is_the_newest_checkpoint_on_disk(tmp_path):
    run_ranks(replicate, 4, tmp_path, FOUR, 3)
    for node in ("node1", "node2"):
        shutil.rmtree(folder_of(tmp_path, node))
    assert one_answer(run_ranks(restored, 4, tmp_path)) == (3, "disk")


@pytest.mark.process
@pytest.mark.parametrize("disk", [3, 0])
def test_copies_that_are_deleted_while_they_are_read_are_no_state(tmp_path, disk):
    """The checkpoint on disk is read over what was filled; without one no rank goes on with half a
    state."""
    run_ranks(replicate, 4, tmp_path, FOUR, disk)
    answers = run_ranks(restored_while_deleted, 4, tmp_path)
    if disk:
        assert one_answer(answers) == (3, "disk")
    else:
        assert all(
            "state was filled: replica of step 6 in memory: rank 1" in answer[1][0]
            for answer in answers
        ), answers


@pytest.mark.process
def test_a_damaged_replica_is_read_from_its_peer_and_two_damaged_ones_are_not_used(tmp_path):
    run_ranks(replicate, 4, tmp_path, FOUR, 3)

    def damage(node: int, file: int) -> None:
        flip_bit(folder_of(tmp_path, f"node{node}") / replica_name(6, 0) / rank_file(file))

    damage(1, 1)
    assert one_answer(run_ranks(restored, 4, tmp_path)) == (6, "memory")
    damage(1, 1), damage(2, 1)
    assert one_answer(run_ranks(restored, 4, tmp_path, FOUR, 2)) == (3, "disk")


@pytest.mark.process
def test_a_checkpoint_on_disk_that_is_newer_is_used(tmp_path):
    run_ranks(replicate, 4, tmp_path, FOUR, 7)
    assert one_answer(run_ranks(restored, 4, tmp_path)) == (7, "disk")


@pytest.mark.process
@pytest.mark.parametrize("older", [0, 3])
def test_a_replica_is_better_than_a_damaged_checkpoint(tmp_path, older):
    def save_and_replicate(rank: int) -> None:
        rank_manager = manager(tmp_path, FOUR, rank, 0)
        rank_manager.resume(lambda: [])
        for step in (older, 7):
            if step:
                rank_manager.save(shard(rank, 4, step), step, 10 * step)
        assert replicated(rank_manager, shard(rank, 4, 6), 6, 60)

    run_ranks(save_and_replicate, 4)
    os.truncate(tmp_path / "disk" / step_name(7) / rank_file(1), 100)
    assert one_answer(run_ranks(restored, 4, tmp_path)) == (6, "memory")
    run_ranks(go_on, 4, tmp_path, 2, 7)
    assert one_answer(run_ranks(restored, 4, tmp_path, FOUR, 3)) == (7, "disk"), (
        "step 7 was made and saved again"
    )


@pytest.mark.process
def test_an_epoch_that_went_on_from_the_disk_is_newer_than_the_replicas_it_could_not_see(tmp_path):
    """Two peers were away, so epoch 1 continued from step 3. When they return, their step 6 is of
    another past."""
    run_ranks(replicate, 4, tmp_path, FOUR, 3)
    for node in ("node1", "node2"):
        folder_of(tmp_path, node).rename(tmp_path / node)
    run_ranks(go_on, 4, tmp_path, 1, 4)
    for node in ("node1", "node2"):
        shutil.rmtree(folder_of(tmp_path, node))
        (tmp_path / node).rename(folder_of(tmp_path, node))
    assert one_answer(run_ranks(restored, 4, tmp_path, FOUR, 2)) == (4, "disk")


@pytest.mark.process
@pytest.mark.parametrize("where", ["write", "receive", "manifest"])
def test_a_replica_without_room_on_one_node_fails_on_all_and_the_previous_one_stays(
    tmp_path, where
):
    def replicate_two(rank: int) -> list[str]:
        rank_manager = manager(tmp_path, FOUR, rank, 0)
        rank_manager.resume(lambda: [])
        assert replicated(rank_manager, shard(rank, 4, 5), 5, 50)
        if rank == 2:
            if where == "write":
                replicate_module.write = no_room
            elif where == "receive":
                os.posix_fallocate = no_room
            else:
                replicate_module.encode = no_room
        assert not replicated(rank_manager, shard(rank, 4, 6), 6, 60)
        return [event.fields["error"] for event in rank_manager.reporter.named("replica_failed")]

    rank_errors = run_ranks(replicate_two, 4)
    assert (
        "rank 2" in rank_errors[0][0]
        and "No space left on device" in rank_errors[0][0]
        and rank_errors[1:] == [[]] * 3
    )
    assert one_answer(run_ranks(restored, 4, tmp_path)) == (5, "memory")


@pytest.mark.process
def test_a_node_without_memory_means_no_replicas_and_the_run_goes_on(tmp_path):
    (tmp_path / "memory" / "run").mkdir(parents=True, mode=0o700)
    (tmp_path / "memory").chmod(0o700)
    folder_of(tmp_path, "node3").touch()

    def try_it(rank: int) -> list[str]:
        rank_manager = manager(tmp_path, FOUR, rank, 0)
        assert rank_manager.resume(lambda: []) is None
        assert not replicated(rank_manager, shard(rank, 4, 5), 5, 50)
        rank_manager.replicas.remove()
        return [event.name for event in rank_manager.reporter.events]

    assert run_ranks(try_it, 4) == [[], [], [], ["replica_failed"]]


@pytest.mark.process
def test_a_single_node_keeps_its_own_replica_for_workers_that_die(tmp_path):
    plan = make_plan(dp=2, zero=1, copy_every_steps=1)
    run_ranks(replicate, 2, tmp_path, plan)
    assert one_answer(run_ranks(restored, 2, tmp_path, plan)) == (6, "memory")
    assert [len(ranks) for ranks in nodes_of(plan).values()] == [2]


@pytest.mark.process
def test_random_state_comes_back_on_the_same_layout(tmp_path):
    def replicate_it(rank: int) -> torch.Tensor:
        rank_manager = manager(tmp_path, FOUR, rank, 0)
        rank_manager.resume(lambda: [])
        torch.manual_seed(100 + rank)
        replicated(rank_manager, shard(rank, 4, 5), 5, 50)
        return torch.rand(3)

    def restore_it(rank: int) -> torch.Tensor:
        manager(tmp_path, FOUR, rank, 1).resume(lambda: shard(rank, 4, 99))
        return torch.rand(3)

    before = run_ranks(replicate_it, 4)
    shutil.rmtree(folder_of(tmp_path, "node2"))
    after = run_ranks(restore_it, 4)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ----------------------------------------------------------------------------------------------
#     deaths


def die_in_replicate(rank: int, home: Path, plan: Plan, at: int) -> int:
    """Keep steps 5 and 6; rank 1 is gone before its line number `at` of the second. The lines of
    it."""
    home.mkdir(exist_ok=True)
    rank_manager = manager(home, plan, rank, 0)
    rank_manager.resume(lambda: [])
    assert replicated(rank_manager, shard(rank, 2, 5), 5, 50)
    rank_manager.replicas._thread = ThreadPoolExecutor(
        1
    )  # a thread that is traced: it begins inside
    return lines(
        lambda: replicated(rank_manager, shard(rank, 2, 6), 6, 60), at if rank == 1 else -1
    )


@pytest.mark.process
@pytest.mark.slow
def test_a_node_that_is_lost_at_any_moment_of_a_replica(tmp_path):
    """Its memory is gone too. What is left is step 5 or step 6, whole."""
    plan = make_plan(dp=2, zero=1, nodes=2, copy_every_steps=1)
    _, total = run_ranks(die_in_replicate, 2, tmp_path / "whole", plan, -1)
    steps = []
    for number in range(15):
        home = tmp_path / str(number)
        with pytest.raises(RankError):
            run_ranks(die_in_replicate, 2, home, plan, number * total // 15)
        shutil.rmtree(folder_of(home, "node1"))
        steps.append(one_answer(run_ranks(restored, 2, home, plan)))
    assert (
        total > 100 and steps[0] == (5, "memory") and set(steps) == {(5, "memory"), (6, "memory")}
    )
