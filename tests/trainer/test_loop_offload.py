"""Whole workers whose optimizer's state is on a disk: killed, resumed by another layout, out of
room."""

from __future__ import annotations

import errno
import mmap
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from orchestrator.plan import Exit
from orchestrator.plan.document import Offload
from orchestrator.plan.offload import buffer_size
from orchestrator.plan.worker import committed
from tests.trainer.test_loop import finish, job
from tests.trainer.workers import running
from trainer.host.remote import check_remote_disk, remote_type

pytestmark = pytest.mark.process

DISK = Offload(optimizer="disk", buffer_bytes=buffer_size(200_000, 3, 4))


def losses(workers) -> dict[int, float]:
    return {step.step: step.loss for step in workers.steps() if step.loss is not None}


def test_a_killed_run_goes_on_with_the_losses_of_one_that_kept_all_in_memory(cache, tmp_path):
    _, workers = finish(job(cache, steps=8, dp=2, zero=1), tmp_path / "memory")
    expected = losses(workers)
    with running(
        job(cache, steps=8, every=2, dp=2, zero=1, offload=DISK), tmp_path / "disk", held=6
    ) as workers:
        workers.until(0, 4)
        for pid in workers.pids:
            os.kill(pid, signal.SIGKILL)
        workers.wait()
        before = losses(workers)
    folder = tmp_path / "disk" / "offload"
    assert not list(folder.iterdir()), "a killed rank leaves no file"
    codes, workers = finish(
        job(cache, steps=8, every=2, tp=2, micro_batches=4, offload=DISK),
        tmp_path / "disk",
        epoch=1,
    )
    after = losses(workers)
    assert codes == [Exit.DONE] * 2
    assert min(after) <= 5 and max(after) == 8
    for step, loss in {**before, **after}.items():
        assert loss == pytest.approx(expected[step], rel=1e-5)


#: Of a node: its own disk, a home of others below it, and a local disk below that; blanks stand as
#: octal digits.
MOUNTS = r"""/dev/root / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/nvme0n1 /home/own\040disk xfs rw 0 0
server:/shared /home/own\040disk/shared lustre rw 0 0
hosts:/x /covered gpfs rw 0 0
tmpfs /covered tmpfs rw 0 0
remote /by-program fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/scratch", None),
        ("/home/me/runs/a/offload", "nfs4"),
        ("/homes/me", None),
        ("/home/own disk/offload", None),
        ("/home/own disk/shared/offload", "lustre"),
        ("/covered/a", None),
        ("/by-program", "fuse.sshfs"),
    ],
)
def test_a_folder_of_other_machines_is_known(tmp_path, folder, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert remote_type(Path(folder), mounts) == kind
    assert remote_type(Path(folder), tmp_path / "none") is None


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
@pytest.mark.parametrize("folder", ["", "own"])
def test_state_goes_over_the_network_only_if_the_plan_names_the_folder(
    cache, tmp_path, monkeypatch, kind, folder
):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"server:/ {tmp_path} {kind} rw 0 0\n")
    monkeypatch.setattr(
        "trainer.train.check_remote_disk", partial(check_remote_disk, mounts=mounts)
    )
    offload = structs.replace(DISK, dir=str(tmp_path / folder) if folder else "")
    codes, workers = finish(job(cache, steps=1, dp=2, zero=1, offload=offload), tmp_path)
    lines = [line for rank in range(2) for line in workers.log(rank).splitlines()]
    network = [line for line in lines if "every step waits for the network" in line]
    if kind == "ext4":
        assert codes == [Exit.DONE] * 2 and not network
    elif folder:
        assert codes == [Exit.DONE] * 2
        (warning,) = network
        assert "warning" in warning and f"{tmp_path / folder}, on nfs4" in warning
    else:
        assert codes == [Exit.CONFIG] * 2
        assert f"{tmp_path / 'offload'}, on nfs4" in network[0]
        assert "train.offload_dir=/PATH" in network[0]


def test_a_disk_that_fills_up_ends_the_run_and_leaves_its_last_checkpoint(
    cache, tmp_path, monkeypatch
):
    write = os.pwritev
    calls = [0]

    def full(fd: int, views: list, offset: int) -> int:
        calls[0] += 1
        if calls[0] > 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", full)  # workers are forked from this process
    with running(job(cache, steps=10_000, every=1, offload=DISK), tmp_path) as workers:
        assert workers.wait() == [Exit.USER]
        done = max(losses(workers))
    # What fails behind a step is met when its checkpoint is written: then only the one before is
    # committed.
    assert committed(tmp_path / "checkpoints")[0][0] in (done - 1, done)


#: Calls by which state reaches a disk or comes from it, checkpoints' included.
CALLS = ("pwritev", "preadv", "fsync", "replace", "posix_fallocate", "unlink")
#: All that can be on a disk.
AWAY = Offload(optimizer="disk", weights=True, activations="disk", buffer_bytes=DISK.buffer_bytes)
KILLS = 50
STEPS = 120


def counted(monkeypatch, at: int | None = None) -> Callable[[], int]:
    """Each rank counts its calls; at number `at` it is killed. Returned: how many the last one
    made."""
    shared = mmap.mmap(-1, 8)
    parent = os.getpid()

    def before(call):
        def counting(*args, **options):
            if os.getpid() == parent:
                return call(*args, **options)
            number = int.from_bytes(shared[:8], "little") + 1
            shared[:8] = number.to_bytes(8, "little")
            if number == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counting

    for name in CALLS:
        monkeypatch.setattr(os, name, before(getattr(os, name)))
    return lambda: int.from_bytes(shared[:8], "little")


@pytest.mark.slow
def test_killed_at_fifty_points_it_goes_on_each_time(cache, tmp_path, monkeypatch):
    """The points lie at the start, in updates, between reads and writes, in checkpoints: spread
    over the calls of a start and three steps."""
    layout = {"steps": STEPS, "recompute": "full"}
    _, workers = finish(job(cache, **layout), tmp_path / "memory")
    expected = losses(workers)
    plan = job(cache, every=1, offload=AWAY, **layout)
    with monkeypatch.context() as patch:
        calls = counted(patch)
        with running(plan, tmp_path / "count", held=4) as workers:
            workers.until(0, "held")
            calls = calls()
    reached = 0
    epochs = iter(range(KILLS + 1))
    for kill in range(KILLS):
        with monkeypatch.context() as patch:
            counted(patch, at=1 + calls * kill // KILLS)
            codes, workers = finish(plan, tmp_path / "run", epoch=next(epochs))
        assert codes == [-signal.SIGKILL], workers.log(0)
        for step, loss in losses(workers).items():
            assert loss == pytest.approx(expected[step], rel=1e-5)
            reached = max(reached, step)
        assert not list((tmp_path / "run" / "offload").glob("*"))
    assert 0 < reached < STEPS
    codes, workers = finish(plan, tmp_path / "run", epoch=next(epochs))
    assert codes == [Exit.DONE] and max(losses(workers)) == STEPS
    assert losses(workers)[STEPS] == pytest.approx(expected[STEPS], rel=1e-5)
