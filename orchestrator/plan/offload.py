"""The options of offloading, and the chunks in which optimizer state on a disk passes through
memory. All chunks have the same size, whatever the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from .document import Parallel, Train

BLOCK = 4096  # bytes; transfers begin and end on multiples of it
STATE_KINDS = 3  # master weights and AdamW's two moments
SLOTS = 4  # chunks of state in memory: two are read, one is computed, one is written
GRADIENTS = 2  # chunks of gradients in memory: one is copied, one is read by the update
ROOMS = 4  # activations in memory on their way to a disk and back
#: Bytes; inputs in a reserved buffer begin on multiples of it, as an allocator's tensors do.
SLOT_ALIGN = 256


class Offload(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The tensors that are kept outside of the device's memory."""

    #: place of gradients, master weights and moments; "": on the device
    optimizer: Literal["", "host", "disk"] = ""
    activations: Literal["", "host", "disk"] = ""  # place of the inputs of recomputed layers
    #: for "host": an update runs during the next step, which computes with the older weights
    delayed: bool = False
    #: also weights and gradients: on the host with ZeRO-3, or in pages of a mapped file
    weights: bool = False
    dir: str = ""  # for "disk"; "": the run folder
    buffer_bytes: int = 0  # for "disk": host memory per rank through which the state passes


def offload_of(train: Train) -> Offload:
    """The plan's offloading; no offloading if the plan has none."""
    return train.offload or Offload()


def keeps_shards_away(offload: Offload, parallel: Parallel) -> bool:
    """Whether the shards of ZeRO-3 are outside the device's memory between uses."""
    replicas = parallel.dp * parallel.cp * parallel.ep
    shards = min(replicas, parallel.zero_group or replicas)
    return offload.weights and parallel.zero >= 3 and shards > 1


def comm_buffer_of(train: Train) -> int | None:
    """The most bytes of a bucket of gradients or weights; None if nothing bounds it."""
    return train.comm_buffer_bytes if isinstance(train.comm_buffer_bytes, int) else None


def state_width(precision: str) -> int:
    """Bytes per element of master weights and moments."""
    return 8 if precision == "fp64" else 4


def chunk_elements(buffer_bytes: int, kinds: int, itemsize: int) -> int:
    """The elements of a chunk if a rank has `buffer_bytes` of host memory; 0 if that is too little.
    `kinds`: number of kinds of state, without the gradient."""
    chunk_bytes = max(0, buffer_bytes - (SLOTS + GRADIENTS) * BLOCK)
    return chunk_bytes // ((SLOTS * kinds + GRADIENTS) * BLOCK) * BLOCK // itemsize


def buffer_size(buffer_bytes: int, kinds: int, itemsize: int) -> int:
    """Bytes of `buffer_bytes` that the chunks occupy."""
    chunk = chunk_elements(buffer_bytes, kinds, itemsize) * itemsize
    return (SLOTS + GRADIENTS) * BLOCK + (SLOTS * kinds + GRADIENTS) * chunk


def slot_bytes(size: int) -> int:
    """Bytes of a reserved buffer for one input of `size` bytes."""
    return -(-size // SLOT_ALIGN) * SLOT_ALIGN
