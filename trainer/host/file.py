"""A file for state that does not fit into memory: read and written in parts, several at once, past
the page cache.

One request at a time leaves a disk idle between two; `OUTSTANDING` of `PART` bytes each way keep it
busy (measured by benchmarks/offload.py against a probe that does nothing else).
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import DiskError

#: (descriptor, buffers, offset) -> bytes moved
Transfer = Callable[[int, list[memoryview], int], int]

PART = 2 << 20  # bytes of one request
OUTSTANDING = 4  # requests at once each way, of all files of a rank


class Requests:
    """Threads that read, and threads that write, for all files of a rank."""

    def __init__(self) -> None:
        self.reads = ThreadPoolExecutor(OUTSTANDING, thread_name_prefix="offload-read")
        self.writes = ThreadPoolExecutor(OUTSTANDING, thread_name_prefix="offload-write")


class StateFile:
    """A file without a name whose space is reserved. Errors are DiskErrors, one line each."""

    def __init__(self, folder: Path, size: int, requests: Requests):
        """Raises DiskError."""
        self.folder = folder
        self.size = size
        self._requests = requests
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(
                prefix="state-", suffix=".offload", dir=folder, buffering=0
            ) as file:
                self.fd = os.dup(file.fileno())
            self.direct = self._open_direct()
            if size:
                os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise self._failed("cannot hold what is offloaded", error) from None

    def grow(self, size: int) -> None:
        """Reserve space for `size` bytes in all. Raises DiskError."""
        reserved = self.size
        self.size = max(size, self.size)
        try:
            if self.size > reserved:
                os.posix_fallocate(self.fd, reserved, self.size - reserved)
        except OSError as error:
            raise self._failed("cannot hold what is offloaded", error) from None

    def _open_direct(self) -> int:
        """A second descriptor that bypasses the page cache, or the first where the file system has
        no such thing."""
        try:
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.fd

    def _failed(self, failure: str, error: OSError) -> DiskError:
        needs = f"{self.size / 2**30:.2f} GiB"
        return DiskError(
            f"train.offload_dir {self.folder} {failure} ({needs}): {error.strerror or error}",
            error.errno,
        )

    def read(self, target: Tensor, offset: int, cached: bool = False) -> None:
        """Fill 1-D bytes. `cached`: through the page cache, as what is mapped has to be; else the
        bytes, their length and `offset` are whole blocks. Raises DiskError."""
        self._each(target, offset, os.preadv, cached, "cannot be read", self._requests.reads)

    def write(self, data: Tensor, offset: int, cached: bool = False) -> None:
        """Write 1-D bytes, as `read`. Raises DiskError."""
        self._each(data, offset, os.pwritev, cached, "cannot be written", self._requests.writes)

    def _each(
        self,
        data: Tensor,
        offset: int,
        transfer: Transfer,
        cached: bool,
        failure: str,
        threads: ThreadPoolExecutor,
    ) -> None:
        view = data.numpy().data
        fd = self.fd if cached else self.direct
        requests = [
            (view[start : start + PART], offset + start) for start in range(0, len(view), PART)
        ]
        try:
            if len(requests) > 1:
                jobs = [threads.submit(_move, transfer, fd, *request) for request in requests]
                failed = [error for error in [job.exception() for job in jobs] if error is not None]
                if failed:
                    raise failed[0]
            else:
                for request in requests:
                    _move(transfer, fd, *request)
        except OSError as error:
            raise self._failed(failure, error) from None

    def mapped(self) -> Tensor:
        """The file's bytes as a 1-D tensor, in pages that the kernel may drop; released with the
        tensor."""
        if not self.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)

    def close(self) -> None:
        """Give the space back."""
        for fd in {self.fd, self.direct}:
            os.close(fd)


def _move(transfer: Transfer, fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = transfer(fd, [view], offset)
        if not done:
            raise OSError(errno.EIO, "the file is shorter than it was made")
        view = view[done:]
        offset = offset + done
