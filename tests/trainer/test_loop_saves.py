"""Whole workers and their checkpoints: saved in the background, resumed by any other layout."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from orchestrator.plan import Exit
from orchestrator.plan.worker import EventReport, StepReport, committed
from tests.patience import wait_for
from tests.trainer.test_loop import EIGHT, finish, job
from tests.trainer.workers import Workers, running
from trainer.checkpoint import save as save_module

pytestmark = pytest.mark.process


@pytest.fixture
def gate(monkeypatch, tmp_path) -> Path:
    """No rank writes its file before this one exists. Workers are forked from this process."""
    path = tmp_path / "gate"
    write = save_module.write_tensors

    def wait_and_write(*args: object) -> object:
        wait_for(path.exists, what="the gate")
        return write(*args)

    monkeypatch.setattr(save_module, "write_tensors", wait_and_write)
    return path


def words(workers: Workers) -> list[str | int]:
    """What rank 0 reported, in order: events by name, steps by number."""
    return [
        report.step if isinstance(report, StepReport) else report.name
        for report in workers.reports()
    ]


def saved(workers: Workers) -> list[EventReport]:
    return workers.events("checkpoint_saved")


@pytest.mark.parametrize("snapshots", [1, 2])
def test_training_goes_on_while_a_save_is_written_until_no_memory_is_left(
    cache, tmp_path, gate, snapshots
):
    """Then it waits for the save. What it waited is counted."""
    plan = job(cache, steps=10_000, every=3, dp=2, zero=1, snapshots=snapshots)
    last_copy = 3 * snapshots
    with running(plan, tmp_path) as workers:
        workers.until(0, last_copy + 3)
        assert not saved(workers)
        gate.touch()
        workers.until(0, "checkpoint_saved")
        workers.until(0, last_copy + 4)
        os.kill(workers.pids[0], signal.SIGTERM)
        assert workers.wait() == [Exit.RESTART] * 2
    order = words(workers)
    first = saved(workers)[0]
    assert order.index(last_copy + 3) < order.index("checkpoint_saved") < order.index(last_copy + 4)
    assert (
        first.step == 3
        and first.fields["verified"]
        and 0 < first.fields["stall_s"] < first.fields["seconds"]
    )
    assert [event.step for event in saved(workers)][:2] == [3, 6] and not workers.events(
        "checkpoint_failed"
    )


@pytest.mark.parametrize(("every", "snapshots"), [(20, 1), (10, 2)])
def test_a_termination_signal_waits_for_the_save_in_progress_and_then_saves(
    cache, tmp_path, gate, every, snapshots
):
    """A copy that waits for its turn is forgotten."""
    plan = job(cache, steps=10_000, every=every, dp=2, snapshots=snapshots)
    with running(plan, tmp_path) as workers:
        workers.until(1, 21)
        os.kill(workers.pids[1], signal.SIGTERM)
        workers.until(0, "stopping")
        assert not saved(workers)
        gate.touch()
        assert workers.wait() == [Exit.RESTART] * 2
    first, last = saved(workers)
    assert first.step == every and last.step == max(step.step for step in workers.steps()) > 20
    assert first.fields["verified"] and not last.fields["verified"], (
        "a termination signal leaves no time to read back"
    )
    assert [step for step, _ in committed(tmp_path / "checkpoints")] == [last.step, every]


@pytest.mark.slow
def test_a_run_moves_from_layout_to_layout_and_its_losses_do_not_notice(cache, tmp_path):
    """Eight ranks, one killed; two ranks, told to stop; three ranks of a pipeline, told to stop;
    one to the end."""
    _, undisturbed = finish(job(cache, steps=20, micro_batches=4), tmp_path / "whole")
    moves = [
        {**EIGHT, "micro_batches": 2},
        {"dp": 2, "zero": 2, "micro_batches": 2},
        {"pp": 3, "stage_layers": [1, 2, 1], "micro_batches": 4},
        {"micro_batches": 4},
    ]
    losses: dict[int, float] = {}
    starts = []
    for epoch, layout in enumerate(moves):
        held = max(losses, default=2) + 5
        with running(
            job(cache, steps=20, every=3, **layout), tmp_path / "moved", epoch, held=held
        ) as workers:
            if epoch == 0:
                workers.until(0, "checkpoint_saved")
                os.kill(workers.pids[5], signal.SIGKILL)
                workers.release()
                assert -signal.SIGKILL in workers.wait()
            elif epoch < 3:
                workers.until(0, max(losses) + 2)
                os.kill(workers.pids[0], signal.SIGTERM)
                workers.release()
                assert set(workers.wait()) == {Exit.RESTART}
            else:
                workers.release()
                assert workers.wait() == [0]
        for event in workers.events("resumed"):
            assert not event.fields["same_layout"] and event.fields["samples"] == 4 * event.step
            starts.append(event.step)
        losses |= workers.losses()
    assert len(starts) == 3 and all(a < b for a, b in itertools.pairwise(starts))
    assert losses.keys() == undisturbed.losses().keys() == set(range(1, 21))
    assert list(losses.values()) == pytest.approx(list(undisturbed.losses().values()), rel=1e-5)


def test_nothing_is_left_of_a_save_in_progress(cache, tmp_path, gate):
    """A rank dies before its file is written: the next epoch finds the save before, and sweeps
    up."""
    checkpoints = tmp_path / "checkpoints"
    gate.touch()
    finish(job(cache, steps=2, dp=2), tmp_path)
    gate.unlink()
    with running(job(cache, steps=10_000, every=4, dp=2), tmp_path, epoch=1) as workers:
        workers.until(0, 5)
        assert list(checkpoints.glob(".tmp-*"))
        os.kill(workers.pids[1], signal.SIGKILL)
        workers.wait()
    gate.touch()
    codes, again = finish(job(cache, steps=3, dp=2), tmp_path, epoch=2)
    assert codes == [0, 0] and again.events("resumed")[0].step == 2
    assert not list(checkpoints.glob(".tmp-*"))
