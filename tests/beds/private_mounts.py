"""Real file systems for one test, mounted in a namespace that ends with the test's process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

NEW_MOUNTS = 0x20000  # CLONE_NEWNS
PRIVATE = 0x44000  # MS_REC | MS_PRIVATE
REMOUNT = 32
NOT_ALLOWED = 77
THROTTLES = Path("/sys/fs/cgroup/blkio")


def with_private_mounts(test: Callable[[], None]) -> None:
    """Runs a test in a child with mounts of its own; skips it without the right to mount."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = NOT_ALLOWED if _leave_mounts() else 0
            if not code:
                test()
        except BaseException:
            code = 1
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == NOT_ALLOWED:
        pytest.skip("needs the right to mount")
    assert code == 0


def _leave_mounts() -> int:
    """Leaves the mounts of other processes. Returns 0 if it may."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(NEW_MOUNTS) or libc.mount(None, b"/", None, PRIVATE, None)


def mount_memory(folder: Path, size: str, flags: int = 0) -> None:
    """Mounts a file system in memory; with REMOUNT in `flags`, changes one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, f"size={size}".encode()):
        raise OSError(ctypes.get_errno(), f"tmpfs on {folder}")


def mount_image(image: Path, folder: Path, mib: int) -> str:
    """Mounts a new ext4 on a loop device over the file `image`. Returns its number, MAJOR:MINOR.
    The device goes when the mount does."""
    with image.open("wb") as file:
        file.truncate(mib << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    number = folder.stat().st_dev
    return f"{os.major(number)}:{os.minor(number)}"


@contextlib.contextmanager
def stuck(device: str, *pids: int) -> Iterator[None]:
    """The device moves one byte per second for these processes."""
    group = THROTTLES / f"orch-test-{os.getpid()}"
    group.mkdir()
    limits = [group / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        for limit in limits:
            limit.write_text(f"{device} 1")
        yield
    finally:
        for limit in limits:
            limit.write_text(f"{device} 0")
        _remove(group)


def _remove(group: Path) -> None:
    """Removes a control group; its processes, if they live, return to the one above."""
    deadline = time.monotonic() + PATIENCE_S
    while group.exists():
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                (THROTTLES / "cgroup.procs").write_text(pid)
        try:
            group.rmdir()
        except OSError:  # a thread waits for the end of its request
            assert time.monotonic() < deadline, f"{group} is still in use"
            time.sleep(0.01)
