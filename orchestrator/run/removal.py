"""Removes ended runs: their folders, with all that is in them. Files elsewhere
(`checkpoint.dir`) stay, and so does a run in whose folder another run saves."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .folder import RunFolder
from .request import read_request

#: The prefix of a folder's name from the moment at which it is not a run any more.
_REMOVED_PREFIX = ".removed-"
_AGES = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_SIZES = {
    "": 1,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}


def seconds(age: str) -> float:
    """Parses an age: `90m`, `12h`, `30d` or `4w`. OrchError (64) for anything else."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", age)
    if not match:
        raise OrchError(f"{age!r} is not an age: a number and m, h, d or w, as in 30d", Exit.USAGE)
    return int(match[1]) * _AGES[match[2]]


def byte_count(size: str) -> int:
    """Parses a size: `500M`, `20G` or a number of bytes. OrchError (64) for anything else."""
    match = re.fullmatch(r"(\d{1,15})([KMGT]?)(?:i?B)?", size)
    if not match:
        rule = "a number and K, M, G or T, as in 20G"
        raise OrchError(f"{size!r} is not a size: {rule}", Exit.USAGE)
    return int(match[1]) * _SIZES[match[2]]


def size_of(folder: RunFolder) -> int:
    """Returns the bytes on disk of all that is in a run's folder."""
    total = 0
    for parent, _, files in os.walk(folder.path.resolve()):
        for name in files:
            with contextlib.suppress(OSError):  # removed in the meantime
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


class _Checkpoint(msgspec.Struct):
    dir: str


class _Job(msgspec.Struct):
    checkpoint: _Checkpoint


class _Plan(msgspec.Struct):
    """The part of a plan that says where its run saves."""

    job: _Job


def runs_that_save_in(folders: Iterable[RunFolder]) -> dict[str, list[str]]:
    """Lists by the id of a run the other runs that save in its folder (`checkpoint.dir`). Runs that
    cannot be read are left out."""
    owners: dict[Path, str] = {}
    savers: list[tuple[str, Path]] = []
    for folder in folders:
        with contextlib.suppress(OSError, OrchError, msgspec.MsgspecError):
            owners[Path(os.path.realpath(read_request(folder).run_dir))] = folder.run_id
            plan = msgspec.json.decode(folder.plan.read_bytes(), type=_Plan)
            if plan.job.checkpoint.dir:
                savers.append((folder.run_id, Path(os.path.realpath(plan.job.checkpoint.dir))))
    guests: dict[str, list[str]] = {}
    for run_id, place in savers:
        for parent in (place, *place.parents):
            owner = owners.get(parent, run_id)
            if owner != run_id:
                guests.setdefault(owner, []).append(run_id)
    return guests


def remove(folder: RunFolder) -> None:
    """Removes a run that the caller knows to have ended. It disappears from every list at once, and
    its files after that.

    OrchError: 64 while a process of it runs on this machine, 65 if its folder cannot be removed.
    """
    real = folder.path.resolve()
    doomed = real.with_name(f"{_REMOVED_PREFIX}{real.name}-{secrets.token_hex(4)}")
    lock = folder.take_lock(wait_s=0.0)
    if lock is None:
        raise OrchError(f"run {folder.run_id} is running", Exit.USAGE)
    try:
        real.rename(doomed)  # from here on nobody can resume it
        if folder.path.is_symlink():
            folder.path.unlink()
        shutil.rmtree(doomed)
    except OSError as error:
        raise OrchError(f"run {folder.run_id} cannot be removed: {error}", Exit.CONFIG) from None
    finally:
        os.close(lock)


def clear_up(runs: Path) -> None:
    """Removes what interrupted removals have left."""
    for leftover in runs.glob(f"{_REMOVED_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)
