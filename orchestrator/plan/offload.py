"""What is offloaded, and how optimizer state on a disk passes through memory: in chunks of equal
size, whatever the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from .document import Train

BLOCK = 4096  # bytes; transfers begin and end on multiples of it
STATE_KINDS = 3  # master weights and AdamW's two moments
SLOTS = 4  # chunks of state in memory: two are read, one is computed, one is written
GRADIENTS = 2  # chunks of gradients beside them: one is copied, one is read by the update
ROOMS = 4  # activations in memory on their way to a disk and back


class Offload(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What is kept outside of the device's memory."""

    optimizer: Literal["", "host", "disk"] = (
        ""  # gradients, master weights and moments; "": on the device
    )
    activations: Literal["", "host", "disk"] = ""  # inputs of recomputed layers
    # of "host": an update runs beside the next step, which computes with weights that lack it
    delayed: bool = False
    weights: bool = False  # of "disk": weights and gradients too, in pages of a mapped file
    dir: str = ""  # of "disk"; "": the run folder
    buffer_bytes: int = 0  # of "disk": host memory through which the state passes, on each rank


def offload_of(train: Train) -> Offload:
    """What is outside of the device's memory; nothing where the plan does not say."""
    return train.offload or Offload()


def state_width(precision: str) -> int:
    """Bytes of an element of master weights and moments."""
    return 8 if precision == "fp64" else 4


def chunk_elements(buffer_bytes: int, kinds: int, itemsize: int) -> int:
    """Elements of a chunk for so much host memory on a rank; 0: too little. `kinds`: of state,
    beside the gradient."""
    room = max(0, buffer_bytes - (SLOTS + GRADIENTS) * BLOCK)
    return room // ((SLOTS * kinds + GRADIENTS) * BLOCK) * BLOCK // itemsize


def buffer_size(buffer_bytes: int, kinds: int, itemsize: int) -> int:
    """Bytes of host memory that are used of `buffer_bytes`."""
    chunk = chunk_elements(buffer_bytes, kinds, itemsize) * itemsize
    return (SLOTS + GRADIENTS) * BLOCK + (SLOTS * kinds + GRADIENTS) * chunk
