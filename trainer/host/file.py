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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import DiskError

#: (descriptor, buffers, offset) -> bytes moved
Transfer = Callable[[int, list[memoryview], int], int]

PART = 2 << 20  # bytes of one request
OUTSTANDING = 4  # requests at once in each direction, over all files of a rank
#: Seconds without the end of any request after which a disk counts as stuck. It is less than
#: the default of `backend.hang_after_s`: the rank whose disk is stuck names it before the ranks
#: that wait for it are found hanging.
STUCK_S = 20.0


class Requests:
    """Threads that read, and threads that write, for all files of a rank."""

    def __init__(self) -> None:
        self.reads = ThreadPoolExecutor(OUTSTANDING, thread_name_prefix="offload-read")
        self.writes = ThreadPoolExecutor(OUTSTANDING, thread_name_prefix="offload-write")
        self._moved = 0  # requests, or parts of them, that have moved

    def move(self, transfer: Transfer, fd: int, view: memoryview, offset: int) -> None:
        """Moves all bytes of a request. Raises OSError."""
        while view:
            done = transfer(fd, [view], offset)
            if not done:
                raise OSError(errno.EIO, "the file is shorter than its reserved size")
            view = view[done:]
            offset = offset + done
            self._moved += 1

    def wait(self, job: Future[None]) -> None:
        """Waits for the end of a request. Raises its OSError, or OSError (ETIMEDOUT) if none of the
        rank's requests has moved anything for `STUCK_S`."""
        moved = None
        while moved != self._moved:
            moved = self._moved
            try:
                return job.result(STUCK_S)
            except TimeoutError:
                continue
        raise OSError(errno.ETIMEDOUT, f"no request has ended for {STUCK_S:g} s")


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
        jobs = [
            threads.submit(
                self._requests.move,
                transfer,
                fd,
                view[start : start + PART],
                offset + start,
            )
            for start in range(0, len(view), PART)
        ]
        errors = list[OSError]()
        for job in jobs:
            try:
                self._requests.wait(job)
            except OSError as error:
                errors.append(error)
                if error.errno == errno.ETIMEDOUT:
                    break
        if errors:
            raise self._failed(failure, errors[0]) from None

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
