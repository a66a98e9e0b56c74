"""A node's replicas: files in its memory (tmpfs), which outlive workers and epochs but not the
node.

    /dev/shm/orch-<uid>/<run id>/<node>/step-00000120.e3/    0700; manifest.json and some of its
    files

A folder that belongs to another user or is open to others is refused. The next run of the same user
on this node deletes the folders of runs that ended long ago.
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
        """Creates `folder` (`orchestrator.plan.worker.replica_dir`). Raises OSError if that fails
        or the folder is not private."""
        self.folder = folder
        self._hold()
        _sweep(folder.parent.parent, keep=folder.parent)

    def renew(self) -> bool:
        """Creates and locks the folder again if it was deleted (logind's RemoveIPC does that when
        the user logs out). Returns whether it was. Raises OSError as the constructor does."""
        if os.fstat(self._lock.fileno()).st_nlink:
            return False
        self._hold()
        return True

    def _hold(self) -> None:
        folder = self.folder
        home = self.folder.parent.parent
        home.mkdir(mode=0o700, exist_ok=True)
        status = home.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o077
        ):
            raise PermissionError(1, "not a private folder of this user", str(home))
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (folder / ".lock").open("a")
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        os.utime(folder / ".lock")

    def replicas(self) -> Iterator[Path]:
        """Yields the folders of replicas, complete or not."""
        with contextlib.suppress(FileNotFoundError):  # deleted: see `renew`
            yield from [path for path in self.folder.iterdir() if REPLICA.fullmatch(path.name)]

    def remove(self) -> None:
        """Frees the memory: the run has ended, or its state is on disk. Of other nodes on this
        machine it frees only those without a process, which the run has lost."""
        shutil.rmtree(self.folder, ignore_errors=True)
        # Another node on this machine may do the same at the same time.
        with contextlib.suppress(FileNotFoundError):
            for lock in self.folder.parent.glob("*/.lock"):
                with contextlib.suppress(OSError):
                    if not _is_held(lock):
                        shutil.rmtree(lock.parent, ignore_errors=True)
        with contextlib.suppress(OSError):  # another node on this machine may still be in use
            self.folder.parent.rmdir()


def _sweep(home: Path, keep: Path) -> None:
    """Deletes the folders of runs that have held no lock for `DEAD_AFTER_S`."""
    for run in home.iterdir():
        if run == keep:
            continue
        with contextlib.suppress(OSError):
            locks = list(run.glob("*/.lock"))
            unused_s = time.time() - run.stat().st_mtime
            if all(_is_dead(lock) for lock in locks) and unused_s > DEAD_AFTER_S:
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
