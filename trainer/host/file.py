"""A file for state that does not fit into memory, read and written by several requests at once,
past the page cache.

With one request at a time a disk is idle between two; `OUTSTANDING` requests of `PART` bytes in
each direction keep it busy (measured by benchmarks/offload.py against a probe that does nothing
else).
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
OUTSTANDING = 4  # requests at once in each direction, over all files of a rank


class Requests:
    """Threads that read, and threads that write, for all files of a rank."""

    def __init__(self) -> None:
        self.reads = ThreadPoolExecutor(OUTSTANDING, thread_name_prefix="offload-read")
        self.writes = ThreadPoolExecutor(OUTSTANDING, thread_name_prefix="offload-write")


class StateFile:
    """An unnamed file with reserved space. Errors are DiskErrors of one line."""

    def __init__(self, folder: Path, size: int, requests: Requests):
        """Creates the file in `folder` and reserves `size` bytes. Raises DiskError."""
        self.folder = folder
        self.size = size
        self._requests = requests
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(
                prefix="state-",
                suffix=".offload",
                dir=folder,
                buffering=0,
            ) as file:
                self.fd = os.dup(file.fileno())
            self.direct = self._open_direct()
            if size:
                os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise self._failed("cannot hold the offloaded state", error) from None

    def grow(self, size: int) -> None:
        """Reserves space for `size` bytes in all. Raises DiskError."""
        reserved = self.size
        self.size = max(size, self.size)
        try:
            if self.size > reserved:
                os.posix_fallocate(self.fd, reserved, self.size - reserved)
        except OSError as error:
            raise self._failed("cannot hold the offloaded state", error) from None

    def _open_direct(self) -> int:
        """Opens a second descriptor that bypasses the page cache; returns the first one if the file
        system does not support that."""
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
        """Fills 1-D bytes from `offset` on. Mapped bytes need `cached`, which reads through the
        page cache; without it the tensor's address, its length and `offset` must be whole blocks.
        Raises DiskError."""
        self._transfer(
            os.preadv,
            target,
            offset,
            cached=cached,
            threads=self._requests.reads,
            failure="cannot be read",
        )

    def write(self, data: Tensor, offset: int, cached: bool = False) -> None:
        """Writes 1-D bytes, with the conditions of `read`. Raises DiskError."""
        self._transfer(
            os.pwritev,
            data,
            offset,
            cached=cached,
            threads=self._requests.writes,
            failure="cannot be written",
        )

    def _transfer(
        self,
        transfer: Transfer,
        data: Tensor,
        offset: int,
        *,
        cached: bool,
        threads: ThreadPoolExecutor,
        failure: str,
    ) -> None:
        """Cuts a transfer into requests of `PART` bytes and runs them at once."""
        view = data.numpy().data
        fd = self.fd if cached else self.direct
        requests = [
            (view[start : start + PART], offset + start) for start in range(0, len(view), PART)
        ]
        try:
            if len(requests) > 1:
                jobs = [threads.submit(_move, transfer, fd, *request) for request in requests]
                errors = [job.exception() for job in jobs]
                if first_error := next(filter(None, errors), None):
                    raise first_error
            else:
                for request in requests:
                    _move(transfer, fd, *request)
        except OSError as error:
            raise self._failed(failure, error) from None

    def mapped(self) -> Tensor:
        """Returns the file's bytes as a 1-D tensor, in pages that the kernel may drop; they are
        released with the tensor."""
        if not self.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)

    def close(self) -> None:
        """Releases the space."""
        for fd in {self.fd, self.direct}:
            os.close(fd)


def _move(transfer: Transfer, fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = transfer(fd, [view], offset)
        if not done:
            raise OSError(errno.EIO, "the file is shorter than its reserved size")
        view = view[done:]
        offset = offset + done
