"""Loading: the newest checkpoint whose every byte is as it was written; older ones only after naming what is broken.

Ranks share the verification: rank r hashes files r, r + world, ... and all learn of any problem, so all choose the same
folder. Then each rank copies its slices into live state, found by full name and place, whichever file they are in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from trainer import messages
from trainer.errors import CheckpointError

from .files import DTYPES, sha256
from .format import MANIFEST, FileRecord, Manifest, Piece, Slice, block, decode, rank_file
from .save import RNG_KEY, committed


@dataclass(frozen=True)
class Found:
    """A verified checkpoint."""

    path: Path
    manifest: Manifest


def newest(folder: Path, rank: int, on_reject: Callable[[Path, str], None] = lambda path, why: None) -> Found | None:
    """The newest committed checkpoint that verifies; None if there has never been one. Every rank must call it.

    `on_reject(path, problem)` is called on every rank for each newer one that does not verify. Raises CheckpointError
    if there are checkpoints and none of them verifies: starting over silently would throw the run away.
    """
    names = [path.name for _, path in committed(folder)] if rank == 0 else []
    names = msgspec.json.decode(messages.broadcast_bytes(msgspec.json.encode(names)), type=list[str])
    rejected = []
    for name in names:
        path = folder / name
        manifest, problem = _verify(path, rank)
        if manifest is not None and problem is None:
            return Found(path, manifest)
        rejected.append(f"{name}: {problem}")
        on_reject(path, problem or "")
    if rejected:
        raise CheckpointError(f"no checkpoint in {folder} can be trusted ({'; '.join(rejected)})")
    return None


def _verify(path: Path, rank: int) -> tuple[Manifest | None, str | None]:
    raw = b""
    if rank == 0:
        try:
            raw = (path / MANIFEST).read_bytes()
        except OSError as error:
            raw = f"!{MANIFEST}: {error.strerror}".encode()
    raw = messages.broadcast_bytes(raw)
    if raw.startswith(b"!"):
        return None, raw[1:].decode()
    try:
        manifest = decode(raw)
    except CheckpointError as error:
        return None, f"{MANIFEST}: {error}"
    mine = manifest.files[rank :: messages.world_size()]
    problems = messages.all_gather_bytes("; ".join(filter(None, (check_file(path, one) for one in mine))).encode())
    return manifest, "; ".join(problem.decode() for problem in problems if problem) or None


def check_file(path: Path, record: FileRecord) -> str | None:
    """None, or what is wrong with one file of a checkpoint."""
    file = path / record.file
    if Path(record.file).name != record.file:
        return f"{record.file!r} is not a plain file name"
    try:
        size = file.stat().st_size
        if size != record.bytes:
            return f"{record.file} has {size} bytes, the manifest says {record.bytes}"
        if sha256(file) != record.sha256:
            return f"{record.file} does not have the sha256 in the manifest: its content has changed"
    except OSError as error:
        return f"{record.file}: {error.strerror}"
    return None


def restore(found: Found, pieces: Iterable[Piece], rank: int) -> None:
    """Fill the pieces' data from the checkpoint, bit for bit, and this rank's random state.

    Raises CheckpointError if an element is missing (another layout, which this version does not convert), has another
    dtype, or belongs to a parameter of another shape.
    """
    index: dict[tuple, list[tuple[FileRecord, Slice]]] = {}
    for record, part in found.manifest.slices():
        index.setdefault((part.kind, part.name, part.dim, part.start, part.stop), []).append((record, part))
    reads: dict[str, list[tuple[Slice, Piece]]] = {}
    for piece in pieces:
        wanted = piece.unpadded()
        if wanted is None or not wanted.data.numel():
            continue
        _check_shape(found, wanted)
        parts = index.get((wanted.kind, wanted.info.name, *block(wanted.info)), [])
        covered = 0
        for record, part in parts:
            begin, end = overlap(part.offset, part.count, wanted.offset, wanted.data.numel())
            if begin < end:
                covered += end - begin
                _check_dtype(found, record, wanted)
                reads.setdefault(record.file, []).append((part, wanted))
        if covered != wanted.data.numel():
            raise CheckpointError(
                f"{found.path.name} was written by layout {found.manifest.layout} and does not hold this rank's part of"
                f" {wanted.info.name} ({wanted.kind}); resuming needs the layout that wrote it"
            )
    for file, wants in reads.items():
        _read(found.path / file, wants)
    own = rank_file(rank)
    if any(record.file == own for record in found.manifest.files):
        with safe_open(found.path / own, framework="pt") as tensors:
            torch.set_rng_state(tensors.get_tensor(RNG_KEY))


def overlap(offset: int, count: int, other_offset: int, other_count: int) -> tuple[int, int]:
    """The common range [begin, end) of two flat ranges; empty when begin >= end."""
    return max(offset, other_offset), min(offset + count, other_offset + other_count)


def _read(file: Path, wants: Sequence[tuple[Slice, Piece]]) -> None:
    try:
        with safe_open(file, framework="pt") as tensors:
            for part, piece in wants:
                begin, end = overlap(part.offset, part.count, piece.offset, piece.data.numel())
                values = tensors.get_slice(part.key)[begin - part.offset : end - part.offset]
                piece.data[begin - piece.offset : end - piece.offset].copy_(values)
    except SafetensorError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _check_shape(found: Found, piece: Piece) -> None:
    shape = found.manifest.parameters.get(piece.info.name)
    if shape is None:
        raise CheckpointError(f"{found.path.name} has no parameter {piece.info.name}: it is of another model")
    if tuple(shape) != piece.info.global_shape:
        raise CheckpointError(
            f"{found.path.name} has {piece.info.name} with shape {tuple(shape)},"
            f" the plan's model has {piece.info.global_shape}"
        )


def _check_dtype(found: Found, record: FileRecord, piece: Piece) -> None:
    stored, wanted = record.dtypes.get(piece.kind), DTYPES[piece.data.dtype]
    if stored != wanted:
        raise CheckpointError(
            f"{found.path.name}: {record.file} holds {piece.kind} state as {stored}, this plan trains with {wanted}"
        )
