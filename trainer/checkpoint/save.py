"""Saving: every rank writes one file, rank 0 commits with a rename, and nothing half-written ever has a step's name.

Order (reliability.md 3.4): fence -> files (fsync, read back) -> manifest (fsync) -> folder (fsync) -> fence again,
under the lock -> rename -> parent (fsync) -> prune. A crash at any point leaves the previous checkpoints as they were.

The functions here that are not collective touch files only, so a thread may call them (`background`).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from orchestrator.plan import Exit, Plan
from trainer.comm import messages
from trainer.durable import sync_folder, write_atomic
from trainer.errors import CheckpointError, Fenced, SaveError, TrainerError

from . import fence
from .fence import Fence
from .files import DTYPES, locked, sha256_from_disk, write_tensors
from .format import (
    MANIFEST,
    RNG_KEY,
    FileRecord,
    Layout,
    Manifest,
    Piece,
    Slice,
    block,
    coverage_problem,
    decode,
    encode,
    rank_file,
    step_name,
)
from .retention import discard, prune

#: What rank 0's error is on the other ranks, by its exit code.
_ERRORS: dict[int, type[TrainerError]] = {Exit.FENCED: Fenced, Exit.CONFIG: CheckpointError}


@dataclass(frozen=True)
class Target:
    """Where checkpoints go and who writes them there."""

    folder: Path
    token: Fence
    plan: Plan
    rank: int
    data: str = ""  # key of the token files

    def place(self, step: int) -> Path:
        """The folder of a save under way."""
        return self.folder / f".tmp-{step_name(step)}.e{self.token.epoch}"


@dataclass(frozen=True)
class Contents:
    """What one rank puts into the checkpoint of `step`. `read_back`: files are read from the disk and compared before
    the save counts as good; only one that was may take the place of an older one that was."""

    step: int
    samples: int
    pieces: Sequence[Piece]
    scalars: dict[str, float] = field(default_factory=dict)
    random_state: Tensor = field(default_factory=torch.get_rng_state)
    read_back: bool = True


class Answer(Struct):
    """One rank's outcome of its part of a save."""

    record: FileRecord | None
    shapes: dict[str, list[int]] = {}
    error: str = ""


class Verdict(Struct):
    """Rank 0's word to all: the committed folder's bytes, or why there is none."""

    bytes: int = 0
    error: str = ""
    exit: int = 0

    def result(self) -> int:
        """The bytes. Raises what rank 0 met."""
        if self.error:
            raise _ERRORS.get(self.exit, SaveError)(self.error)
        return self.bytes


def layout_of(plan: Plan) -> Layout:
    return Layout(**{axis: getattr(plan.parallel, axis) for axis in Layout.__struct_fields__})


# ---------------------------------------------------------------------------------------------- collective


def save(target: Target, contents: Contents, keep_last: int, protected: int | None = None) -> int:
    """Write and commit a checkpoint; bytes of all its files. Every rank must call it.

    The pieces are what this rank alone is to write (owners of a slice, one data-parallel replica). `protected` is the
    newest older step that is known to be good: pruning spares it whatever `keep_last` says. Raises the same error on
    every rank: SaveError if any rank could not write, Fenced if a newer epoch owns the folder.
    """
    begin(target, contents.step)
    answers = gather(write(target.place(contents.step), target.rank, contents))
    return agree(target.rank, lambda: commit(target, contents, answers, keep_last, protected))


def begin(target: Target, step: int) -> None:
    """Make the folder of a save under way. Raises Fenced, SaveError."""

    def make() -> int:
        fence.check(target.folder, target.token)
        place = target.place(step)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(mode=0o700)
        return 0

    agree(target.rank, make)


def gather(mine: Answer) -> list[Answer]:
    """Every rank's answer on rank 0, nothing on the others."""
    return [msgspec.json.decode(raw, type=Answer) for raw in messages.gather_bytes(msgspec.json.encode(mine))]


def agree(rank: int, action: Callable[[], int]) -> int:
    """Run `action` on rank 0; its result, or its error raised anew, on every rank."""
    return tell(verdict_of(action) if rank == 0 else Verdict())


def tell(verdict: Verdict) -> int:
    """Rank 0's verdict as a result, or as its error, on every rank."""
    raw = messages.broadcast_bytes(msgspec.json.encode(verdict))
    return msgspec.json.decode(raw, type=Verdict).result()


def claim(folder: Path, token: Fence, rank: int) -> None:
    """Rank 0 claims the folder for this epoch; every rank must call it and raises what rank 0 met."""
    agree(rank, lambda: fence.claim(folder, token) or 0)


# ---------------------------------------------------------------------------------------------- one rank's part


def write(place: Path, rank: int, contents: Contents) -> Answer:
    """This rank's file in the folder `place`, durable when this returns; and read back, if the contents say so."""
    tensors: dict[str, Tensor] = {RNG_KEY: contents.random_state}
    slices, shapes, dtypes = [], {}, {}
    for piece in contents.pieces:
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
    name = rank_file(rank)
    path = place / name
    try:
        size, digest = write_tensors(path, tensors)
        if contents.read_back and sha256_from_disk(path) != digest:
            return Answer(record=None, error=f"{name}: does not read back as it was written")
    except OSError as error:
        return Answer(record=None, error=f"{name}: {error.strerror or error}")
    return Answer(record=FileRecord(name, size, digest, dtypes, slices), shapes=shapes)


# ---------------------------------------------------------------------------------------------- rank 0's part


def verdict_of(action: Callable[[], int]) -> Verdict:
    """What `action` returned or what it met."""
    try:
        return Verdict(bytes=action())
    except TrainerError as error:
        return Verdict(error=str(error), exit=error.exit)
    except OSError as error:
        return Verdict(error=f"{error.filename or 'checkpoint'}: {error.strerror or error}", exit=Exit.USER)


def commit(
    target: Target, contents: Contents, answers: Iterable[Answer], keep_last: int, protected: int | None = None
) -> int:
    """Make the files that the ranks have written a checkpoint; bytes of all of them. Raises SaveError, Fenced."""
    answers = list(answers)
    problem = next((f"rank {rank}: {answer.error}" for rank, answer in enumerate(answers) if answer.error), "")
    manifest = manifest_of(target, contents, answers)
    return publish(target, manifest, problem, keep_last, contents.read_back, protected)


def publish(
    target: Target, manifest: Manifest, problem: str, keep_last: int, read_back: bool, protected: int | None = None
) -> int:
    """Give the files that lie in the manifest's place its step's name, unless there was a `problem` or they do not hold
    every element once; bytes of all of them. Raises SaveError, Fenced; then the place is gone."""
    place, step = target.place(manifest.step), manifest.step
    try:
        if problem:
            raise SaveError(f"checkpoint of step {step}: {problem}")
        if problem := coverage_problem(manifest):
            raise SaveError(f"checkpoint of step {step} would be useless: {problem}")
        _rename(target, place, manifest, read_back)
    except (TrainerError, OSError):
        shutil.rmtree(place, ignore_errors=True)
        fence.check(target.folder, target.token)  # a new owner that swept up meanwhile is the better explanation
        raise
    prune(target.folder, keep_last, step if read_back else protected)
    return sum(record.bytes for record in manifest.files)


def manifest_of(target: Target, contents: Contents, answers: Sequence[Answer]) -> Manifest:
    """What the files that all ranks have written are."""
    return Manifest(
        run_id=target.token.run_id,
        epoch=target.token.epoch,
        plan_hash=target.plan.hash,
        layout=layout_of(target.plan),
        step=contents.step,
        samples=contents.samples,
        created=time.time(),
        scalars=contents.scalars,
        data=target.data,
        parameters={name: shape for answer in answers for name, shape in answer.shapes.items()},
        files=[answer.record for answer in answers if answer.record is not None],
    )


def _rename(target: Target, place: Path, manifest: Manifest, read_back: bool) -> None:
    write_atomic(place / MANIFEST, encode(manifest))  # also makes the names of the ranks' files durable
    if read_back:
        try:
            decode((place / MANIFEST).read_bytes())
        except CheckpointError as error:
            raise SaveError(f"{MANIFEST}: does not read back as it was written ({error})") from None
    with locked(target.folder):
        fence.check(target.folder, target.token)
        final = target.folder / step_name(manifest.step)
        if final.exists():  # an earlier epoch got here, was found bad, and this one has come again
            discard(final)
        place.rename(final)
    sync_folder(target.folder)
