"""Applies context parallelism to a model (its attention cores) and to batches (the tokens that a
rank keeps)."""

from __future__ import annotations

import torch

from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.data.batch import MicroBatch
from trainer.model.attention import SDPA, Core
from trainer.model.dropout import AttentionDropout
from trainer.model.stage import Stage

from .allgather import AllGatherAttention
from .order import chunks
from .ring import RingAttention
from .ulysses import UlyssesAttention


def apply_context_parallel(stage: Stage, method: str, mesh: Mesh, counter: CommCounter) -> None:
    """Give every block of a stage the attention core of `method` (one of `order.METHODS`)."""
    for block in stage.blocks.values():
        block.attn.core = attention_core(method, mesh, counter, block.attn.drop)


def attention_core(
    method: str, mesh: Mesh, counter: CommCounter, drop: AttentionDropout | None = None
) -> Core:
    group = mesh.required_group("cp")
    size = mesh.size("cp")
    index = mesh.index("cp")
    if method == "allgather":
        return AllGatherAttention(group, size, index, counter, drop)
    if method == "ulysses":
        return UlyssesAttention(SDPA(True, drop), group, size, counter)
    return RingAttention(method, group, mesh.ranks("cp"), index, counter, drop)


def shard_batch(batch: MicroBatch, method: str, size: int, index: int) -> MicroBatch:
    """The columns of a micro-batch [b, s] that cp rank `index` of `size` keeps, [b, s / size] on
    the same device.

    Positions, serials and document numbers stay those of the whole sequence.
    """
    if size == 1:
        return batch
    columns = chunks(
        method, batch.tokens.shape[1], size, index
    )  # slices: an index tensor would have to be sent there
    return batch.each(
        lambda tensor: torch.cat(
            [tensor[:, positions.start : positions.stop] for positions in columns], dim=1
        )
    )
