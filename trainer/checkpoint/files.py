"""Durable files: safetensors written and hashed in one pass, atomic replacement, folder locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

#: torch dtype -> name in the safetensors format (its README, "Format").
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write 1-D tensors as one safetensors file, durable when this returns; (bytes, sha256).

    Own writer: the library's builds the whole file in memory, and the hash would take a second pass.
    """
    header, end = {}, 0
    for key, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # data starts 8-byte aligned, so that it can be mapped
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for part in _parts(text, tensors):
            file.write(part)
            digest.update(part)
            size += len(part)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _parts(header: bytes, tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors.values():
        if tensor.numel():
            yield memoryview(tensor.detach().contiguous().view(torch.uint8).cpu().numpy())


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock (flock on `.lock`; released by the kernel if this process dies)."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
