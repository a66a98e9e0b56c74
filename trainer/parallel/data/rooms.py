"""Buffers of one constant size for gradients that are filled or on their way to their shards, made
when they are first needed and kept: with them the memory of ZeRO-2's messages is the same whatever
the model (CB of ZeRO-R, arXiv 1910.02054, section 6.2), and is not returned to an allocator between
tensors of other sizes (MD, section 6.3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class Rooms:
    """`tensors` lists all rooms, for memory metrics."""

    def __init__(self, size: int, zeros: Callable[..., Tensor]):
        """`size`: bytes of a room. `zeros(numel, dtype=...)` allocates one."""
        self.size = size
        self.tensors = list[Tensor]()
        self._zeros = zeros
        self._free = list[Tensor]()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns zeros in a room of their own."""
        if not self._free:
            room = self._zeros(self.size, dtype=torch.uint8)
            self.tensors.append(room)
            self._free.append(room)
        room = self._free.pop()
        return room[: numel * dtype.itemsize].view(dtype).zero_()

    def give_back(self, tensor: Tensor) -> None:
        """Frees the room of a tensor of `take`. Later work on its device may overwrite it."""
        address = tensor.data_ptr()
        for room in self.tensors:
            if room.data_ptr() == address:
                self._free.append(room)
