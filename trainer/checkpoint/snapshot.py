"""A copy of this rank's state in host memory, taken between two steps, so that it can be written while the next run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from .format import Piece


class Snapshots:
    """Makes one copy after the other, in the same memory: as much as the pieces take, from the first one on.

    Copies from a GPU go into page-locked memory, at the speed of its link, and `take` returns when all have arrived.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """The pieces with their data copied. The copy before must not be needed any more."""
        pieces = list(pieces)
        if [(one.dtype, one.shape) for one in self._kept] != [(one.data.dtype, one.data.shape) for one in pieces]:
            self._kept = [self._room(piece.data) for piece in pieces]
        for kept, piece in zip(self._kept, pieces, strict=True):
            kept.copy_(piece.data, non_blocking=True)
        for device in {piece.data.device for piece in pieces if piece.data.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return [replace(piece, data=kept) for kept, piece in zip(self._kept, pieces, strict=True)]

    @staticmethod
    def _room(data: Tensor) -> Tensor:
        return torch.empty(data.shape, dtype=data.dtype, pin_memory=data.device.type == "cuda")
