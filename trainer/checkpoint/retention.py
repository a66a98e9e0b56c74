"""Deletes old checkpoints, and sets damaged ones aside."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from orchestrator.plan.worker import MANIFEST, committed
from trainer.durable import sync_folder

from .fence import Fence


def prune(folder: Path, keep_last: int, protected: int | None = None) -> list[int]:
    """Deletes all but the newest `keep_last` checkpoints (at least one) and the step `protected`;
    returns the deleted steps.

    Folders that hold another step than their name says are not counted; the next start sets them
    aside. `protected` is the newest step that has been read back as written; it is deleted only
    after a newer step has been read back.
    """
    listed = [(step, path) for step, path in committed(folder) if _holds(path, step)]
    old = [(step, path) for step, path in listed[max(keep_last, 1) :] if step != protected]
    for _, path in old:
        with contextlib.suppress(OSError):  # the next prune tries again
            discard(path)
    return [step for step, _ in old]


class _Head(Struct):
    step: int


def _holds(path: Path, step: int) -> bool:
    """Whether the manifest names this step, or cannot be read: a copy under a later name must not
    displace other checkpoints."""
    try:
        return msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Head).step == step
    except (OSError, msgspec.MsgspecError, RecursionError):
        return True


def discard(path: Path) -> None:
    """Deletes a committed folder; a crash half-way leaves no folder that looks committed."""
    trash = path.with_name(f".trash-{path.name}-{time.time_ns()}")
    path.rename(trash)
    # The new name is durable first: after a power cut the old name must not hold half its files.
    sync_folder(path.parent)
    shutil.rmtree(trash, ignore_errors=True)


def set_aside(path: Path, token: Fence) -> None:
    """Renames a checkpoint that failed verification: it is kept for inspection and no longer listed
    as committed."""
    with contextlib.suppress(OSError):
        path.rename(path.with_name(f"{path.name}.rejected-e{token.epoch}"))
