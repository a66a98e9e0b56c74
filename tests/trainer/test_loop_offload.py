"""Whole workers whose optimizer's state is on a disk: killed, resumed by another layout, out of room."""

from __future__ import annotations

import errno
import os
import signal

import pytest

from orchestrator.plan import Exit
from orchestrator.plan.document import Offload
from orchestrator.plan.offload import buffer_size
from tests.trainer.test_loop import finish, job
from tests.trainer.workers import running
from trainer.checkpoint.retention import committed

pytestmark = pytest.mark.process

DISK = Offload(optimizer="disk", buffer_bytes=buffer_size(200_000, 3, 4))


def losses(workers) -> dict[int, float]:
    return {one.step: one.loss for one in workers.steps() if one.loss is not None}


def test_a_killed_run_goes_on_with_the_losses_of_one_that_kept_all_in_memory(cache, tmp_path):
    _, workers = finish(job(cache, steps=8, dp=2, zero=1), tmp_path / "memory")
    expected = losses(workers)
    with running(job(cache, steps=8, every=2, dp=2, zero=1, offload=DISK), tmp_path / "disk") as workers:
        workers.until(0, 4)
        for pid in workers.pids:
            os.kill(pid, signal.SIGKILL)
        workers.wait()
        before = losses(workers)
    folder = tmp_path / "disk" / "offload"
    assert not list(folder.iterdir()), "a killed rank leaves no file"
    codes, workers = finish(
        job(cache, steps=8, every=2, tp=2, micro_batches=4, offload=DISK), tmp_path / "disk", epoch=1
    )
    after = losses(workers)
    assert codes == [Exit.DONE] * 2
    assert min(after) <= 5 and max(after) == 8
    for step, loss in {**before, **after}.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


def test_a_disk_that_fills_up_ends_the_run_and_leaves_its_last_checkpoint(cache, tmp_path, monkeypatch):
    write, calls = os.pwritev, [0]

    def full(fd: int, views: list, offset: int) -> int:
        calls[0] += 1
        if calls[0] > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", full)  # workers are forked from this process
    with running(job(cache, steps=10_000, every=1, offload=DISK), tmp_path) as workers:
        assert workers.wait() == [Exit.USER]
        done = max(losses(workers))
    assert committed(tmp_path / "checkpoints")[0][0] == done
