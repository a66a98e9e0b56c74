"""Memory of the host as a second place for what a device has no room for, and copies between the two.

On CUDA it is page-locked, so that copies run beside computation, in a stream of their own. On CPUs it is the same
memory as everything else: the same code runs, and the memory tracker counts it apart.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trainer.errors import DiskError

#: (descriptor, buffers, offset) -> bytes moved
Transfer = Callable[[int, list[memoryview], int], int]


class HostMemory:
    """What one rank keeps on its host. `tensors` lists all of it."""

    def __init__(self, device: torch.device, takes_gradients: bool = True, weights: Path | None = None):
        """`takes_gradients`: summed gradients go there. `weights`: the folder of a disk where weights and gradients
        themselves are; None: on the device."""
        self.device, self.takes_gradients, self.weights = device, takes_gradients, weights
        self.tensors: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-D tensor on the host. Raises MemoryError where there is no room for it."""
        try:
            made = torch.zeros(numel, dtype=dtype, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            size = numel * dtype.itemsize / 2**30
            raise MemoryError(
                f"no {size:.2f} GiB of host memory for what is offloaded: {error}".split("\n")[0]
            ) from None
        self.tensors.append(made)
        return made

    def device_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-D tensor for weights or gradients of the device, or in pages of the disk. Raises DiskError."""
        if self.weights is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        file = StateFile(self.weights, numel * dtype.itemsize)
        try:
            return file.mapped().view(dtype)
        finally:
            file.close()  # the mapping stays

    def take(self, target: Tensor, source: Tensor, work: torch.distributed.Work | None = None) -> None:
        """Start to copy `source`, of the device, to `target`; `wait` waits for it. `work`: a collective that makes
        `source`, in place of what computes now."""
        if not source.is_cuda:
            target.copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            if work is not None:
                work.wait()
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def wait(self) -> None:
        """Wait until all that was taken is here."""
        if self._stream is not None:
            self._stream.synchronize()

    def settle(self) -> None:
        """Wait until the device has read all that was given to it: the sources may be overwritten here. `take` needs
        no such wait, its stream does."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class StateFile:
    """A file without a name, of a fixed size, whose space is reserved. Errors are DiskErrors, one line each."""

    def __init__(self, folder: Path, size: int):
        """Raises DiskError."""
        self.folder, self.size = folder, size
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.fd, name = tempfile.mkstemp(prefix="state-", suffix=".offload", dir=folder)
            try:
                self.direct = self._open_direct(name)
            finally:
                os.unlink(name)
            if size:
                os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise self._failed("cannot hold the optimizer's state", error) from None

    def _open_direct(self, name: str) -> int:
        """A second descriptor that bypasses the page cache, or the first where the file system has no such thing."""
        try:
            return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.fd

    def _failed(self, what: str, error: OSError) -> DiskError:
        needs = f"{self.size / 2**30:.2f} GiB"
        return DiskError(f"train.offload_dir {self.folder} {what} ({needs}): {error.strerror or error}", error.errno)

    def read(self, into: Tensor, offset: int) -> None:
        """Fill 1-D bytes. Raises DiskError."""
        self._each(into, offset, os.preadv, "cannot be read")

    def write(self, data: Tensor, offset: int) -> None:
        """Write 1-D bytes. Raises DiskError."""
        self._each(data, offset, os.pwritev, "cannot be written")

    def _each(self, data: Tensor, offset: int, transfer: Transfer, what: str) -> None:
        view = data.numpy().data
        try:
            while view:
                done = transfer(self.direct, [view], offset)
                if not done:
                    raise OSError(errno.EIO, "the file is shorter than it was made")
                view, offset = view[done:], offset + done
        except OSError as error:
            raise self._failed(what, error) from None

    def mapped(self) -> Tensor:
        """The file's bytes as a 1-D tensor, in pages that the kernel may drop; released with the tensor."""
        if not self.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)

    def close(self) -> None:
        """Give the space back."""
        for fd in {self.fd, self.direct}:
            os.close(fd)
