"""Death, power cuts and failing disks at every moment of a save: what loads afterwards is whole,
and is what was saved.

Three kinds of end are tried at each place where they could come: SIGKILL (what was done stays
done), a power cut (what was not fsynced is gone) and an error from the kernel (ENOSPC, EIO, EROFS).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

import trainer.checkpoint
import trainer.durable
from orchestrator.plan.worker import committed
from tests.beds.private_mounts import REMOUNT, mount_memory, with_private_mounts
from tests.trainer.states import Recorder, equal, opened, resume, saved, state
from trainer.checkpoint.background import BackgroundSave
from trainer.checkpoint.format import StatePiece
from trainer.checkpoint.manager import Checkpoints
from trainer.comm.control import WORLD
from trainer.errors import SaveError
from trainer.verify.ranks import RankError, run_ranks

OLD = 1
NEW = 2
#: Code whose every line is a place to die at.
FILES = (str(Path(trainer.checkpoint.__file__).parent), trainer.durable.__file__, shutil.__file__)


def save_beside(manager: Checkpoints) -> None:
    """Saves as the training loop does: starts, and follows at the boundaries until it is done."""
    manager.start(state(NEW), NEW, 10 * NEW)
    background = manager._background
    while future := background._writing or background._committing:
        future.exception()  # waits; a loop over `vote` would be most of the lines that are counted
        manager.advance(1)


def save_now(manager: Checkpoints) -> None:
    manager.save(state(NEW), NEW, 10 * NEW)


WAYS = {"beside": save_beside, "now": save_now}


def ready(folder: Path, keep_last: int = 1) -> Checkpoints:
    """A run that has resumed from its save of step OLD and is about to save step NEW, after which
    OLD may go."""
    saved(folder, OLD)
    _, manager, _ = resume(folder, epoch=1)
    manager.keep_last = manager._background.keep_last = keep_last
    return manager


def loads(folder: Path) -> int:
    """The step that a new epoch resumes from; its state is compared with what was saved then."""
    live, manager, manifest = resume(folder, epoch=2)
    assert equal(live, state(manifest.step)) and manifest.samples == 10 * manifest.step
    assert not manager.reporter.named("checkpoint_rejected"), (
        "nothing that looks committed may be bad"
    )
    assert not list(folder.glob(".tmp-*")) and not list(folder.glob(".trash-*"))
    return manifest.step


# ----------------------------------------------------------------------------------------------
#     SIGKILL


def lines(action: Callable[[], None], at: int = -1) -> int:
    """How many lines of `FILES` an action runs, in all its threads. The process is gone before line
    number `at`."""
    count = 0
    lock = threading.Lock()

    def trace(frame, event: str, arg: object):
        nonlocal count
        if not frame.f_code.co_filename.startswith(FILES):
            return None
        if event == "line":
            with lock:
                count += 1
                if count == at + 1:
                    os.kill(os.getpid(), 9)
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return count


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("moments", [30, pytest.param(110, marks=pytest.mark.full)])
@pytest.mark.parametrize("mode", WAYS)
def test_sigkill_at_many_moments_of_a_save(tmp_path, mode, moments):
    manager = ready(tmp_path / "first")
    total = lines(lambda: WAYS[mode](manager))
    assert total > 110 and loads(tmp_path / "first") == NEW
    steps = []
    for number in range(moments):
        folder = tmp_path / str(number)
        manager = ready(folder)
        at = number * total // moments
        pid = os.fork()
        if pid == 0:
            try:
                lines(lambda: WAYS[mode](manager), at)  # noqa: B023  called before the loop goes on
            finally:
                os._exit(0)  # threads interleave: a line may come that the count had not
        os.waitpid(pid, 0)
        steps.append(loads(folder))
        shutil.rmtree(folder)
    assert steps[0] == OLD and steps[-1] == NEW and set(steps) == {OLD, NEW}


# ----------------------------------------------------------------------------------------------
#     power cuts


class Disk:
    """What a disk is sure to hold of the tree under `root`: contents as of each file's last fsync,
    names as of each folder's last fsync. `cuts` collects that state before and after every
    operation that could matter."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch):
        self.root = root
        self.files = {}
        self.names = {}
        self.cuts: list[dict[str, bytes]] = []
        for path in [root, *root.rglob("*")]:
            self._hold(path)
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _hold(self, path: Path) -> None:
        number = path.stat().st_ino
        if path.is_dir():
            self.names[number] = {
                entry.name: (entry.stat().st_ino, entry.is_dir()) for entry in path.iterdir()
            }
        else:
            self.files[number] = path.read_bytes()

    def _watched(self, name: str, real: Callable) -> Callable:
        def call(*args: object, **options: object) -> object:
            self.cuts.append(self.tree())
            result = real(*args, **options)
            if name == "fsync":
                self._hold(Path(os.readlink(f"/proc/self/fd/{args[0]}")))
            self.cuts.append(self.tree())
            return result

        return call

    def tree(self) -> dict[str, bytes]:
        """Path -> content of what survives a power cut now."""

        def walk(number: int, prefix: str) -> Iterator[tuple[str, bytes]]:
            for name, (child, is_folder) in self.names.get(number, {}).items():
                if is_folder:
                    yield f"{prefix}{name}/", b""
                    yield from walk(child, f"{prefix}{name}/")
                else:
                    yield f"{prefix}{name}", self.files.get(child, b"")

        return dict(walk(self.root.stat().st_ino, ""))


def lay_out(tree: dict[str, bytes], folder: Path) -> None:
    folder.mkdir()
    for name, content in tree.items():
        if name.endswith("/"):
            (folder / name).mkdir(parents=True)
        else:
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("mode", WAYS)
def test_a_power_cut_at_any_moment_of_a_save(tmp_path, monkeypatch, mode):
    """The older save stays until the newer one's every byte and name is on the disk."""
    manager = ready(tmp_path / "run")
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path / "run", patched)
        WAYS[mode](manager)
    steps = []
    for number, tree in enumerate(disk.cuts):
        lay_out(tree, tmp_path / f"cut-{number}")
        steps.append(loads(tmp_path / f"cut-{number}"))
    assert len(steps) > 20 and steps[0] == OLD and steps[-1] == NEW and steps == sorted(steps)
    assert [step for step, _ in committed(tmp_path / "run")] == [NEW]


def test_the_first_save_of_a_new_folder_survives_a_power_cut(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        disk = Disk(tmp_path, patched)
        save_now(opened(tmp_path / "new" / "folder"))
    lay_out(disk.tree(), tmp_path / "after")
    assert loads(tmp_path / "after" / "new" / "folder") == NEW


# ----------------------------------------------------------------------------------------------
#     failing disks


class Failing:
    """The n-th operation on files fails with an error number; with `stays`, all after it too."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, number: int, at: int = -1, stays: bool = False
    ):
        self.number = number
        self.at = at
        self.stays = stays
        self.count = 0
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open", "scandir"):
            monkeypatch.setattr(os, name, self._watched(getattr(os, name)))
        monkeypatch.setattr("io.open", self._watched(open))

    def _watched(self, real: Callable) -> Callable:
        def call(*args: object, **options: object) -> object:
            self.count += 1
            if self.count == self.at + 1 or (self.stays and self.count > self.at >= 0):
                raise OSError(self.number, os.strerror(self.number), str(args[0]))
            return real(*args, **options)

        return call


def errors() -> list:
    """Every two of way, error number and whether it stays meet; all three together with `make
    verify`."""
    params = []
    for (at, mode), (kind, number), stays in product(
        enumerate(WAYS), enumerate((errno.ENOSPC, errno.EIO, errno.EROFS)), (False, True)
    ):
        name = f"{mode}-{errno.errorcode[number]}-{'from then on' if stays else 'once'}"
        marks = [pytest.mark.full] if (at + kind + stays) % 2 else []
        params.append(pytest.param(mode, number, stays, id=name, marks=marks))
    return params


@pytest.mark.parametrize(("mode", "number", "stays"), errors())
def test_an_error_of_the_disk_at_any_moment_of_a_save(tmp_path, mode, number, stays):
    """The save fails in one line or succeeds; training could go on; either way what is there
    loads."""

    def attempt(folder: Path, at: int) -> tuple[int, str]:
        """(operations, what was said)."""
        manager = ready(folder)
        with pytest.MonkeyPatch.context() as patched:
            failing = Failing(patched, number, at, stays)
            try:
                WAYS[mode](manager)
            except SaveError as error:
                return failing.count, str(error)
        events = manager.reporter.named("checkpoint_failed")
        return failing.count, events[0].fields["error"] if events else ""

    total, problem = attempt(tmp_path / "whole", -1)
    assert total > 15 and not problem
    failures = 0
    for at in range(total):
        folder = tmp_path / str(at)
        _, problem = attempt(folder, at)
        failures += bool(problem)
        assert not problem or (os.strerror(number) in problem and "\n" not in problem)
        step = loads(folder)
        assert step == NEW or problem, "a save that was not made was reported"
    assert failures > total // 3


def test_after_a_failed_save_the_next_one_succeeds(tmp_path, monkeypatch):
    manager = ready(tmp_path)
    with monkeypatch.context() as patched:
        Failing(patched, errno.ENOSPC, 3, stays=True)
        save_beside(manager)
    assert [event.step for event in manager.reporter.named("checkpoint_failed")] == [NEW]
    manager.reporter = Recorder()
    save_beside(manager)
    assert loads(tmp_path) == NEW


@pytest.mark.process
def test_the_kernels_own_refusal_in_the_middle_of_a_file(tmp_path):
    """A file-size limit stops a real write after part of it."""
    import resource
    import signal

    manager = ready(tmp_path)
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        try:
            save_now(manager)
        except SaveError as error:
            os._exit(7 if "rank-00000.safetensors: File too large" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert loads(tmp_path) == OLD


@pytest.mark.process
def test_a_file_system_that_is_full_and_one_that_is_read_only(tmp_path):
    """The kernel's own: a memory file system with room for one save."""
    read_only = 1

    def test() -> None:
        mount_memory(tmp_path, "64k")
        manager = ready(tmp_path / "run", keep_last=2)
        for save in (save_beside, save_now):
            with contextlib.suppress(SaveError):
                save(manager)
                assert (
                    "No space left on device"
                    in manager.reporter.named("checkpoint_failed")[0].fields["error"]
                )
            assert [step for step, _ in committed(tmp_path / "run")] == [OLD]
        mount_memory(tmp_path, "256k", REMOUNT)
        save_beside(manager)
        assert loads(tmp_path / "run") == NEW
        _, manager, _ = resume(tmp_path / "run", epoch=3)
        mount_memory(tmp_path, "256k", REMOUNT | read_only)
        with pytest.raises(SaveError, match="Read-only file system"):
            manager.save(state(3), 3, 30)

    with_private_mounts(test)


@pytest.mark.parametrize("stopping", [False, True])
def test_a_stopping_run_forgets_the_copy_that_waits_for_its_turn(tmp_path, stopping):
    """The save before it may end at the boundary at which the run learns that it stops."""
    manager = ready(tmp_path)
    background = manager._background = BackgroundSave(manager.target, 2, snapshots=2)
    for step in (NEW, NEW + 1):
        assert background.has_room
        manager.start(state(step), step, 10 * step)
    assert not background.has_room and len(background.waiting) == 1
    while future := background._writing or background._committing:
        future.exception()
        manager.advance(1, stopping)
    assert manager.saved_step == (NEW if stopping else NEW + 1)
    assert not background.waiting and loads(tmp_path) == manager.saved_step


# ----------------------------------------------------------------------------------------------
#     several ranks


def die_among_two(rank: int, folder: Path, victim: int, at: int) -> int:
    manager = opened(folder, epoch=1, rank=rank)
    pieces = halves(rank, NEW)

    def follow() -> None:
        manager.start(pieces, NEW, 10 * NEW)
        while manager._background.in_progress is not None:
            for future in filter(
                None, (manager._background._writing, manager._background._committing)
            ):
                future.exception()
            manager.advance(WORLD.sum_ints([manager.vote])[0])

    return lines(follow, at if rank == victim else -1)


def halves(rank: int, seed: int) -> list[StatePiece]:
    """The flat share of `state(seed)` that one of two ranks holds."""
    cut = [(piece, piece.data.numel() // 2) for piece in state(seed)]
    return [
        StatePiece(piece.kind, piece.info, rank * half, piece.data[rank * half : (rank + 1) * half])
        for piece, half in cut
    ]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["the one that commits", "another"])
def test_a_rank_that_dies_at_any_moment_of_a_save_of_two(tmp_path, victim):
    ready(tmp_path / "whole")
    total = run_ranks(die_among_two, 2, tmp_path / "whole", victim, -1)[victim]
    steps = []
    for number in range(12):
        folder = tmp_path / str(number)
        ready(folder)
        with pytest.raises(RankError):
            run_ranks(die_among_two, 2, folder, victim, number * total // 12)
        steps.append(loads(folder))
    assert (
        total > 50
        and set(steps) <= {OLD, NEW}
        and steps[0] == OLD
        and loads(tmp_path / "whole") == NEW
    )
