"""Memory of the host as a second place for what a device has no room for, and copies between the two.

On CUDA it is page-locked, so that copies run beside computation, in a stream of their own. On CPUs it is the same
memory as everything else: the same code runs, and the memory tracker counts it apart.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostMemory:
    """What one rank keeps on its host. `tensors` lists all of it."""

    def __init__(self, device: torch.device):
        self.device = device
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
