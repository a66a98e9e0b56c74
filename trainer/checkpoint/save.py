"""Saves a checkpoint: every rank writes one file into a staging folder, rank 0 commits by renaming
the folder.

Order (reliability.md 3.4): fence -> files (fsync, read back) -> manifest (fsync) -> folder (fsync)
-> fence again, under the lock -> rename -> parent (fsync) -> prune. A crash at any point leaves the
previous checkpoints as they were.

The functions here that are not collective touch files only, so a thread may call them
(`background`).
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
from orchestrator.plan.worker import MANIFEST
from trainer.comm.control import WORLD, ControlPath
from trainer.durable import sync_folder, write_atomic
from trainer.errors import CheckpointError, Fenced, SaveError, TrainerError

from . import fence
from .fence import Fence
from .files import DTYPES, locked, sha256_from_disk, write_tensors
from .format import (
    RNG_KEY,
    FileRecord,
    Layout,
    Manifest,
    Slice,
    StatePiece,
    coverage_problem,
    decode,
    dtype_key,
    encode,
    rank_file,
    step_name,
)
from .retention import discard, prune

#: Class with which every rank raises an error of rank 0, by its exit code.
_ERRORS: dict[int, type[TrainerError]] = {Exit.FENCED: Fenced, Exit.CONFIG: CheckpointError}


@dataclass(frozen=True)
class Target:
    """The folder of a run's checkpoints, and the rank and epoch that write there."""

    folder: Path
    token: Fence
    plan: Plan
    rank: int
    data: str = ""  # key of the token files
    control: ControlPath = WORLD  # over all writers

    def staging(self, step: int) -> Path:
        """Returns the staging folder of a save of `step`."""
        return self.folder / f".tmp-{step_name(step)}.e{self.token.epoch}"


@dataclass(frozen=True)
class Contents:
    """What one rank writes into the checkpoint of `step`. With `read_back` files are read from the
    disk and compared before the save counts as verified; only a verified save may replace an older
    verified one."""

    step: int
    samples: int
    pieces: Sequence[StatePiece]
    scalars: dict[str, float] = field(default_factory=dict)
    random_state: Tensor = field(default_factory=torch.get_rng_state)
    read_back: bool = True


class RankOutcome(Struct):
    """One rank's outcome of its part of a save."""

    record: FileRecord | None
    shapes: dict[str, list[int]] = {}  # of parameters
    states: dict[str, list[int]] = {}  # of state without gradient
    whole: list[str] = []  # parameters with other kinds of state than the rest
    error: str = ""


class CommitOutcome(Struct):
    """The outcome that rank 0 broadcasts after a commit: the bytes of the committed folder, or the
    error and its exit code."""

    bytes: int = 0
    error: str = ""
    exit: int = 0

    def result(self) -> int:
        """Returns the bytes, or raises rank 0's error."""
        if self.error:
            raise _ERRORS.get(self.exit, SaveError)(self.error)
        return self.bytes


def layout_of(plan: Plan) -> Layout:
    return Layout(**{axis: getattr(plan.parallel, axis) for axis in Layout.__struct_fields__})


# ----------------------------------------------------------------------------------------------
#     collective


def save(
    target: Target,
    contents: Contents,
    keep_last: int,
    protected: int | None = None,
) -> int:
    """Writes and commits a checkpoint; returns the bytes of all its files. Collective.

    The pieces are those that only this rank writes (owner of a slice, one data-parallel replica).
    `protected` is the newest older step that is verified: pruning keeps it whatever `keep_last` is.
    Raises the same error on every rank: SaveError if any rank could not write, Fenced if a newer
    epoch owns the folder.
    """
    begin(target, contents.step)
    own_outcome = write(target.staging(contents.step), target.rank, contents)
    outcomes = gather(target.control, own_outcome)
    return on_rank_zero(target, lambda: commit(target, contents, outcomes, keep_last, protected))


def begin(target: Target, step: int) -> None:
    """Creates the staging folder. Collective. Raises Fenced, SaveError."""

    def make() -> int:
        fence.hold(target.folder, target.token)
        staging = target.staging(step)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(mode=0o700)
        return 0

    on_rank_zero(target, make)


def gather(control: ControlPath, own_outcome: RankOutcome) -> list[RankOutcome]:
    """Returns every rank's outcome on rank 0, and nothing on the other ranks."""
    encoded = control.gather_bytes(msgspec.json.encode(own_outcome))
    return [msgspec.json.decode(raw, type=RankOutcome) for raw in encoded]


def on_rank_zero(target: Target, action: Callable[[], int]) -> int:
    """Runs `action` on rank 0 and returns its result, or raises its error, on every rank."""
    return broadcast_outcome(target, outcome_of(action) if target.rank == 0 else CommitOutcome())


def broadcast_outcome(target: Target, outcome: CommitOutcome) -> int:
    """Returns rank 0's bytes, or raises its error, on every rank."""
    raw = target.control.broadcast_bytes(msgspec.json.encode(outcome))
    return msgspec.json.decode(raw, type=CommitOutcome).result()


def acquire(target: Target) -> None:
    """Acquires the folder for this epoch on rank 0. Every rank raises rank 0's error.
    Collective."""

    def acquire_folder() -> int:
        fence.acquire(target.folder, target.token)
        return 0

    on_rank_zero(target, acquire_folder)


# ----------------------------------------------------------------------------------------------
#     one rank's part


def write(staging: Path, rank: int, contents: Contents) -> RankOutcome:
    """Writes this rank's file into `staging`: durable on return, and read back if
    `contents.read_back`."""
    tensors: dict[str, Tensor] = {RNG_KEY: contents.random_state}
    slices = list[Slice]()
    shapes = dict[str, list[int]]()
    states = dict[str, list[int]]()
    dtypes = dict[str, str]()
    whole_names = set[str]()
    for piece in contents.pieces:
        stored = piece.unpadded()
        if stored is None or not stored.data.numel():
            continue
        cuts = "".join(f"[{dim}:{start}:{stop}]" for dim, start, stop in stored.block_range.cuts)
        key = f"{stored.kind}/{stored.info.name}{cuts}@{stored.offset}"
        tensors[key] = stored.data
        dtypes[dtype_key(stored.kind, stored.info.name)] = DTYPES[stored.data.dtype]
        whole_names |= (
            {stored.info.name} if stored.info.whole_matrix or stored.info.narrow else set()
        )
        (states if stored.kind == "state" else shapes)[stored.info.name] = list(
            stored.info.global_shape
        )
        slices.append(Slice.of(key, stored))
    name = rank_file(rank)
    path = staging / name
    try:
        size, digest = write_tensors(path, tensors)
        if contents.read_back and sha256_from_disk(path) != digest:
            return RankOutcome(record=None, error=f"{name}: does not read back as it was written")
    except OSError as error:
        return RankOutcome(record=None, error=f"{name}: {error.strerror or error}")
    return RankOutcome(
        record=FileRecord(name, size, digest, dtypes, slices),
        shapes=shapes,
        states=states,
        whole=sorted(whole_names),
    )


# ----------------------------------------------------------------------------------------------
#     rank 0's part


def outcome_of(action: Callable[[], int]) -> CommitOutcome:
    """Runs `action` and returns its result or its error."""
    try:
        return CommitOutcome(bytes=action())
    except TrainerError as error:
        return CommitOutcome(error=str(error), exit=error.exit)
    except OSError as error:
        problem = f"{error.filename or 'checkpoint'}: {error.strerror or error}"
        return CommitOutcome(error=problem, exit=Exit.USER)


def commit(
    target: Target,
    contents: Contents,
    outcomes: Iterable[RankOutcome],
    keep_last: int,
    protected: int | None = None,
) -> int:
    """Commits the files that the ranks have written and returns their bytes. Raises SaveError,
    Fenced."""
    outcomes = list(outcomes)
    problem = next(
        (f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error),
        "",
    )
    manifest = manifest_of(target, contents, outcomes)
    return publish(
        target,
        manifest,
        problem,
        keep_last=keep_last,
        read_back=contents.read_back,
        protected=protected,
    )


def publish(
    target: Target,
    manifest: Manifest,
    problem: str,
    *,
    keep_last: int,
    read_back: bool,
    protected: int | None = None,
) -> int:
    """Renames the staging folder to its step's name, unless there was a `problem` or the files do
    not hold every element once. Returns the bytes of all files. Raises SaveError, Fenced, and then
    deletes the staging folder."""
    step = manifest.step
    staging = target.staging(step)
    try:
        if problem:
            raise SaveError(f"checkpoint of step {step}: {problem}")
        if incomplete := coverage_problem(manifest):
            raise SaveError(f"checkpoint of step {step} would be useless: {incomplete}")
        _rename(target, staging, manifest, read_back)
    except (TrainerError, OSError):
        shutil.rmtree(staging, ignore_errors=True)
        # If a new owner deleted the staging folder, Fenced is the better error.
        fence.check(target.folder, target.token)
        raise
    prune(target.folder, keep_last, step if read_back else protected)
    return sum(record.bytes for record in manifest.files)


def manifest_of(
    target: Target,
    contents: Contents,
    outcomes: Sequence[RankOutcome],
) -> Manifest:
    """Returns the manifest of the files that all ranks have written."""
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
        parameters={name: shape for outcome in outcomes for name, shape in outcome.shapes.items()},
        whole=sorted({name for outcome in outcomes for name in outcome.whole}),
        states={name: shape for outcome in outcomes for name, shape in outcome.states.items()},
        files=[outcome.record for outcome in outcomes if outcome.record is not None],
    )


def _rename(target: Target, staging: Path, manifest: Manifest, read_back: bool) -> None:
    # This also makes the names of the ranks' files durable.
    write_atomic(staging / MANIFEST, encode(manifest))
    if read_back:
        try:
            decode((staging / MANIFEST).read_bytes())
        except CheckpointError as error:
            raise SaveError(f"{MANIFEST}: does not read back as it was written ({error})") from None
    with locked(target.folder):
        fence.check(target.folder, target.token)
        final = target.folder / step_name(manifest.step)
        if final.exists():  # an earlier epoch saved this step, and it was rejected
            discard(final)
        staging.rename(final)
    sync_folder(target.folder)
