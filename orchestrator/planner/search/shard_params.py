"""The parameters on one rank, for all meshes that cut tensors and experts alike."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from orchestrator.cost.model.layers import (
    dense_on_rank,
    embedding_params,
    head_params,
    layer_params,
    prediction_params,
    sample_layers,
)
from orchestrator.plan.document import Model
from orchestrator.plan.flops import prediction_blocks
from orchestrator.plan.ranks import embeds_at_both_ends

from .pipeline_shapes import RankShape


class ShardParams(NamedTuple):
    """Parameters on one rank for given tp and expert mesh (`stages.rank_parameters`)."""

    # parameters of a dense layer, and of an MoE layer without its routed experts
    dense: tuple[int, int]
    experts: int  # routed experts of an MoE layer
    first: int  # first stage, outside its layers
    last: int  # last stage, outside its layers
    single_last: int  # the last stage if it is the first one too

    def on_rank(self, rank: RankShape, single: bool) -> tuple[int, int]:
        """Returns the (dense, expert) parameters of a pipeline rank.

        `single` marks a pipeline of one stage.
        """
        dense = rank.dense * self.dense[0] + rank.moe * self.dense[1] + rank.table * self.first
        last = self.single_last if single or (rank.head and rank.table) else self.last
        return dense + rank.head * last, rank.moe * self.experts


def shard_params(model: Model, tp: int, experts: tuple[int, int]) -> ShardParams:
    """Returns the parameters on one rank. `experts` is (etp, ep) of the expert mesh."""
    dense, moe = sample_layers(model)
    dense_params, moe_params = (
        0 if layer is None else dense_on_rank(model, layer, tp) for layer in (dense, moe)
    )
    routed = 0 if moe is None else layer_params(model, moe).experts // prod(experts)
    table = -(-model.vocab // tp) * model.hidden
    head = head_params(model, tp) + prediction_blocks(model) * prediction_params(model)
    single_last = head + (0 if model.tied_embeddings else table)
    return ShardParams(
        dense=(dense_params, moe_params),
        experts=routed,
        first=table + embedding_params(model)[1],
        last=single_last + (table if embeds_at_both_ends(model) else 0),
        single_last=single_last,
    )
