"""The format of a checkpoint: folder names, the manifest, and the pieces of state that ranks write
and read.

    checkpoints/
        fence.json                   who may write here: the newest run and plan epoch
        step-00000100/               committed: the rename to this name was the last operation
            manifest.json            everything below, with the sha256 of every file
            rank-00000.safetensors   one file per rank: flat slices under full parameter names
        .tmp-step-00000200.e3/       staging folder of a save in progress, or left by a killed one

State is stored by full names (`layers.17.attn.wq.weight`), global shapes and the position of each
slice in them, never by rank or stage, so that any layout can read the checkpoint of any other.
Padding is not stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import msgspec
from msgspec import Struct
from torch import Tensor

from orchestrator.plan.worker import CHECKPOINT
from trainer.errors import CheckpointError
from trainer.parallel.params import ParamInfo, StateKind

from .geometry import BlockRange, Cut, tiling_problem

SCHEMA = CHECKPOINT
FENCE = "fence.json"
RNG_KEY = "rng/cpu"  # a rank's random state, in its file


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class StatePiece:
    """A contiguous range of one rank's slice of one parameter (or of its optimizer state).

    `data` is a 1-D view of live state: a save reads it, a load writes it. Its elements are number
    `offset`, `offset + 1`, ... of the flattened local tensor, whose shape `info.local_shape`
    includes padding.
    """

    kind: StateKind
    info: ParamInfo
    offset: int
    data: Tensor

    def unpadded(self) -> StatePiece | None:
        """Returns this piece without the padding at the end of dimension 0, or None if it holds
        only padding.

        Only dimension 0 is ever padded (vocabulary rows), so the valid elements are a prefix of the
        flat tensor.
        """
        info = self.info
        padded = [shard.dim for shard in info.shards if shard.stop - shard.start != shard.padded]
        if not padded:
            return self
        if padded != [0]:
            raise CheckpointError(
                f"{info.name}: padding of dimension {padded[-1]} cannot be stored"
            )
        valid = prod(extent.stop - extent.start for extent in info.global_slices) - self.offset
        return StatePiece(self.kind, info, self.offset, self.data[:valid]) if valid > 0 else None

    @property
    def block_range(self) -> BlockRange:
        """Position of the elements of `data` in the global parameter."""
        cuts = tuple((shard.dim, shard.start, shard.stop) for shard in self.info.shards)
        return BlockRange(cuts, self.offset, self.data.numel())


class Slice(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Position of the flat elements [offset, offset + count) of a file's tensor in the global
    parameter.

    They are consecutive elements of the block [start, stop) of dimension `dim` (None: of the whole
    parameter), of which `more` cuts further dimensions.
    """

    key: str  # tensor in the file
    name: str  # full parameter name
    kind: StateKind
    dim: int | None
    start: int
    stop: int
    offset: int
    count: int
    more: list[Cut] = []

    @classmethod
    def of(cls, key: str, piece: StatePiece) -> Slice:
        cuts, offset, count = piece.block_range
        dim, start, stop = cuts[0] if cuts else (None, 0, 0)
        return cls(
            key=key,
            name=piece.info.name,
            kind=piece.kind,
            dim=dim,
            start=start,
            stop=stop,
            offset=offset,
            count=count,
            more=list(cuts[1:]),
        )

    @property
    def block_range(self) -> BlockRange:
        cuts = () if self.dim is None else ((self.dim, self.start, self.stop), *self.more)
        return BlockRange(cuts, self.offset, self.count)


def dtype_key(kind: StateKind, name: str) -> str:
    """Returns the key of a dtype in a file's record: one per kind for parameters, one per name for
    state without gradient."""
    return f"state/{name}" if kind == "state" else kind


class FileRecord(Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    bytes: int
    sha256: str
    dtypes: dict[str, str]  # `dtype_key` -> safetensors dtype
    slices: list[Slice]


class Layout(Struct, frozen=True, forbid_unknown_fields=True):
    """The degrees of the plan that wrote a checkpoint: for messages, and to tell a bitwise resume
    from one on another layout."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    zero: int
    vpp: int

    def __str__(self) -> str:
        return "_".join(f"{axis}{getattr(self, axis)}" for axis in self.__struct_fields__)


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Describes every other file of a checkpoint; written last."""

    schema: str = SCHEMA
    hash: str = ""  # sha256 of this file with the hash itself left out
    run_id: str
    epoch: int
    plan_hash: str
    layout: Layout
    step: int  # optimizer steps completed
    samples: int  # consumed so far, over all ranks: the complete state of the data order
    created: float  # Unix seconds
    data: str = ""  # key of the token files that the samples came from
    scalars: dict[str, float]  # small state equal on all ranks, e.g. a loss scale
    parameters: dict[str, list[int]]  # full name -> global shape
    states: dict[str, list[int]] = {}  # the same of state without gradient
    #: parameters with other kinds of state: updated as whole matrices, or narrow
    whole: list[str] = []
    files: list[FileRecord]

    def slices(self) -> Iterator[tuple[FileRecord, Slice]]:
        return ((record, stored_slice) for record in self.files for stored_slice in record.slices)


def coverage_problem(manifest: Manifest) -> str | None:
    """Names the first parameter that the files do not hold exactly once for every kind of state: a
    shard that no rank wrote, or a data-parallel replica written twice. Returns None if all are
    complete."""
    ranges: dict[tuple[str, StateKind], list[BlockRange]] = {}
    for _, stored_slice in manifest.slices():
        ranges.setdefault((stored_slice.name, stored_slice.kind), []).append(
            stored_slice.block_range
        )
    whole_names = set(manifest.whole)
    is_whole = {name: name in whole_names for name in manifest.parameters}
    kinds = {
        of_matrices: sorted({kind for name, kind in ranges if is_whole.get(name) is of_matrices})
        for of_matrices in (False, True)
    }
    expected = [
        (name, shape, kind)
        for name, shape in manifest.parameters.items()
        for kind in kinds[is_whole[name]]
    ]
    expected += [(name, shape, "state") for name, shape in manifest.states.items()]
    for name, shape, kind in expected:
        if problem := tiling_problem(ranges.get((name, kind), []), shape):
            return f"{kind} of {name}: {problem}"
    return None


def encode(manifest: Manifest) -> bytes:
    """Returns the manifest as JSON, with its own hash filled in."""
    unsealed = msgspec.json.encode(msgspec.structs.replace(manifest, hash=""))
    raw = msgspec.json.format(unsealed, indent=1)
    return raw.replace(
        _hash_line(""),
        _hash_line(hashlib.sha256(raw).hexdigest()),
        1,
    )


def decode(raw: bytes) -> Manifest:
    """Reads a manifest. Raises CheckpointError with one line that says what is wrong."""
    try:
        head = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        schema = msgspec.json.decode(head["schema"]) if "schema" in head else None
        if schema != SCHEMA:
            raise CheckpointError(f"schema is {schema!r}, this version reads {SCHEMA!r}")
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (
        msgspec.DecodeError,
        msgspec.ValidationError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:
        raise CheckpointError(str(error)) from None
    unsealed = raw.replace(_hash_line(manifest.hash), _hash_line(""), 1)
    if hashlib.sha256(unsealed).hexdigest() != manifest.hash:
        raise CheckpointError("its content is not what was hashed: it has changed")
    return manifest


def _hash_line(digest: str) -> bytes:
    return b'"hash": "%s"' % digest.encode()
