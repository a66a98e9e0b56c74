"""Host memory for state that does not fit on a device, and copies between the two.

On CUDA it is page-locked, so that copies overlap with computation, on a stream of their own. On
CPUs it is ordinary memory: the same code runs, and the memory tracker counts it separately.
"""

from __future__ import annotations

import mmap
import weakref
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.plan.offload import BLOCK

from .file import Requests, StateFile

#: Unused bytes between tensors. Arrays whose distance is a power of two compete for the same cache
#: lines: AdamW on four of them takes 2.3 times as long as on four that are 8 KiB further apart.
GAP_BYTES = 64 << 10
LARGE_BYTES = 1 << 20  # smallest tensor that gets a gap


class HostMemory:
    """One rank's memory on its host. `tensors` lists all of its tensors."""

    def __init__(
        self,
        device: torch.device,
        takes_gradients: bool = True,
        weights: Path | None = None,
    ):
        """`takes_gradients` sends summed gradients to the host. `weights` is the folder of a disk
        that holds weights and gradients, or None if they are in memory."""
        self.device = device
        self.takes_gradients = takes_gradients
        self.weights = weights
        self.tensors: list[Tensor] = []
        self.requests = Requests()
        self._stream: torch.cuda.Stream | None = None
        #: by the address of the pages that are mapped from them
        self._files: dict[int, StateFile] = {}

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates a 1-D tensor on the host. Raises MemoryError if it does not fit."""
        try:
            tensor = self._zeros_with_gap(numel, dtype)
        except (RuntimeError, OSError, OverflowError) as error:
            size = numel * dtype.itemsize / 2**30
            problem = f"no {size:.2f} GiB of host memory for the offloaded state: {error}"
            raise MemoryError(problem.split("\n")[0]) from None
        self.tensors.append(tensor)
        return tensor

    def _zeros_with_gap(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates zeros; a large tensor is not aligned with the others."""
        if self.device.type == "cuda":  # each is rounded up to a power of two
            start = GAP_BYTES // dtype.itemsize * (len(self.tensors) % 4)
            return torch.zeros(start + numel, dtype=dtype, pin_memory=True)[start:]
        if numel * dtype.itemsize < LARGE_BYTES:
            return torch.zeros(numel, dtype=dtype)
        pages = mmap.mmap(
            -1,
            numel * dtype.itemsize + GAP_BYTES,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        )
        return torch.frombuffer(
            pages,
            dtype=dtype,
            count=numel,
            offset=GAP_BYTES,
        )

    def blocks(self, size: int) -> Tensor:
        """Allocates `size` bytes on the host that begin on a multiple of `BLOCK`, as transfers past
        the page cache require."""
        buffer = self.zeros(size + BLOCK, torch.uint8)
        start = -buffer.data_ptr() % BLOCK
        return buffer[start : start + size]

    def take(
        self,
        target: Tensor,
        source: Tensor,
        work: torch.distributed.Work | None = None,
    ) -> torch.cuda.Event | None:
        """Starts to copy `source` from the device to `target`; `wait` waits for it. The copy
        follows `work`, the collective that produces `source`, or else the current stream. Returns
        the event after the copy."""
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
        """Starts to copy bytes of the host to a tensor of the device, after all earlier copies to
        the host. Returns the event after the copy."""
        data = source.view(target.dtype).view(target.shape)
        if not target.is_cuda:
            target.copy_(data)
            return None
        with torch.cuda.stream(self._copies(target.device)):
            target.copy_(data, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return event

    def device_tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocates a tensor of the device as the target of `bring`."""
        if self.device.type != "cuda":
            return torch.empty(shape, dtype=dtype, device=self.device)
        with torch.cuda.stream(self._copies(self.device)):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def arrived(self, tensor: Tensor, event: torch.cuda.Event | None) -> Tensor:
        """Makes the current stream wait for a tensor that `bring` has copied, and returns it."""
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
        """Waits until all copies to the host are complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def settle(self) -> None:
        """Waits until the device has read all that was copied to it, so that the sources on the
        host may be overwritten. `take` does not need this: its stream waits."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # --------------------------------------------------------------------------------------------
    #     weights and gradients in pages of a file

    def device_zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates a 1-D tensor for weights or gradients, on the device or in pages of a file.
        Raises DiskError."""
        if self.weights is None:
            return torch.zeros(numel, dtype=dtype, device=self.device)
        file = StateFile(self.weights, numel * dtype.itemsize, self.requests)
        tensor = file.mapped().view(dtype)
        storage = tensor.untyped_storage()
        self._files[storage.data_ptr()] = file
        weakref.finalize(storage, self._free, storage.data_ptr())
        return tensor

    def shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates a 1-D tensor for shards of weights or gradients that no device computes with:
        in pages of a file, or else on the host. Raises DiskError, MemoryError."""
        if self.weights is None or not numel:
            return self.zeros(numel, dtype)
        return self.device_zeros(numel, dtype)

    def _free(self, address: int) -> None:
        self._files.pop(address).close()

    def read(self, source: Tensor, target: Tensor) -> None:
        """Copies 1-D weights or gradients to the host. The kernel reads pages in one call, not
        fault by fault. Raises DiskError."""
        file = self._file_of(source)
        if file is None or source.dtype != target.dtype:
            target.copy_(source)
        else:
            file.read(target.view(torch.uint8), _offset(source), cached=True)

    def write(self, data: Tensor, target: Tensor) -> None:
        """Copies from the host to 1-D weights or gradients. Unlike a store to the mapped tensor, it
        does not first read the pages that are not in memory. Raises DiskError."""
        file = self._file_of(target)
        if file is None or target.dtype != data.dtype:
            target.copy_(data)
        else:
            file.write(data.view(torch.uint8), _offset(target), cached=True)

    def _file_of(self, tensor: Tensor) -> StateFile | None:
        return self._files.get(tensor.untyped_storage().data_ptr()) if self._files else None


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize
