"""Applies context parallelism to a model's attention cores, and cuts batches to the tokens that a
rank keeps."""

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


def apply_context_parallel(
    stage: Stage,
    method: str,
    mesh: Mesh,
    counter: CommCounter,
) -> None:
    """Gives every block of a stage the attention core of `method` (a `CpMethod`)."""
    for block in stage.blocks.values():
        block.attn.core = attention_core(
            method,
            mesh,
            counter,
            block.attn.drop,
            causal=stage.model.causal,
        )


def attention_core(
    method: str,
    mesh: Mesh,
    counter: CommCounter,
    drop: AttentionDropout | None = None,
    *,
    causal: bool = True,
) -> Core:
    """Returns the attention core of `method` for this rank."""
    group = mesh.required_group("cp")
    size = mesh.size("cp")
    index = mesh.index("cp")
    if method == "allgather":
        return AllGatherAttention(group, size, index, counter, drop, causal=causal)
    if method == "ulysses":
        return UlyssesAttention(SDPA(causal, drop), group, size, counter)
    return RingAttention(
        method,
        group,
        mesh.ranks("cp"),
        index,
        counter=counter,
        drop=drop,
        causal=causal,
    )


def shard_batch(batch: MicroBatch, method: str, size: int, index: int) -> MicroBatch:
    """Returns the columns of a micro-batch [b, s] that cp rank `index` of `size` keeps, [b, s /
    size] on the same device.

    Positions, token numbers and document numbers stay those of the whole sequence.
    """
    if size == 1:
        return batch
    # Slices, since an index tensor would have to be copied to the device.
    ranges = chunks(method, batch.tokens.shape[1], size, index)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        columns = [tensor[:, positions.start : positions.stop] for positions in ranges]
        return torch.cat(columns, dim=1)

    return batch.each(keep)
