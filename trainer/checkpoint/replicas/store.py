"""A node's replicas: files in its memory (tmpfs), which outlive workers and epochs but not the
node.

    /dev/shm/orch-<uid>/<run id>/<node>/step-00000120.e3/    0700; manifest.json and some of its
    files

A folder that belongs to another user or is open to others is refused. The next run of the same user
on this node deletes what long-dead runs have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

REPLICA = re.compile(r"step-(\d{8})\.e(\d+)")
#: A run without processes for this long is dead, not between two epochs.
DEAD_AFTER_S = 3600.0


def replica_name(step: int, epoch: int) -> str:
    return f"step-{step:08d}.e{epoch}"


class ReplicaStore:
    """One node's folder for one run, held (shared lock) by the run's workers on this node while
    they live."""

    def __init__(self, folder: Path):
        """`folder`: `orchestrator.plan.worker.replica_dir`. Raises OSError when it cannot be made
        or is not private."""
        self.folder = folder
        self._hold()
        _sweep(folder.parent.parent, keep=folder.parent)

    def renew(self) -> bool:
        """Make and hold the folder anew if somebody has deleted it (logind's RemoveIPC does when
        its user logs out); whether that was so. Raises OSError as the constructor."""
        if os.fstat(self._lock.fileno()).st_nlink:
            return False
        self._hold()
        return True

    def _hold(self) -> None:
        folder = self.folder
        home = self.folder.parent.parent
        home.mkdir(mode=0o700, exist_ok=True)
        found = home.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(1, "not a private folder of this user", str(home))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (folder / ".lock").open("a")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        os.utime(folder / ".lock")

    def replicas(self) -> Iterator[Path]:
        """Folders of replicas, complete or not."""
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted it: see `renew`
            yield from [path for path in self.folder.iterdir() if REPLICA.fullmatch(path.name)]

    def remove(self) -> None:
        """Free the memory: the run has ended, or its state is on disk. Of other nodes on this
        machine, only what no process holds: those that the run has lost."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(
            FileNotFoundError
        ):  # another node on this machine does the same at once
            for lock in self.folder.parent.glob("*/.lock"):
                with contextlib.suppress(OSError):
                    if not _is_held(lock):
                        shutil.rmtree(lock.parent, ignore_errors=True)
        with contextlib.suppress(
            OSError
        ):  # another node of a run on one machine may still be there
            self.folder.parent.rmdir()


def _sweep(home: Path, keep: Path) -> None:
    """Delete the folders of runs that have held no lock for `DEAD_AFTER_S`."""
    for run in home.iterdir():
        if run == keep:
            continue
        with contextlib.suppress(OSError):
            locks = list(run.glob("*/.lock"))
            if (
                all(_is_dead(lock) for lock in locks)
                and time.time() - run.stat().st_mtime > DEAD_AFTER_S
            ):
                shutil.rmtree(run, ignore_errors=True)


def _is_dead(lock: Path) -> bool:
    return not _is_held(lock) and time.time() - lock.stat().st_mtime > DEAD_AFTER_S


def _is_held(lock: Path) -> bool:
    """Whether a process holds the lock. Raises OSError."""
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
