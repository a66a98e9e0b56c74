"""Copies this rank's state to host memory between two steps, so that it can be written while training continues."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from .format import StatePiece


class Snapshots:
    """Takes one copy after another into the same memory, allocated by the first.

    Copies from a GPU go into page-locked memory; `take` returns when all have arrived.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, pieces: Iterable[StatePiece]) -> list[StatePiece]:
        """The pieces with their data copied. Overwrites the previous copy."""
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
