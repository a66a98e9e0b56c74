"""Removes ended runs: their folders, with all that is in them. What lies elsewhere
(`checkpoint.dir`) stays."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .folder import RunFolder

_GOING = (
    ".removed-"  # the beginning of a folder's name from the moment at which it is no run any more
)
_AGES = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def seconds(age: str) -> float:
    """`90m`, `12h`, `30d` or `4w`. OrchError (64) for anything else."""
    found = re.fullmatch(r"(\d{1,6})([mhdw])", age)
    if not found:
        raise OrchError(f"{age!r} is no age: a number and m, h, d or w, as in 30d", Exit.USAGE)
    return int(found[1]) * _AGES[found[2]]


def byte_count(size: str) -> int:
    """`500M`, `20G` or a number of bytes. OrchError (64) for anything else."""
    found = re.fullmatch(r"(\d{1,15})([KMGT]?)(?:i?B)?", size)
    if not found:
        raise OrchError(f"{size!r} is no size: a number and K, M, G or T, as in 20G", Exit.USAGE)
    return int(found[1]) * _SIZES[found[2]]


def size_of(folder: RunFolder) -> int:
    """Bytes on disk of all that is in a run's folder."""
    total = 0
    for where, _, files in os.walk(folder.path.resolve()):
        for name in files:
            with contextlib.suppress(OSError):  # gone by now
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
    return total


def remove(folder: RunFolder) -> None:
    """Removes a run that the caller knows to have ended. It is gone from every list at once, and
    its files after that.

    OrchError: 64 while a process of it lives on this machine, 65 where its folder cannot be
    removed.
    """
    real = folder.path.resolve()
    going = real.with_name(f"{_GOING}{real.name}-{secrets.token_hex(4)}")
    lock = folder.take_lock(wait_s=0.0)
    if lock is None:
        raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
    try:
        real.rename(going)  # nobody resumes it from here on
        if folder.path.is_symlink():
            folder.path.unlink()
        shutil.rmtree(going)
    except OSError as error:
        raise OrchError(f"run {folder.run_id} cannot be removed: {error}", Exit.CONFIG) from None
    finally:
        os.close(lock)


def clear_up(runs: Path) -> None:
    """Removes what removals that broke off have left."""
    for left in runs.glob(f"{_GOING}*"):
        shutil.rmtree(left, ignore_errors=True)
