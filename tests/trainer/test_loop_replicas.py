"""Whole workers, a node of which is lost with all that was in its memory: at most one finished step
is made again."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.plan import Exit, Plan
from orchestrator.plan.worker import replica_dir
from tests.patience import wait_for
from tests.trainer.test_loop import assert_same_state, changed, finish, job, saved_state
from tests.trainer.workers import Workers, running
from trainer.checkpoint.replicas import replicate as replicate_module
from trainer.checkpoint.replicas import transfer
from trainer.engine import Engine
from trainer.train import Run

pytestmark = [pytest.mark.process, pytest.mark.slow]

STEPS = 12
#: What a call says whose file or folder is being deleted.
DELETED = {os.strerror(number) for number in (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY)}


@pytest.fixture
def run(tmp_path: Path):
    """A run folder; no copies of it are left in memory."""
    folder = tmp_path / "run"
    folder.mkdir()
    yield folder
    shutil.rmtree(replica_dir(folder, "any").parent, ignore_errors=True)


def plan_of(cache: str, nodes: list[str], **layout: object) -> Plan:
    return job(
        cache,
        steps=STEPS,
        node_names=nodes,
        copy_every_steps=1,
        **({"micro_batches": 4 // layout["dp"]} | layout),
    )


def lose(workers: Workers, node: str) -> int:
    """All its workers and its memory, at once; the step that every rank had reported before."""
    before = min(workers.steps(rank)[-1].step for rank in range(len(workers.pids)))
    for seat in workers.plan.ranks:
        if seat.node == node:
            os.kill(workers.pids[seat.rank], signal.SIGKILL)
    workers.release()
    codes = workers.wait()
    shutil.rmtree(replica_dir(workers.run_dir, node))
    assert set(codes) == {-signal.SIGKILL, Exit.RESTART}
    return before


def test_a_lost_node_costs_at_most_one_step_on_a_spare_or_on_fewer_nodes(
    cache, tmp_path: Path, run
):
    """No save on disk before the end. Node 0 is lost and a spare replaces it; then node 1 is,
    without a spare."""
    layout = {"dp": 2, "tp": 2, "zero": 1, "bucket_bytes": 1 << 13}
    whole_plan = plan_of(cache, ["node0", "node1"], **layout)
    _, undisturbed = finish(whole_plan, tmp_path / "whole")
    assert not replica_dir(tmp_path / "whole", "node0").exists(), (
        "a run that is done gives the memory back"
    )

    plans = [whole_plan, plan_of(cache, ["node7", "node1"], **layout)]
    losses = {}
    done = 0
    for epoch, (plan, lost) in enumerate(zip(plans, ["node0", "node1"], strict=True)):
        with running(plan, run, epoch, held=done + 5) as workers:
            for rank in range(4):
                workers.until(rank, done + 3)
            if epoch:
                check_resumed(workers, done)
            done = lose(workers, lost)
        losses |= workers.losses()
    assert not list((run / "checkpoints").glob("step-*")), "nothing was on disk"

    one_node_plan = plan_of(cache, ["node7"], dp=1, tp=2)
    with running(one_node_plan, run, 2) as workers:
        assert workers.wait() == [0, 0]
    check_resumed(workers, done)
    losses |= workers.losses()
    assert losses.keys() == undisturbed.losses().keys() == set(range(1, STEPS + 1))
    assert list(losses.values()) == pytest.approx(list(undisturbed.losses().values()), rel=1e-5)
    assert not replica_dir(run, "node7").exists()


def check_resumed(workers: Workers, done: int) -> None:
    (event,) = workers.events("resumed")
    assert event.fields["source"] == "memory" and event.step >= done - 1


def test_on_the_same_layout_the_run_goes_on_to_the_bit(cache, tmp_path, run):
    plan = plan_of(cache, ["node0", "node1"], dp=2, zero=1)
    finish(plan, tmp_path / "whole")
    with running(plan, run, held=8) as workers:
        workers.until(0, 5)
        workers.until(1, 5)
        done = lose(workers, "node1")
    with running(plan, run, 1) as workers:
        assert workers.wait() == [0, 0]
    check_resumed(workers, done)
    assert_same_state(saved_state(tmp_path / "whole", plan, STEPS), saved_state(run, plan, STEPS))


def test_copies_that_somebody_deletes_are_made_anew_and_those_of_a_lost_node_go_with_the_others(
    cache, tmp_path, run
):
    """logind deletes them where RemoveIPC=yes and the user's last session ends."""
    plan = changed(plan_of(cache, ["node0", "node1"], dp=2, zero=1), "train", steps=80)
    home = replica_dir(run, "node0").parent
    with running(plan, run, held=62) as workers:
        for step in range(3, 60, 3):
            workers.until(0, step)
            shutil.rmtree(home, ignore_errors=True)
        lost = (
            replica_dir(run, "node9") / "step-00000003.e0"
        )  # by an agent that was killed; on this machine
        lost.mkdir(parents=True)
        (lost.parent / ".lock").touch()
        workers.release()
        assert workers.wait() == [0, 0], workers.log(0) + workers.log(1)
    assert workers.events("replicas_deleted")
    for event in workers.events("replica_failed"):
        assert any(phrase in event.fields["error"] for phrase in DELETED), event.fields["error"]
    assert not home.exists()


def test_a_termination_signal_puts_everything_on_disk_and_gives_the_memory_back(
    cache, tmp_path, run
):
    plan = plan_of(cache, ["node0", "node1"], dp=2, zero=1)
    with running(plan, run, held=6) as workers:
        workers.until(0, 3)
        assert list(replica_dir(run, "node1").glob("step-*"))
        os.kill(workers.pids[1], signal.SIGTERM)
        workers.release()
        assert workers.wait() == [Exit.RESTART] * 2
    assert not replica_dir(run, "node0").exists() and not replica_dir(run, "node1").exists()
    with running(plan, run, 1) as workers:
        assert workers.wait() == [0, 0]
    assert workers.events("resumed")[0].fields["source"] == "disk"


# ----------------------------------------------------------------------------------------------
#     beside training


class Moments:
    """Tells a worker's second thread, which makes replicas, what its training thread has done."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.computed = 0  # gradients
        self.updated = 0
        self.waits: Callable[[], bool] = lambda: (
            False
        )  # the training thread, between gradients and update
        self.order: list[int] = []
        loop = Run.loop
        gradients = Engine.gradients
        update = Engine.update

        def watched_loop(run: Run) -> None:
            self.waits = lambda: (
                run.engine.timer.now == "checkpoint" and self.computed == self.updated + 1
            )
            loop(run)

        def counted_gradients(engine: Engine, *args: object) -> object:
            loss_and_norm = gradients(engine, *args)
            self.computed += 1
            return loss_and_norm

        def counted_update(engine: Engine, *args: object) -> object:
            self.updated += 1
            return update(engine, *args)

        patch.setattr(Run, "loop", watched_loop)
        patch.setattr(Engine, "gradients", counted_gradients)
        patch.setattr(Engine, "update", counted_update)

    def hold(self, updated: int) -> None:
        """Return when the training thread has the gradients of the next step and waits to update by
        them."""
        wait_for(
            lambda: self.updated == updated and self.waits(), 60, f"a wait after update {updated}"
        )


@pytest.mark.parametrize("every", [1, 3])
def test_training_goes_on_while_a_replica_is_made_and_waits_before_an_update_alone(
    cache, tmp_path: Path, run, monkeypatch, every
):
    """A rank's state is read while the next step computes, up to its update; it is sent up to the
    update before the next replica. The threads that read and send are held until training waits for
    them: it never would before."""
    plan = plan_of(cache, ["node0", "node1"], dp=2, zero=1)
    plan = changed(changed(plan, "train", steps=7), "checkpoint", memory_every_steps=every)
    finish(plan, tmp_path / "whole")
    write = replicate_module.write
    send = transfer.run
    moments = Moments(monkeypatch)

    def late_write(folder, rank, contents):
        moments.hold(contents.step)
        return write(folder, rank, contents)

    def late_send(*args):
        moments.hold((moments.updated // every + 1) * every - 1)
        return send(*args)

    monkeypatch.setattr(replicate_module, "write", late_write)
    monkeypatch.setattr(transfer, "run", late_send)
    with running(plan, run, held=7) as workers:
        workers.until(0, 6), workers.until(1, 6)
        done = lose(workers, "node1")
    assert not workers.events("replica_failed") and done == 6
    monkeypatch.undo()
    with running(plan, run, 1) as workers:
        assert workers.wait() == [0, 0], workers.log(0)
    (event,) = workers.events("resumed")
    assert (event.fields["source"], event.step) == ("memory", {1: 5, 3: 3}[every])
    assert_same_state(saved_state(tmp_path / "whole", plan, 7), saved_state(run, plan, 7))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_a_replica_that_fails_between_the_ranks_ends_no_run(
    cache, tmp_path: Path, run, monkeypatch, error
):
    """One rank cannot take part in an exchange any more: the others do not wait for it, and all
    train to the end."""
    plan = plan_of(cache, ["node0", "node1", "node2"], dp=3, zero=1, micro_batches=1)
    send = transfer.run

    def failing(transfers, *group):
        if any(isinstance(message, transfer.Sending) and message.to == 2 for message in transfers):
            raise error("Connection closed by peer")
        return send(transfers, *group)

    monkeypatch.setattr(transfer, "run", failing)
    with running(plan, run) as workers:
        assert workers.wait(60) == [0, 0, 0], workers.log(0)
    for rank in range(3):
        (event,) = workers.events("replica_failed", rank)
        assert event.step == 1 and "no more replicas before the next start" in event.fields["error"]
    assert workers.losses().keys() == set(range(1, STEPS + 1))
