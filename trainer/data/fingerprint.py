"""Fingerprints of samples: one number for the data of a step, which does not depend on which rank
read which sample."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

_MODULUS = 1 << 64


def fingerprint(indices: Sequence[int], windows: Sequence[np.ndarray]) -> int:
    """Returns the sum, modulo 2^64, of 64 bits of the sha256 of each (index in the run's order,
    token ids); signed, as an int64 whose sums wrap around in the same way."""
    total = 0
    for index, window in zip(indices, windows, strict=True):
        digest = hashlib.sha256(index.to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(window, dtype="<u4").data)
        total += int.from_bytes(digest.digest()[:8], "little")
    return signed(total)


def signed(total: int) -> int:
    """Returns `total` modulo 2^64 as an int64."""
    return (total + _MODULUS // 2) % _MODULUS - _MODULUS // 2


def as_text(total: int) -> str:
    """Returns 16 hexadecimal digits."""
    return f"{total % _MODULUS:016x}"
