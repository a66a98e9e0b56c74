"""What is offloaded, and how optimizer state on a disk passes through memory: in chunks of equal size, whatever the
model."""

from __future__ import annotations

from .document import Offload, Train

BLOCK = 4096  # bytes; transfers begin and end on multiples of it
STATE_KINDS = 3  # master weights and AdamW's two moments
SLOTS = 3  # chunks in memory: one is read, one computed, one written


def offload_of(train: Train) -> Offload:
    """What is outside of the device's memory; nothing where the plan does not say."""
    return train.offload or Offload()


def state_width(precision: str) -> int:
    """Bytes of an element of master weights and moments."""
    return 8 if precision == "fp64" else 4


def chunk_elements(buffer_bytes: int, kinds: int, itemsize: int) -> int:
    """Elements of a chunk for so much host memory on a rank; 0: too little. `kinds`: of state, beside the gradient."""
    return max(0, buffer_bytes - SLOTS * BLOCK) // (SLOTS * (kinds + 1) * BLOCK) * BLOCK // itemsize


def buffer_size(buffer_bytes: int, kinds: int, itemsize: int) -> int:
    """Bytes of host memory that are used of `buffer_bytes`."""
    return SLOTS * (BLOCK + (kinds + 1) * chunk_elements(buffer_bytes, kinds, itemsize) * itemsize)
