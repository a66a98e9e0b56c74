"""Saving: every rank writes one file, rank 0 commits with a rename, and nothing half-written ever has a step's name.

Order (reliability.md 3.4): fence -> files (fsync) -> manifest (fsync) -> folder (fsync) -> fence again, under the lock
-> rename -> parent (fsync) -> prune. A crash at any point leaves the previous checkpoints as they were.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from orchestrator.plan import Exit, Plan
from trainer import messages
from trainer.durable import sync_folder, write_atomic
from trainer.errors import CheckpointError, Fenced, SaveError, TrainerError

from . import fence
from .fence import Fence
from .files import DTYPES, locked, write_tensors
from .format import (
    MANIFEST,
    STEP,
    FileRecord,
    Layout,
    Manifest,
    Piece,
    Slice,
    block,
    coverage_problem,
    encode,
    rank_file,
    step_name,
)

RNG_KEY = "rng/cpu"

#: What rank 0's error is on the other ranks, by its exit code.
_ERRORS: dict[int, type[TrainerError]] = {Exit.FENCED: Fenced, Exit.CONFIG: CheckpointError}


class _Answer(Struct):
    """One rank's outcome of its part of a save."""

    record: FileRecord | None
    shapes: dict[str, list[int]] = {}
    error: str = ""


class _Verdict(Struct):
    """Rank 0's word to all: the committed folder's bytes, or why there is none."""

    bytes: int = 0
    error: str = ""
    exit: int = 0


def layout_of(plan: Plan) -> Layout:
    return Layout(**{axis: getattr(plan.parallel, axis) for axis in Layout.__struct_fields__})


def save(
    folder: Path,
    plan: Plan,
    token: Fence,
    rank: int,
    pieces: Iterable[Piece],
    *,
    step: int,
    samples: int,
    scalars: Mapping[str, float] = {},
    data: str = "",
    keep_last: int,
    protected: int | None = None,
) -> int:
    """Write and commit the checkpoint of `step`; bytes of all its files. Every rank must call it.

    `pieces` is what this rank alone is to write (owners of a slice, one data-parallel replica). `protected` is the
    newest older step that was verified: pruning spares it whatever `keep_last` says. Raises the same error on every
    rank: SaveError if any rank could not write, Fenced if a newer epoch owns the folder.
    """
    place = folder / f".tmp-{step_name(step)}.e{token.epoch}"
    _agree(rank, lambda: _open(folder, place, token))
    answer = _write(place, rank, pieces)
    answers = [msgspec.json.decode(raw, type=_Answer) for raw in messages.gather_bytes(msgspec.json.encode(answer))]

    def commit() -> int:
        failed = [f"rank {index}: {answer.error}" for index, answer in enumerate(answers) if answer.error]
        if failed:
            raise SaveError(f"checkpoint of step {step}: {failed[0]}")
        manifest = Manifest(
            run_id=token.run_id,
            epoch=token.epoch,
            plan_hash=plan.hash,
            layout=layout_of(plan),
            step=step,
            samples=samples,
            created=time.time(),
            scalars=dict(scalars),
            data=data,
            parameters={name: shape for answer in answers for name, shape in answer.shapes.items()},
            files=[answer.record for answer in answers if answer.record is not None],
        )
        problem = coverage_problem(manifest)
        if problem:
            raise SaveError(f"checkpoint of step {step} would be useless: {problem}")
        _commit(folder, place, token, manifest)
        prune(folder, keep_last, protected)
        return sum(record.bytes for record in manifest.files)

    try:
        return _agree(rank, commit)
    except TrainerError:
        if rank == 0:
            shutil.rmtree(place, ignore_errors=True)
        raise


def _open(folder: Path, place: Path, token: Fence) -> int:
    fence.check(folder, token)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    return 0


def _write(place: Path, rank: int, pieces: Iterable[Piece]) -> _Answer:
    tensors: dict[str, Tensor] = {RNG_KEY: torch.get_rng_state()}
    slices, shapes, dtypes = [], {}, {}
    for piece in pieces:
        stored = piece.unpadded()
        if stored is None or not stored.data.numel():
            continue
        dim, start, stop = block(stored.info)
        part = "" if dim is None else f"[{dim}:{start}:{stop}]"
        key = f"{stored.kind}/{stored.info.name}{part}@{stored.offset}"
        tensors[key] = stored.data
        dtypes[stored.kind] = DTYPES[stored.data.dtype]
        shapes[stored.info.name] = list(stored.info.global_shape)
        slices.append(Slice(key, stored.info.name, stored.kind, dim, start, stop, stored.offset, stored.data.numel()))
    try:
        size, digest = write_tensors(place / rank_file(rank), tensors)
    except OSError as error:
        return _Answer(record=None, error=f"{rank_file(rank)}: {error.strerror or error}")
    return _Answer(record=FileRecord(rank_file(rank), size, digest, dtypes, slices), shapes=shapes)


def _commit(folder: Path, place: Path, token: Fence, manifest: Manifest) -> None:
    write_atomic(place / MANIFEST, encode(manifest))  # also makes the names of the ranks' files durable
    with locked(folder):
        fence.check(folder, token)
        final = folder / step_name(manifest.step)
        if final.exists():  # an earlier epoch got here, was found bad, and this one has come again
            discard(final)
        place.rename(final)
    sync_folder(folder)


def committed(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint, newest first. Committed means renamed, not verified."""
    with contextlib.suppress(FileNotFoundError):
        found = ((STEP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
        return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)
    return []


def prune(folder: Path, keep_last: int, protected: int | None = None) -> list[int]:
    """Delete all but the newest `keep_last` checkpoints (at least one) and `protected`; the steps deleted."""
    old = [(step, path) for step, path in committed(folder)[max(keep_last, 1) :] if step != protected]
    for _, path in old:
        discard(path)
    return [step for step, _ in old]


def discard(path: Path) -> None:
    """Delete a committed folder such that a crash half-way leaves no folder that looks committed."""
    trash = path.with_name(f".trash-{path.name}-{time.time_ns()}")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def set_aside(path: Path, token: Fence) -> None:
    """Give a checkpoint that did not verify a name that is no step's: kept for whoever looks into it, never counted."""
    with contextlib.suppress(OSError):
        path.rename(path.with_name(f"{path.name}.rejected-e{token.epoch}"))


def _agree(rank: int, action: Callable[[], int]) -> int:
    """Run `action` on rank 0; its result, or its error raised anew, on every rank."""
    verdict = _Verdict()
    if rank == 0:
        try:
            verdict = _Verdict(bytes=action())
        except TrainerError as error:
            verdict = _Verdict(error=str(error), exit=error.exit)
        except OSError as error:
            verdict = _Verdict(error=f"{error.filename or 'checkpoint'}: {error.strerror or error}", exit=Exit.USER)
    verdict = msgspec.json.decode(messages.broadcast_bytes(msgspec.json.encode(verdict)), type=_Verdict)
    if verdict.error:
        raise _ERRORS.get(verdict.exit, SaveError)(verdict.error)
    return verdict.bytes


def claim(folder: Path, token: Fence, rank: int) -> None:
    """Rank 0 claims the folder for this epoch; every rank must call it and raises what rank 0 met."""
    _agree(rank, lambda: fence.claim(folder, token) or 0)
