"""Durable files: safetensors written and hashed in one pass, atomic replacement, folder locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec
import torch
from torch import Tensor

from trainer.errors import CheckpointError

#: torch dtype -> name in the safetensors format (its README, "Format").
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
    torch.uint8: "U8",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Writes tensors as one safetensors file and returns (bytes, sha256) once it is durable.

    The library's own writer would build the whole file in memory, and the hash would take a second
    pass.
    """
    return write_stream(
        path,
        {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()},
        tensors.values(),
    )


def write_stream(
    path: Path,
    entries: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] = {},
) -> tuple[int, str]:
    """Writes tensors that are produced one by one, as `write_tensors` does; `entries` lists their
    keys, dtypes and shapes in that order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key, (dtype, shape) in entries.items():
        begin = end
        end = end + prod(shape) * dtype.itemsize
        header[key] = {
            "dtype": DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    encoded_header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)  # 8-byte aligned data can be mapped
    return write_chunks(path, _chunks(encoded_header, tensors))


def write_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes a new file from `chunks` and returns (bytes, sha256) once it is durable."""
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _chunks(header: bytes, tensors: Iterable[Tensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        if tensor.numel():
            yield tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data


class TensorFile:
    """Reads any range of any 1-D tensor of a safetensors file.

    Reads use pread instead of mmap: an unreadable block is then an OSError and not a SIGBUS that
    kills the process.
    """

    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self.path = path
        try:
            size = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(min(size, os.fstat(file.fileno()).st_size)))
            self._tensors = {key: entry for key, entry in header.items() if key != "__metadata__"}
        except (msgspec.DecodeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a safetensors file ({error})") from None
        self._data = 8 + size

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path) -> Iterator[Self]:
        """Opens a file for the block. Raises OSError, CheckpointError."""
        with path.open("rb", buffering=0) as file:
            yield cls(file, path)

    def read(self, key: str, first: int, out: Tensor) -> None:
        """Fills `out`, 1-D, contiguous and in CPU memory, with the elements of `key` from index
        `first` on.

        Raises CheckpointError if the file does not hold them in that dtype, OSError if they cannot
        be read.
        """
        entry = self._tensors.get(key)
        if entry is None or entry["dtype"] != DTYPES[out.dtype]:
            stored = entry and entry["dtype"]
            expected = DTYPES[out.dtype]
            raise CheckpointError(f"{self.path}: holds {key} as {stored}, expected {expected}")
        begin, end = (self._data + edge for edge in entry["data_offsets"])
        position = begin + first * out.itemsize
        unread = out.view(torch.uint8).numpy().data
        if position + len(unread) > end:
            raise CheckpointError(f"{self.path}: {key} is shorter than the manifest says")
        while unread:
            count = os.preadv(self._file.fileno(), [unread], position)
            if not count:
                raise CheckpointError(f"{self.path}: ends in the middle of {key}")
            unread = unread[count:]
            position = position + count


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_from_disk(path: Path) -> str:
    """Returns the hash of an fsynced file as the disk holds it: its pages are first dropped from
    memory, where the file system supports that."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return sha256(path)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the folder's lock (flock on `.lock`; the kernel releases it if this process dies)."""
    with (folder / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
