"""Fills live state from a verified checkpoint, whatever layout wrote it.

Each rank finds its slices in any of the files by parameter name and position and reads only those
bytes. Consecutive elements are read straight into the live tensor. If a matrix is cut along its
columns, rows of at least a page are read one by one, and shorter rows together with the bytes
between them.
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

#: Rows shorter than this are not read one by one: the kernel would read the whole page anyway.
PAGE_BYTES = 4096
#: Bytes of the file that one read takes for short rows.
SPAN_BYTES = 16 << 20
_STORED = {name: dtype for dtype, name in DTYPES.items()}


class _Read(NamedTuple):
    stored_slice: Slice
    piece: StatePiece
    shared: Overlap


def restore(
    checkpoint: VerifiedCheckpoint,
    pieces: Iterable[StatePiece],
    rank: int,
    layout: Layout,
    seed: int,
) -> None:
    """Fills the pieces' data, bit for bit, and this rank's random state from the checkpoint.

    `layout` is the layout of the pieces. If it wrote the checkpoint, each rank gets its random
    state back; otherwise each rank's generator is seeded from `seed`, the step and the rank.

    Raises CheckpointError if an element is missing, has another dtype, or belongs to a parameter of
    another shape; OSError, with the file's name, if a file cannot be read.
    """
    StoredState(checkpoint).fill(pieces)
    own_file = rank_file(rank)
    if checkpoint.manifest.layout == layout and any(
        record.file == own_file for record in checkpoint.manifest.files
    ):
        state = torch.empty_like(torch.get_rng_state())
        with TensorFile.open(checkpoint.path / own_file) as file:
            file.read(RNG_KEY, 0, state)
        torch.set_rng_state(state)
    else:
        seed_key = f"orch.random/1 {seed} {checkpoint.manifest.step} {rank}".encode()
        torch.manual_seed(
            int.from_bytes(
                hashlib.sha256(seed_key).digest()[:8],
                "little",
                signed=True,
            )
        )


class StoredState:
    """The state in a verified checkpoint, by kind and full name."""

    def __init__(self, checkpoint: VerifiedCheckpoint):
        self.checkpoint = checkpoint
        self._slices: dict[tuple[str, str], list[tuple[FileRecord, Slice]]] = {}
        for record, stored_slice in checkpoint.manifest.slices():
            self._slices.setdefault((stored_slice.kind, stored_slice.name), []).append(
                (record, stored_slice)
            )

    def dtype(self, kind: str, name: str) -> torch.dtype:
        """Returns the dtype in which a state is stored. Raises CheckpointError if it is not."""
        for record, stored_slice in self._slices.get((kind, name), []):
            if dtype := _STORED.get(record.dtypes.get(dtype_key(stored_slice.kind, name), "")):
                return dtype
        raise CheckpointError(f"{self.checkpoint.path.name} holds nothing of {name} ({kind})")

    def files(self, pieces: Iterable[StatePiece]) -> set[str]:
        """Returns the names of the files that hold any of the pieces. Raises as `restore` does."""
        files = set()
        for piece in self._stored(pieces):
            files |= {record.file for record, _ in self._find(piece)}
        return files

    def fill(self, pieces: Iterable[StatePiece]) -> None:
        """Fills the pieces' data from whichever files hold it. Raises as `restore` does."""
        reads: dict[str, list[_Read]] = {}
        for stored_piece in self._stored(pieces):
            for record, read in self._find(stored_piece):
                reads.setdefault(record.file, []).append(read)
        for name, file_reads in reads.items():
            with TensorFile.open(self.checkpoint.path / name) as file:
                for stored_slice, piece, shared in file_reads:
                    _copy(file, stored_slice.key, piece.data, shared)

    def _stored(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Yields the pieces without padding. It leaves out pieces that are only padding, and stale
        weights if the checkpoint has none."""
        has_stale = any(kind == STALE for kind, _ in self._slices)
        for piece in pieces:
            unpadded = piece.unpadded()
            if unpadded is None or not unpadded.data.numel():
                continue
            if has_stale or piece.kind != STALE:
                yield unpadded

    def _find(self, piece: StatePiece) -> list[tuple[FileRecord, _Read]]:
        _check_shape(self.checkpoint, piece)
        reads = []
        missing = piece.data.numel()
        for record, stored_slice in self._slices.get((piece.kind, piece.info.name), []):
            for shared in overlaps(
                stored_slice.block_range,
                piece.block_range,
                piece.info.global_shape,
            ):
                _check_dtype(self.checkpoint, record, piece)
                missing -= shared.rows * shared.columns
                reads.append((record, _Read(stored_slice, piece, shared)))
        if missing:
            amount = "too much" if missing < 0 else "too little"
            raise CheckpointError(
                f"{self.checkpoint.path.name} holds {amount} of {piece.info.name} ({piece.kind}):"
                f" {abs(missing)} elements of this rank's part"
            )
        return reads


def _copy(file: TensorFile, key: str, data: Tensor, shared: Overlap) -> None:
    """Reads the rectangle `shared` of the file's tensor `key` (left) into `data` (right)."""
    shape = (shared.rows, shared.columns)
    step = (shared.right_step, 1)
    target = data.as_strided(shape, step, data.storage_offset() + shared.right_offset)
    on_cpu = data.device.type == "cpu"
    if shared.columns * data.itemsize >= PAGE_BYTES or shared.rows == 1:
        for row in range(shared.rows):
            values = target[row] if on_cpu else torch.empty(shared.columns, dtype=data.dtype)
            file.read(key, shared.left_offset + row * shared.left_step, values)
            if not on_cpu:
                target[row].copy_(values)
        return
    rows_at_once = max(1, SPAN_BYTES // (shared.left_step * data.itemsize))
    for row in range(0, shared.rows, rows_at_once):
        rows = min(rows_at_once, shared.rows - row)
        span = torch.empty((rows - 1) * shared.left_step + shared.columns, dtype=data.dtype)
        file.read(key, shared.left_offset + row * shared.left_step, span)
        target[row : row + rows].copy_(
            span.as_strided((rows, shared.columns), (shared.left_step, 1))
        )


def _check_shape(checkpoint: VerifiedCheckpoint, piece: StatePiece) -> None:
    manifest = checkpoint.manifest
    is_state = piece.kind == "state"
    shapes = manifest.states if is_state else manifest.parameters
    shape = shapes.get(piece.info.name)
    if shape is None:
        noun = "state" if is_state else "parameter"
        raise CheckpointError(
            f"{checkpoint.path.name} has no {noun} {piece.info.name}: it belongs to another model"
        )
    if tuple(shape) != piece.info.global_shape:
        raise CheckpointError(
            f"{checkpoint.path.name} has {piece.info.name} with shape {tuple(shape)},"
            f" the plan's model has {piece.info.global_shape}"
        )


def _check_dtype(
    checkpoint: VerifiedCheckpoint,
    record: FileRecord,
    piece: StatePiece,
) -> None:
    stored = record.dtypes.get(dtype_key(piece.kind, piece.info.name))
    expected = DTYPES[piece.data.dtype]
    if stored != expected:
        raise CheckpointError(
            f"{checkpoint.path.name}: {record.file} holds {piece.kind} state as {stored}, this plan"
            f" trains with {expected}"
        )
