"""Fingerprints of samples: what a step was trained on, as one number that does not depend on who
read which sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_MODULUS = 1 << 64


def fingerprint(indices: Sequence[int], windows: Sequence[np.ndarray]) -> int:
    """The sum, modulo 2^64, of 64 bits of the sha256 of each (place in the run's order, token ids);
    signed, so that it is an int64 whose sums wrap around the same way."""
    total = 0
    for index, window in zip(indices, windows, strict=True):
        digest = hashlib.sha256(index.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(window, dtype="<u4").data)
        total += int.from_bytes(digest.digest()[:8], "little")
    return signed(total)


def signed(total: int) -> int:
    """`total` modulo 2^64 as an int64."""
    return (total + _MODULUS // 2) % _MODULUS - _MODULUS // 2


def as_text(total: int) -> str:
    """16 hexadecimal digits."""
    return f"{total % _MODULUS:016x}"
