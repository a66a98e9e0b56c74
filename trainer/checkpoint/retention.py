"""Which committed checkpoints there are, and which may go."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from trainer.durable import sync_folder

from .fence import Fence
from .format import STEP


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint, newest first. Committed means renamed, not verified."""
    with contextlib.suppress(FileNotFoundError):
        while True:
            named = [(int(match[1]), path) for path in folder.iterdir() if (match := STEP.fullmatch(path.name))]
            found = sorted(((step, path) for step, path in named if path.is_dir()), reverse=True)
            if found or all(path.exists() for _, path in named):
                return found  # else all have gone since they were listed: for newer ones, which are looked for
    return []


def prune(folder: Path, keep_last: int, protected: int | None = None) -> list[int]:
    """Delete all but the newest `keep_last` checkpoints (at least one) and the step `protected`; the steps that go.

    `protected` is the newest that is known to read back as it was written: it goes only when a newer one is.
    """
    old = [(step, path) for step, path in committed(folder)[max(keep_last, 1) :] if step != protected]
    for _, path in old:
        with contextlib.suppress(OSError):  # what cannot be deleted now is old next time too
            discard(path)
    return [step for step, _ in old]


def discard(path: Path) -> None:
    """Delete a committed folder such that a crash half-way leaves no folder that looks committed."""
    trash = path.with_name(f".trash-{path.name}-{time.time_ns()}")
    path.rename(trash)
    sync_folder(path.parent)  # the new name first: a power cut must not find the old one with half its files
    shutil.rmtree(trash, ignore_errors=True)


def set_aside(path: Path, token: Fence) -> None:
    """Give a checkpoint that did not verify a name that is no step's: kept for whoever looks into it, never counted."""
    with contextlib.suppress(OSError):
        path.rename(path.with_name(f"{path.name}.rejected-e{token.epoch}"))
