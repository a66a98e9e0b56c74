"""Parameters and FLOPs of a transformer's layers, from the model's shapes.

Parameters are exact integers. The FLOP conventions live in `orchestrator.plan.flops`, which the
trainer's MFU shares.

Sources: Narayanan et al. 2021 (arXiv 2104.04473) equations 2 and 3; Korthikanti et al. 2022 (arXiv
2205.05198) appendix A; Shazeer 2019 (arXiv 1911.02150) for shared key-value heads; DeepSeek-V3
(arXiv 2412.19437) for MLA and MoE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from msgspec import UNSET, Struct, structs

from orchestrator.config.schema import ModelSpec, MoeSpec
from orchestrator.plan import flops
from orchestrator.plan.document import Model, Moe, Train
from orchestrator.plan.flops import prediction_blocks
from orchestrator.plan.layer import (
    POST_NORM,
    LayerShape,
    layer_kind,
    layer_moe,
    layer_operations,
    layer_shape,
    operations_of,
)


def resolve(spec: ModelSpec) -> Model:
    """Returns the plan's model: derived shapes are filled in and the parameters counted.

    Derived shapes are `kv_heads` and `head_dim`.
    """
    shape = structs.asdict(spec) | {
        "kv_heads": spec.kv_heads or spec.heads,
        "head_dim": spec.head_dim or spec.hidden // spec.heads,
        "parameters": 0,
        "qk_norm": spec.qk_norm or UNSET,
        "moe": spec.moe and _moe(spec.moe),
        "yarn": spec.yarn or UNSET,
        "mtp": spec.mtp if spec.mtp and spec.mtp.depth else UNSET,
        "block": spec.block or UNSET,
        "head_transform": spec.head_transform or UNSET,
    }
    model = Model(**shape)
    return structs.replace(model, parameters=parameter_count(model))


def _moe(spec: MoeSpec) -> Moe:
    """Returns the plan's mixture of experts."""
    shape = structs.asdict(spec)
    return Moe(**{name: value for name, value in shape.items() if value is not None})


DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class LayerParams(Struct, frozen=True):
    """Trainable parameters of one decoder layer, by how parallelism divides them."""

    attention: int  # matmul weights and their column biases: divided by tp
    ffn: int  # dense MLP and shared experts: divided by tp
    experts: int  # all routed experts together: divided by tp * ep
    replicated: int  # norms, router, row biases, MLA down-projections: a copy on every tp rank

    @property
    def total(self) -> int:
        """All trainable parameters of the layer."""
        return self.attention + self.ffn + self.experts + self.replicated


def norm_params(model: Model) -> int:
    """Returns the parameters of one normalisation.

    RMSNorm has a weight, LayerNorm a weight and a bias.
    """
    return model.hidden * (1 if model.norm == "rms" else 2)


def dense_and_moe(model: Model, start: int, stop: int) -> tuple[int, int]:
    """Returns (dense layers, MoE layers) among the layers [start, stop).

    All layers of a kind are equal. The blocks behind the last layer predict further tokens and are
    of its kind.
    """
    moe = model.moe
    if moe is None and stop >= start:
        return stop - start, 0  # a short cut, because each layout comes here a hundred times
    first = (
        stop if moe is None or moe.first_dense_layers >= model.layers else moe.first_dense_layers
    )
    dense = max(0, min(stop, first) - start)
    return dense, stop - start - dense


def sample_layers(model: Model) -> tuple[int | None, int | None]:
    """Returns the index of (a dense layer, an MoE layer) that represents all of its kind.

    The index is None if the model has no such layer.
    """
    dense, moe = dense_and_moe(model, 0, model.layers)
    first_dense = 0 if dense else None
    last_moe = model.layers - 1 if moe else None
    return first_dense, last_moe


def layer_params(model: Model, layer: int) -> LayerParams:
    """Returns the trainable parameters of decoder layer `layer` (0-based)."""
    return _params_of(layer_shape(model, layer))


@lru_cache(maxsize=256)
def _params_of(shape: LayerShape) -> LayerParams:
    counts = Counter[str]()
    for operation in operations_of(shape):
        share: str = operation.half
        if operation.cut == "whole":
            share = "replicated"
        elif operation.routed:
            share = "experts"
        counts[share] += operation.parameters
    return LayerParams(
        attention=counts["attention"],
        ffn=counts["mlp"],
        experts=counts["experts"],
        replicated=counts["replicated"],
    )


def dense_on_rank(model: Model, layer: int, tp: int) -> int:
    """Returns the parameters of a layer without routed experts on one of `tp` ranks."""
    operations = layer_operations(model, layer)
    return sum(operation.on_rank(tp) for operation in operations if not operation.routed)


def vectors_on_rank(model: Model, layer: int, tp: int) -> int:
    """Returns the parameters of `dense_on_rank` that are in norms and biases."""
    operations = layer_operations(model, layer)
    return sum(operation.vectors_on_rank(tp) for operation in operations if not operation.routed)


def expert_params(model: Model) -> int:
    """Returns the parameters of all routed experts."""
    _, moe = sample_layers(model)
    return (
        0
        if moe is None
        else dense_and_moe(model, 0, model.layers)[1] * layer_params(model, moe).experts
    )


def embedding_params(model: Model) -> tuple[int, int]:
    """Returns the parameters of (token table, position table with the norm of embeddings).

    The token table is divided by tp along the vocabulary, the others are replicated.
    """
    positions = model.max_seq_len * model.hidden if model.position == "learned" else 0
    return model.vocab * model.hidden, positions + embedding_norm_params(model)


def embedding_norm_params(model: Model) -> int:
    """Returns the parameters of the norm of embeddings, which blocks without a first norm need."""
    return norm_params(model) if layer_kind(model) == POST_NORM else 0


def whole_head_params(model: Model) -> int:
    """Returns the parameters behind the last layer that are whole on every rank.

    These are the last norm and, before it, the transform.
    """
    transform = model.hidden * (model.hidden + 1) if model.head_transform else 0
    return norm_params(model) + transform


def head_params(model: Model, tp: int) -> int:
    """Returns the parameters behind the last layer on one of `tp` ranks, without the table.

    The bias of the vocabulary is cut like the table.
    """
    bias = -(-model.vocab // tp) if model.head_transform else 0
    return whole_head_params(model) + bias


def params_outside_layers(model: Model, tp: int) -> int:
    """Returns the parameters outside the layers, on a rank that holds the whole model.

    These are the tables, padded for tp, and what is behind the last layer.
    """
    table = -(-model.vocab // tp) * model.hidden
    positions = embedding_params(model)[1]
    return table * (1 if model.tied_embeddings else 2) + positions + head_params(model, tp)


def prediction_params(model: Model) -> int:
    """Returns the parameters of one module that predicts a further token, outside its block.

    These are three norms and a projection.
    """
    return 3 * norm_params(model) + 2 * model.hidden**2


def parameter_count(model: Model | ModelSpec) -> int:
    """Returns the number of all parameters, as published figures count them.

    These are layers, embeddings, final norm, head and `extra_params`. For GPT-style models this is
    N = h*V + L*(12 h^2 + 13 h) + 2h (+ s_max*h), planning.md C1.
    """
    if isinstance(model, ModelSpec):
        return resolve(model).parameters
    table, positions = embedding_params(model)
    head = 0 if model.tied_embeddings else table
    counts = zip(dense_and_moe(model, 0, model.layers), sample_layers(model), strict=True)
    layers = sum(
        layer_count * layer_params(model, layer).total
        for layer_count, layer in counts
        if layer is not None
    )
    if ahead := prediction_blocks(model):
        layers += ahead * (layer_params(model, model.layers - 1).total + prediction_params(model))
    outside = positions + head_params(model, 1) + sum(model.extra_params.values())
    return table + layers + head + outside


# ------------------------------------------------------------------------------------------ FLOPs


class LayerFlops(Struct, frozen=True):
    """Forward FLOPs of one layer and one token."""

    attention_gemm: float
    attention_core: float  # scores and weighted values; halved when causal
    ffn_gemm: float

    @property
    def total(self) -> float:
        """All forward FLOPs of the layer per token."""
        return self.attention_gemm + self.attention_core + self.ffn_gemm


def layer_flops(model: Model, layer: int, seq_len: int) -> LayerFlops:
    """Returns the forward FLOPs per token of decoder layer `layer` (0-based).

    `seq_len` is the sequence length.
    """
    core = flops.attention_core_flops(model, seq_len) / model.layers
    return LayerFlops(
        2.0 * flops.attention_weights(model), core, 2.0 * flops.mlp_weights(model, layer)
    )


def head_flops(model: Model) -> float:
    """Returns the forward FLOPs per token behind the last layer: the transform, and the output
    projection, tied or not."""
    return 2.0 * flops.head_weights(model)


def layer_groups(model: Model, train: Train, ranges: Sequence[range]) -> list[tuple[int, str, int]]:
    """Returns the numbers of layers in `ranges` by kind and recomputation mode.

    Each entry is (kind as index into `sample_layers`, recomputation mode, number).
    """
    if train.recompute != "budget":
        counts = zip(*(dense_and_moe(model, r.start, r.stop) for r in ranges), strict=True)
        return [(kind, train.recompute, sum(numbers)) for kind, numbers in enumerate(counts)]
    # Modes that are not resolved yet count as the most recomputation.
    modes = train.recompute_layers or ["full"] * model.layers
    layers = [min(layer, model.layers - 1) for r in ranges for layer in r]
    groups = Counter((int(layer_moe(model, layer) is not None), modes[layer]) for layer in layers)
    return [(kind, mode, n) for (kind, mode), n in groups.items()]
