"""Memory of the host as a second place for what a device has no room for, and copies between the
two.

On CUDA it is page-locked, so that copies run beside computation, in a stream of their own. On CPUs
it is the same memory as everything else: the same code runs, and the memory tracker counts it
apart.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.plan.offload import BLOCK

from .file import Requests, StateFile

#: Bytes between tensors, which nobody uses. Arrays whose distance is a power of two compete for the
#: same lines of the caches: AdamW on four of them takes 2.3 times as long as on four that are 8 KiB
#: further apart.
APART = 64 << 10
MANY = 1 << 20  # bytes of a tensor that is kept apart


class HostMemory:
    """What one rank keeps on its host. `tensors` lists all of it."""

    def __init__(
        self, device: torch.device, takes_gradients: bool = True, weights: Path | None = None
    ):
        """`takes_gradients`: summed gradients go there. `weights`: the folder of a disk where
        weights and gradients themselves are; None: on the device."""
        self.device = device
        self.takes_gradients = takes_gradients
        self.weights = weights
        self.tensors: list[Tensor] = []
        self.requests = Requests()
        self._stream: torch.cuda.Stream | None = None
        self._files: dict[
            int, StateFile
        ] = {}  # by the address of the pages that are mapped from them

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-D tensor on the host. Raises MemoryError where there is no room for it."""
        try:
            tensor = self._apart(numel, dtype)
        except (RuntimeError, OSError, OverflowError) as error:
            size = numel * dtype.itemsize / 2**30
            raise MemoryError(
                f"no {size:.2f} GiB of host memory for what is offloaded: {error}".split("\n")[0]
            ) from None
        self.tensors.append(tensor)
        return tensor

    def _apart(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros; not in line with the others, if they are many."""
        if self.device.type == "cuda":  # each is rounded up to a power of two
            start = APART // dtype.itemsize * (len(self.tensors) % 4)
            return torch.zeros(start + numel, dtype=dtype, pin_memory=True)[start:]
        if numel * dtype.itemsize < MANY:
            return torch.zeros(numel, dtype=dtype)
        pages = mmap.mmap(
            -1, numel * dtype.itemsize + APART, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        return torch.frombuffer(pages, dtype=dtype, count=numel, offset=APART)

    def blocks(self, size: int) -> Tensor:
        """`size` new bytes on the host that begin on a multiple of `BLOCK`, as transfers past the
        page cache need."""
        buffer = self.zeros(size + BLOCK, torch.uint8)
        start = -buffer.data_ptr() % BLOCK
        return buffer[start : start + size]

    def take(
        self, target: Tensor, source: Tensor, work: torch.distributed.Work | None = None
    ) -> torch.cuda.Event | None:
        """Start to copy `source`, of the device, to `target`; `wait` waits for it. `work`: a
        collective that makes `source`, in place of what computes now. Returned: when it is here."""
        if not source.is_cuda:
            target.copy_(source)
            return None
        stream = self._copies(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            if work is not None:
                work.wait()
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        source.record_stream(stream)
        return event

    def bring(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Start to copy bytes of the host to a tensor of the device, after all that was taken
        before. Returned: when it is there."""
        data = source.view(target.dtype).view(target.shape)
        if not target.is_cuda:
            target.copy_(data)
            return None
        with torch.cuda.stream(self._copies(target.device)):
            target.copy_(data, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def room_for(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A new tensor of the device for `bring`."""
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=dtype, device=self.device)
        with torch.cuda.stream(self._copies(self.device)):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def arrived(self, tensor: Tensor, event: torch.cuda.Event | None) -> Tensor:
        """What was brought, for what computes from now on."""
        if event is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(event)
            tensor.record_stream(compute)
        return tensor

    @staticmethod
    def wait_for(event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()

    def _copies(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def wait(self) -> None:
        """Wait until all that was taken is here."""
        if self._stream is not None:
            self._stream.synchronize()

    def settle(self) -> None:
        """Wait until the device has read all that was given to it: the sources may be overwritten
        here. `take` needs no such wait, its stream does."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # ------------------------------------------------------------------------------ weights and
    #     gradients in pages

    def device_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A new 1-D tensor for weights or gradients of the device, or in pages of the disk. Raises
        DiskError."""
        if self.weights is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        file = StateFile(self.weights, numel * dtype.itemsize, self.requests)
        tensor = file.mapped().view(dtype)
        storage = tensor.untyped_storage()
        self._files[storage.data_ptr()] = file
        weakref.finalize(storage, self._free, storage.data_ptr())
        return tensor

    def _free(self, address: int) -> None:
        self._files.pop(address).close()

    def read(self, source: Tensor, target: Tensor) -> None:
        """Copy 1-D weights or gradients to the host. Pages are read by the kernel in one call, not
        fault by fault. Raises DiskError."""
        file = self._file_of(source)
        if file is None or source.dtype != target.dtype:
            target.copy_(source)
        else:
            file.read(target.view(torch.uint8), _offset(source), cached=True)

    def write(self, data: Tensor, target: Tensor) -> None:
        """Copy from the host to 1-D weights or gradients. Pages that are not in memory are not read
        for it, as a store to each would. Raises DiskError."""
        file = self._file_of(target)
        if file is None or target.dtype != data.dtype:
            target.copy_(data)
        else:
            file.write(data.view(torch.uint8), _offset(target), cached=True)

    def _file_of(self, tensor: Tensor) -> StateFile | None:
        return self._files.get(tensor.untyped_storage().data_ptr()) if self._files else None


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize
