"""Fills live state from a verified checkpoint, whatever layout wrote it.

Each rank finds its slices by parameter name and position in any of the files and reads only those
bytes. Runs of elements are read straight into the live tensor. Of a matrix cut along its columns,
rows of at least a page are read one by one, and shorter rows together with the bytes between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.errors import CheckpointError
from trainer.parallel.params import STALE

from .files import DTYPES, TensorFile
from .format import RNG_KEY, FileRecord, Layout, Slice, StatePiece, dtype_key, rank_file
from .geometry import Overlap, overlaps
from .load import VerifiedCheckpoint

#: Rows shorter than this are not worth a read each: the kernel would read the page anyway.
PAGE_BYTES = 4096
#: Bytes of the file that are read at once for short rows.
SPAN_BYTES = 16 << 20
_STORED = {name: dtype for dtype, name in DTYPES.items()}


class _Read(NamedTuple):
    part: Slice
    piece: StatePiece
    shared: Overlap


def restore(
    found: VerifiedCheckpoint, pieces: Iterable[StatePiece], rank: int, layout: Layout, seed: int
) -> None:
    """Fill the pieces' data, bit for bit, and this rank's random state from the checkpoint.

    `layout` is that of the pieces. If it wrote the checkpoint, each rank gets its random state
    back; on another layout each rank's generator is seeded from `seed`, the step and the rank.

    Raises CheckpointError if an element is missing, has another dtype, or belongs to a parameter of
    another shape; OSError, with the file's name, if a file cannot be read.
    """
    StoredState(found).fill(pieces)
    own = rank_file(rank)
    if found.manifest.layout == layout and any(
        record.file == own for record in found.manifest.files
    ):
        state = torch.empty_like(torch.get_rng_state())
        with TensorFile.open(found.path / own) as file:
            file.read(RNG_KEY, 0, state)
        torch.set_rng_state(state)
    else:
        text = f"orch.random/1 {seed} {found.manifest.step} {rank}".encode()
        torch.manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True))


class StoredState:
    """The state in a verified checkpoint, by kind and full name."""

    def __init__(self, found: VerifiedCheckpoint):
        self.found = found
        self._parts: dict[tuple[str, str], list[tuple[FileRecord, Slice]]] = {}
        for record, part in found.manifest.slices():
            self._parts.setdefault((part.kind, part.name), []).append((record, part))

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """In which it is stored. Raises CheckpointError where it is not."""
        for record, part in self._parts.get((kind, name), []):
            if found := _STORED.get(record.dtypes.get(dtype_key(part.kind, name), "")):
                return found
        raise CheckpointError(f"{self.found.path.name} holds nothing of {name} ({kind})")

    def files(self, pieces: Iterable[StatePiece]) -> set[str]:
        """Names of the files that hold any of the pieces. Raises as `restore`."""
        return {record.file for wanted in self._wanted(pieces) for record, _ in self._find(wanted)}

    def fill(self, pieces: Iterable[StatePiece]) -> None:
        """Fill the pieces' data from whichever files hold it. Raises as `restore`."""
        reads: dict[str, list[_Read]] = {}
        for wanted in self._wanted(pieces):
            for record, read in self._find(wanted):
                reads.setdefault(record.file, []).append(read)
        for name, wants in reads.items():
            with TensorFile.open(self.found.path / name) as file:
                for part, piece, shared in wants:
                    _copy(file, part.key, piece.data, shared)

    def _wanted(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """The pieces without padding. Those that are only padding are left out, and stale weights
        if there are none."""
        has_stale = any(kind == STALE for kind, _ in self._parts)
        for piece in pieces:
            wanted = piece.unpadded()
            if wanted is not None and wanted.data.numel() and (has_stale or piece.kind != STALE):
                yield wanted

    def _find(self, wanted: StatePiece) -> list[tuple[FileRecord, _Read]]:
        _check_shape(self.found, wanted)
        reads = []
        missing = wanted.data.numel()
        for record, part in self._parts.get((wanted.kind, wanted.info.name), []):
            for shared in overlaps(part.block_range, wanted.block_range, wanted.info.global_shape):
                _check_dtype(self.found, record, wanted)
                missing -= shared.rows * shared.columns
                reads.append((record, _Read(part, wanted, shared)))
        if missing:
            raise CheckpointError(
                f"{self.found.path.name} holds {'too much' if missing < 0 else 'too little'} of"
                f" {wanted.info.name} ({wanted.kind}): {abs(missing)} elements of this rank's part"
            )
        return reads


def _copy(file: TensorFile, key: str, data: Tensor, shared: Overlap) -> None:
    """Read the rectangle `shared` of the file's tensor `key` (left) into `data` (right)."""
    shape = (shared.rows, shared.columns)
    step = (shared.right_step, 1)
    into = data.as_strided(shape, step, data.storage_offset() + shared.right)
    here = data.device.type == "cpu"
    if shared.columns * data.itemsize >= PAGE_BYTES or shared.rows == 1:
        for row in range(shared.rows):
            line = into[row] if here else torch.empty(shared.columns, dtype=data.dtype)
            file.read(key, shared.left + row * shared.left_step, line)
            if not here:
                into[row].copy_(line)
        return
    at_once = max(1, SPAN_BYTES // (shared.left_step * data.itemsize))
    for row in range(0, shared.rows, at_once):
        rows = min(at_once, shared.rows - row)
        span = torch.empty((rows - 1) * shared.left_step + shared.columns, dtype=data.dtype)
        file.read(key, shared.left + row * shared.left_step, span)
        into[row : row + rows].copy_(span.as_strided((rows, shared.columns), (shared.left_step, 1)))


def _check_shape(found: VerifiedCheckpoint, piece: StatePiece) -> None:
    manifest = found.manifest
    shape = (manifest.states if piece.kind == "state" else manifest.parameters).get(piece.info.name)
    if shape is None:
        what = "state" if piece.kind == "state" else "parameter"
        raise CheckpointError(
            f"{found.path.name} has no {what} {piece.info.name}: it is of another model"
        )
    if tuple(shape) != piece.info.global_shape:
        raise CheckpointError(
            f"{found.path.name} has {piece.info.name} with shape {tuple(shape)},"
            f" the plan's model has {piece.info.global_shape}"
        )


def _check_dtype(found: VerifiedCheckpoint, record: FileRecord, piece: StatePiece) -> None:
    stored = record.dtypes.get(dtype_key(piece.kind, piece.info.name))
    wanted = DTYPES[piece.data.dtype]
    if stored != wanted:
        raise CheckpointError(
            f"{found.path.name}: {record.file} holds {piece.kind} state as {stored}, this plan"
            f" trains with {wanted}"
        )
