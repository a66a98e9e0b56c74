"""Exports the weights of a checkpoint, whatever layout wrote it, as one safetensors file with full
names and shapes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
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
from .format import Manifest, StatePiece
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
    checkpoint: VerifiedCheckpoint,
    out: Path,
    dtype: str | None = None,
    rejected: list[str] | None = None,
) -> Exported:
    """Writes the weights of a verified checkpoint to `out`/model.safetensors, one parameter in
    memory at a time.

    Without `dtype` the file holds the master weights to the bit (fp32, or fp64 of an fp64 run);
    narrower dtypes are rounded from them. Tied weights are written once. The biases by which
    routers choose are exported in their stored dtype: a step changes them by less than bf16
    resolves. Raises SaveError if the file exists or cannot be written, CheckpointError, OSError.
    """
    manifest = checkpoint.manifest
    path = out / FILE
    if path.exists():
        raise SaveError(f"{path} exists: remove it, or export to another folder")
    biases = {name: shape for name, shape in manifest.states.items() if name.endswith(BIAS)}
    shapes = dict(sorted((manifest.parameters | biases).items()))
    stored = StoredState(checkpoint)
    dtypes = _exported_dtypes(stored, shapes, biases, DTYPES[dtype] if dtype else None)
    entries = {name: (dtypes[name], shape) for name, shape in shapes.items()}
    with _new_file(path) as temporary:
        tensors = _weights(stored, shapes, dtypes)
        size, digest = write_stream(temporary, entries, tensors, _metadata(manifest))
    parameters = sum(torch.Size(shape).numel() for shape in manifest.parameters.values())
    weight_dtypes = {dtypes[name] for name in manifest.parameters}
    dtype_names = sorted(name for name, dtype in DTYPES.items() if dtype in weight_dtypes)
    return Exported(
        file=str(path),
        bytes=size,
        sha256=digest,
        dtype="+".join(dtype_names),
        tensors=len(shapes),
        parameters=parameters,
        run_id=manifest.run_id,
        step=manifest.step,
        samples=manifest.samples,
        checkpoint=str(checkpoint.path),
        rejected=rejected or [],
    )


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path that becomes `path` if the block succeeds. Raises SaveError if the
    folder cannot be written."""
    folder = path.parent
    temporary = folder / f".{path.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        yield temporary
        temporary.rename(path)
        sync_folder(folder)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and str(error.filename or folder).startswith(str(folder)):
            raise SaveError(f"{path}: {error.strerror or error}") from None
        raise


def _metadata(manifest: Manifest) -> dict[str, str]:
    return {
        "format": "pt",
        "run_id": manifest.run_id,
        "step": str(manifest.step),
        "samples": str(manifest.samples),
        "plan_hash": manifest.plan_hash,
        "trained_on": str(manifest.layout),
    }


def _exported_dtypes(
    stored: StoredState,
    names: Iterable[str],
    biases: Container[str],
    target: torch.dtype | None,
) -> dict[str, torch.dtype]:
    """Returns the dtype of each exported tensor; biases keep their stored one."""
    dtypes = {}
    for name in names:
        is_bias = name in biases
        stored_dtype = stored.dtype("state" if is_bias else KIND, name)
        dtypes[name] = stored_dtype if is_bias or target is None else target
    return dtypes


def _weights(
    stored: StoredState,
    shapes: dict[str, list[int]],
    dtypes: dict[str, torch.dtype],
) -> Iterator[Tensor]:
    for name, shape in shapes.items():
        kind: StateKind = KIND if name in stored.checkpoint.manifest.parameters else "state"
        tensor = torch.empty(
            torch.Size(shape).numel(),
            dtype=stored.dtype(kind, name),
        )
        stored.fill([StatePiece(kind, whole(name, tuple(shape)), 0, tensor)])
        yield tensor.to(dtypes[name])
