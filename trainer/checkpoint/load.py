"""Chooses the newest checkpoint whose every byte is as written; reports each newer one that fails
verification.

Ranks share the work: rank r hashes files r, r + world, ... and all ranks learn of any problem, so
all choose the same folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from orchestrator.plan.worker import MANIFEST, committed
from trainer.comm.control import WORLD, ControlPath
from trainer.errors import CheckpointError

from .files import sha256
from .format import FileRecord, Manifest, decode, step_name


@dataclass(frozen=True)
class VerifiedCheckpoint:
    """A checkpoint whose files have all been verified."""

    path: Path
    manifest: Manifest

    @property
    def version(self) -> tuple[int, int]:
        """(epoch, step): of two checkpoints of a run, the one with the greater version is newer."""
        return self.manifest.epoch, self.manifest.step


def newest(
    folder: Path,
    rank: int,
    on_reject: Callable[[Path, str], None] = lambda path, problem: None,
    control: ControlPath = WORLD,
) -> VerifiedCheckpoint | None:
    """Returns the newest committed checkpoint that verifies, or None if there has never been one.
    Every rank must call it.

    `on_reject(path, problem)` is called on every rank for each newer checkpoint that does not
    verify. Raises CheckpointError if there are checkpoints and none of them verifies: starting over
    silently would throw the run away.
    """
    names = [path.name for _, path in committed(folder)] if rank == 0 else []
    names = msgspec.json.decode(control.broadcast_bytes(msgspec.json.encode(names)), type=list[str])
    rejected = []
    for name in names:
        path = folder / name
        manifest, problem = _verify(path, rank, control)
        if manifest is not None and problem is None:
            return VerifiedCheckpoint(path, manifest)
        rejected.append(f"{name}: {problem}")
        on_reject(path, problem or "")
    if rejected:
        raise CheckpointError(f"no checkpoint in {folder} can be trusted ({'; '.join(rejected)})")
    return None


def newest_committed(
    folder: Path,
    rank: int,
    control: ControlPath = WORLD,
) -> tuple[int, int]:
    """Returns (epoch, step) of the newest checkpoint whose manifest is readable and names the same
    step as the folder, or (-1, -1). It does not verify the files. Every rank must call it."""
    version = (-1, -1)
    for _, path in committed(folder) if rank == 0 else []:
        try:
            manifest = decode((path / MANIFEST).read_bytes())
        except (OSError, CheckpointError):
            continue
        if path.name != step_name(manifest.step):
            continue
        version = manifest.epoch, manifest.step
        break
    return msgspec.json.decode(
        control.broadcast_bytes(msgspec.json.encode(version)),
        type=tuple[int, int],
    )


def at_step(folder: Path, step: int, rank: int) -> VerifiedCheckpoint:
    """Returns the verified checkpoint of one step. Every rank must call it. Raises CheckpointError
    if it is missing or damaged."""
    path = folder / step_name(step)
    manifest, problem = _verify(path, rank, WORLD)
    if manifest is None or problem is not None:
        raise CheckpointError(f"{path}: {problem}")
    return VerifiedCheckpoint(path, manifest)


def _verify(
    path: Path,
    rank: int,
    control: ControlPath,
) -> tuple[Manifest | None, str | None]:
    raw = b""
    if rank == 0:
        try:
            raw = (path / MANIFEST).read_bytes()
        except OSError as error:
            raw = f"!{MANIFEST}: {error.strerror}".encode()
    raw = control.broadcast_bytes(raw)
    if raw.startswith(b"!"):
        return None, raw[1:].decode()
    try:
        manifest = decode(raw)
    except CheckpointError as error:
        return None, f"{MANIFEST}: {error}"
    if path.name != step_name(manifest.step):
        return None, f"it holds step {manifest.step}: copied or renamed"
    own_files = manifest.files[rank :: control.world_size]
    problems = "; ".join(filter(None, (check_file(path, record) for record in own_files)))
    return manifest, control.judge(problems.encode(), _joined) or None


def _joined(problems: list[bytes]) -> str:
    return "; ".join(problem.decode() for problem in problems if problem)


def check_file(path: Path, record: FileRecord) -> str | None:
    """Names what is wrong with one file of a checkpoint; returns None if it is as written."""
    file = path / record.file
    if Path(record.file).name != record.file:
        return f"{record.file!r} is not a plain file name"
    try:
        size = file.stat().st_size
        if size != record.bytes:
            return f"{record.file} has {size} bytes, the manifest says {record.bytes}"
        if sha256(file) != record.sha256:
            return (
                f"{record.file} does not have the sha256 in the manifest: its content has changed"
            )
    except OSError as error:
        return f"{record.file}: {error.strerror}"
    return None
