"""Exports the weights of a checkpoint, whatever layout wrote it, as one safetensors file with full
names and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from trainer.durable import sync_folder
from trainer.errors import SaveError
from trainer.model.router import BIAS
from trainer.parallel.params import StateKind, whole
from trainer.precision import DTYPES

from .files import write_stream
from .format import StatePiece
from .load import VerifiedCheckpoint
from .restore import StoredState

#: Kind of state that is exported: the weights in the optimizer's precision.
KIND: StateKind = "master"
FILE = "model.safetensors"


class Exported(Struct, frozen=True):
    """What `orch export --json` prints."""

    file: str
    bytes: int
    sha256: str
    dtype: str
    tensors: int
    parameters: int
    run_id: str
    step: int
    samples: int
    checkpoint: str
    rejected: list[str] = []  # newer checkpoints that did not verify, and why


def export(
    found: VerifiedCheckpoint,
    out: Path,
    dtype: str | None = None,
    rejected: list[str] | None = None,
) -> Exported:
    """Write the weights of a verified checkpoint to `out`/model.safetensors, one parameter in
    memory at a time.

    Without `dtype` they are the master weights to the bit, fp32 or of an fp64 run fp64; narrower
    ones are rounded from those. Tied weights are there once. The biases by which routers choose are
    weights, too, and stay as they are saved: they grow by less than bf16 can tell. Raises SaveError
    if the file exists or cannot be written, CheckpointError, OSError.
    """
    manifest = found.manifest
    path = out / FILE
    if path.exists():
        raise SaveError(f"{path} exists: remove it, or export to another folder")
    temporary = out / f".{FILE}.tmp"
    biases = {name: shape for name, shape in manifest.states.items() if name.endswith(BIAS)}
    shapes = dict(sorted((manifest.parameters | biases).items()))
    metadata = {
        "format": "pt",
        "run_id": manifest.run_id,
        "step": str(manifest.step),
        "samples": str(manifest.samples),
        "plan_hash": manifest.plan_hash,
        "trained_on": str(manifest.layout),
    }
    stored = StoredState(found)
    weights = {name: stored.dtype("state" if name in biases else KIND, name) for name in shapes}
    wanted = DTYPES[dtype] if dtype else None
    dtypes = {name: kept if name in biases else wanted or kept for name, kept in weights.items()}
    try:
        out.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        entries = {name: (dtypes[name], shape) for name, shape in shapes.items()}
        size, digest = write_stream(temporary, entries, _weights(stored, shapes, dtypes), metadata)
        temporary.rename(path)
        sync_folder(out)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and str(error.filename or out).startswith(str(out)):
            raise SaveError(f"{path}: {error.strerror or error}") from None
        raise
    parameters = sum(torch.Size(shape).numel() for shape in manifest.parameters.values())
    of_weights = {dtypes[name] for name in manifest.parameters}
    written = "+".join(sorted(name for name, dtype in DTYPES.items() if dtype in of_weights))
    return Exported(
        str(path),
        size,
        digest,
        written,
        len(shapes),
        parameters,
        manifest.run_id,
        manifest.step,
        manifest.samples,
        str(found.path),
        rejected or [],
    )


def _weights(
    stored: StoredState, shapes: dict[str, list[int]], dtypes: dict[str, torch.dtype]
) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        kind: StateKind = KIND if name in stored.found.manifest.parameters else "state"
        tensor = torch.empty(torch.Size(shape).numel(), dtype=stored.dtype(kind, name))
        stored.fill([StatePiece(kind, whole(name, tuple(shape)), 0, tensor)])
        yield tensor.to(dtypes[name])
