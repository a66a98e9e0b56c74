"""Whole workers whose optimizer's state is on a real disk of their own that is too small, fails or
is stuck: one line names it, and the run continues from its last checkpoint."""

from __future__ import annotations

import os
import time

import pytest

from orchestrator.plan import Exit
from orchestrator.plan.document import Offload
from orchestrator.plan.offload import buffer_size
from tests.beds.private_mounts import (
    REMOUNT,
    THROTTLES,
    mount_image,
    mount_memory,
    stuck,
    with_private_mounts,
)
from tests.patience import PATIENCE_S
from tests.trainer.test_loop import finish, job
from tests.trainer.workers import running

pytestmark = pytest.mark.process

HELD = 4
STEPS = 6


def on_disk(cache, folder, **layout):
    folder.mkdir()
    offload = Offload(
        optimizer="disk",
        buffer_bytes=buffer_size(200_000, 3, 4),
        dir=str(folder),
    )
    return job(cache, steps=STEPS, every=1, offload=offload, **layout)


def continues(cache, run_dir, **layout) -> None:
    """The run continues in memory, with the losses of one that nothing stopped."""
    codes, workers = finish(job(cache, steps=STEPS, every=1, **layout), run_dir, epoch=1)
    assert set(codes) == {Exit.DONE}, workers.log(0)
    _, whole = finish(job(cache, steps=STEPS, **layout), run_dir.with_name("whole"))
    losses = workers.losses()
    assert min(losses) in (HELD - 1, HELD), "it continues from a checkpoint"
    for step, loss in losses.items():
        assert loss == pytest.approx(whole.losses()[step], rel=1e-5)


def test_a_disk_that_is_too_small_is_named_before_the_first_step(cache, tmp_path):
    def test() -> None:
        disk = tmp_path / "disk"
        plan = on_disk(cache, disk)
        mount_memory(disk, "256k")
        codes, workers = finish(plan, tmp_path / "run")
        line = workers.log(0).splitlines()[-1]
        assert codes == [Exit.USER]
        assert f"train.offload_dir {disk} cannot hold the offloaded state" in line
        assert "No space left on device" in line
        assert not list(disk.iterdir())
        mount_memory(disk, "64m", REMOUNT)
        codes, workers = finish(plan, tmp_path / "run", epoch=1)
        assert codes == [Exit.DONE], workers.log(0)

    with_private_mounts(test)


def test_a_disk_that_fails_ends_the_run_in_one_line_and_it_continues(cache, tmp_path):
    """The device under the file system loses its blocks: the kernel's own input/output error."""

    def test() -> None:
        disk = tmp_path / "disk"
        image = tmp_path / "image"
        plan = on_disk(cache, disk, dp=2, zero=1)
        mount_image(image, disk, 64)
        with running(plan, tmp_path / "run", held=HELD) as workers:
            for rank in range(2):
                workers.until(rank, "held")
            os.truncate(image, 0)
            workers.release()
            assert Exit.NODE in workers.wait(), workers.log(0)
            lines = [line for rank in range(2) for line in workers.log(rank).splitlines()]
        assert any(
            f"train.offload_dir {disk} cannot be" in line and "Input/output error" in line
            for line in lines
        ), lines
        continues(cache, tmp_path / "run", dp=2, zero=1)

    with_private_mounts(test)


@pytest.mark.skipif(not (THROTTLES / "tasks").exists(), reason="needs the kernel's limits of disks")
def test_a_disk_that_is_stuck_ends_the_run_in_one_line_and_it_continues(
    cache, tmp_path, monkeypatch
):
    """The kernel holds the requests back: nothing fails, nothing moves. A process ends only when
    its last request does, so the line has to be there before."""
    monkeypatch.setattr("trainer.host.file.STUCK_S", 1.5)  # workers are forked from this process

    def test() -> None:
        disk = tmp_path / "disk"
        plan = on_disk(cache, disk)
        device = mount_image(tmp_path / "image", disk, 64)
        with running(plan, tmp_path / "run", held=HELD) as workers:
            workers.until(0, "held")
            with stuck(device, *workers.pids):
                workers.release()
                deadline = time.monotonic() + PATIENCE_S
                while "train.offload_dir" not in workers.log(0):
                    assert time.monotonic() < deadline, workers.log(0)
                    time.sleep(0.05)
            assert workers.wait() == [Exit.NODE], workers.log(0)
            line = workers.log(0).splitlines()[-1]
        assert f"train.offload_dir {disk} cannot be" in line
        assert "no request has ended for 1.5 s" in line
        continues(cache, tmp_path / "run")

    with_private_mounts(test)
