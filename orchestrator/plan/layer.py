"""One decoder layer as a list of operations.

Every size of a layer is a sum over this list: parameters by how tensor parallelism cuts them,
FLOPs, matrix products. A kind of layer is described here and in the trainer's module of that kind,
and nowhere else; tests compare the two for every model of `conf/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from .document import Mla, Model, Moe

Half = Literal["attention", "mlp"]

#: product: a matrix; norm: a weight per feature, with a LayerNorm's bias; bias: what is added after
#: the sum of a row-parallel product; core: attention's scores and weighted values.
Kind = Literal["product", "norm", "bias", "core"]

#: What ranks of tensor parallelism divide of an operation: its outputs, its inputs, nothing.
Cut = Literal["column", "row", "whole"]


class Operation(NamedTuple):
    """What one module of a layer does with a token."""

    name: str  # of the trainer's module inside its block
    half: Half
    kind: Kind
    inputs: int  # features that it reads
    outputs: int  # features that it writes
    cut: Cut
    bias: bool = False  # a number per output, cut as the outputs are
    routed: bool = False  # of experts: each token passes some, and ranks hold different ones
    matrices: int = 1  # experts have one each
    passed: int = 1  # matrices that a token passes
    shared_outputs: int = 1  # outputs that no two ranks divide: one key-value head
    fused: str = ""  # products with the same name here run as one

    @property
    def weights(self) -> int:
        """Elements of the matrices, or of a norm's or bias's vector; attention's core has none."""
        return 0 if self.kind == "core" else self.matrices * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + self.outputs * self.bias

    @property
    def passed_weights(self) -> int:
        """Weights that one token is multiplied with."""
        return self.passed * self.inputs * self.outputs if self.kind == "product" else 0

    def on_rank(self, tp: int) -> int:
        """Parameters on one of `tp` ranks, of an operation that is not routed.

        With fewer key-value heads than ranks, neighbouring ranks hold copies of the same head.
        """
        if self.cut == "whole" or self.kind == "core":
            return self.parameters
        if self.cut == "row":
            return self.parameters // tp
        return (self.inputs + self.bias) * max(self.outputs // tp, self.shared_outputs)

    def vectors_on_rank(self, tp: int) -> int:
        """Parameters in norms and biases on one of `tp` ranks."""
        if self.kind in ("norm", "bias"):
            return self.parameters
        return self.bias * max(self.outputs // tp, self.shared_outputs)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of each parameter in a block of the trainer."""
        if self.kind == "core":
            return {}
        if self.kind == "bias":
            return {self.name: (self.outputs,)}
        if self.kind == "norm":
            weight: tuple[int, ...] = (self.outputs,)
        elif self.routed:
            weight = (self.matrices, self.outputs, self.inputs)
        else:
            weight = (self.outputs, self.inputs)
        bias = {f"{self.name}.bias": (self.outputs,)} if self.bias else {}
        return {f"{self.name}.weight": weight, **bias}


def layer_moe(model: Model, layer: int) -> Moe | None:
    """The mixture of experts of decoder layer `layer` (0-based); None for a dense layer."""
    return model.moe if model.moe is not None and layer >= model.moe.first_dense_layers else None


class LayerShape(NamedTuple):
    """Everything that the operations of a layer depend on, under the names that `Model` has for
    it. Layers of one kind have equal shapes, so that their list is made once."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    norm: str
    mlp: str
    bias: bool
    qk_norm: bool
    mla: Mla | None
    moe: Moe | None  # of this layer


def layer_shape(model: Model, layer: int) -> LayerShape:
    """The shape of decoder layer `layer` (0-based)."""
    return LayerShape(
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        ffn_hidden=model.ffn_hidden,
        norm=model.norm,
        mlp=model.mlp,
        bias=model.bias,
        qk_norm=bool(model.qk_norm),
        mla=model.mla,
        moe=layer_moe(model, layer),
    )


def layer_operations(model: Model, layer: int) -> tuple[Operation, ...]:
    """The operations of decoder layer `layer` (0-based), in the order in which a token passes
    them."""
    return operations_of(layer_shape(model, layer))


@lru_cache(maxsize=256)
def operations_of(shape: LayerShape) -> tuple[Operation, ...]:
    """The operations of every layer with this shape."""
    attention = _attention(shape) if shape.mla is None else _latent_attention(shape, shape.mla)
    mlp = _mlp(shape, "mlp", shape.ffn_hidden) if shape.moe is None else _experts(shape, shape.moe)
    return (
        _norm(shape, "norm1", "attention"),
        *attention,
        _norm(shape, "norm2", "mlp"),
        *mlp,
    )


def _norm(shape: LayerShape, name: str, half: Half) -> Operation:
    return Operation(
        name, half, "norm", inputs=1, outputs=shape.hidden, cut="whole", bias=shape.norm == "layer"
    )


def _attention(shape: LayerShape) -> Iterator[Operation]:
    """Multi-head attention with grouped key-value heads (arXiv 2305.13245)."""
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    for name, outputs in (("wq", queries), ("wk", keys), ("wv", keys)):
        yield Operation(
            f"attn.{name}",
            "attention",
            "product",
            inputs=hidden,
            outputs=outputs,
            cut="column",
            bias=shape.bias,
            shared_outputs=shape.head_dim,
            fused="attn.wqkv",
        )
    if shape.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Operation(
                f"attn.{name}", "attention", "norm", inputs=1, outputs=shape.head_dim, cut="whole"
            )
    yield Operation("attn.core", "attention", "core", inputs=queries, outputs=queries, cut="column")
    yield Operation("attn.wo", "attention", "product", inputs=queries, outputs=hidden, cut="row")
    if shape.bias:
        yield _output_bias(shape, "attn.out_bias", "attention")


def _latent_attention(shape: LayerShape, mla: Mla) -> Iterator[Operation]:
    """Queries, keys and values are made from latents (DeepSeek-V2, arXiv 2405.04434, section
    2.1)."""
    hidden = shape.hidden
    key = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    key_value = mla.qk_nope_head_dim + mla.v_head_dim

    def product(name: str, inputs: int, outputs: int, cut: Cut, fused: str = "") -> Operation:
        return Operation(
            f"attn.{name}",
            "attention",
            "product",
            inputs=inputs,
            outputs=outputs,
            cut=cut,
            fused=fused,
        )

    def norm(name: str, features: int) -> Operation:
        return Operation(
            f"attn.{name}", "attention", "norm", inputs=1, outputs=features, cut="whole"
        )

    if mla.q_lora_rank:
        yield product("q_down", hidden, mla.q_lora_rank, "whole", fused="attn.down")
        yield norm("q_norm", mla.q_lora_rank)
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield product("kv_down", hidden, latent, "whole", fused="attn.down")
    yield norm("kv_norm", mla.kv_lora_rank)
    yield product("wq", mla.q_lora_rank or hidden, shape.heads * key, "column")
    yield product("wkv", mla.kv_lora_rank, shape.heads * key_value, "column")
    heads = shape.heads * mla.v_head_dim
    yield Operation(
        "attn.core", "attention", "core", inputs=shape.heads * key, outputs=heads, cut="column"
    )
    yield product("wo", heads, hidden, "row")


def _mlp(shape: LayerShape, name: str, width: int) -> Iterator[Operation]:
    """down(act(up(x))), or down(act(gate(x)) * up(x)) (arXiv 2002.05202)."""
    for matrix in ("gate", "up") if shape.mlp == "gated" else ("up",):
        yield Operation(
            f"{name}.{matrix}",
            "mlp",
            "product",
            inputs=shape.hidden,
            outputs=width,
            cut="column",
            bias=shape.bias,
            fused=f"{name}.gate_up",
        )
    yield Operation(f"{name}.down", "mlp", "product", inputs=width, outputs=shape.hidden, cut="row")
    if shape.bias:
        yield _output_bias(shape, f"{name}.out_bias", "mlp")


def _experts(shape: LayerShape, moe: Moe) -> Iterator[Operation]:
    """A router, experts of which a token passes `top_k` (arXiv 1701.06538), and shared experts,
    which every token passes."""
    hidden = shape.hidden
    yield Operation("mlp.router", "mlp", "product", inputs=hidden, outputs=moe.experts, cut="whole")
    if moe.shared_ffn_hidden:
        yield from _mlp(shape, "mlp.shared", moe.shared_ffn_hidden)
    width = moe.ffn_hidden
    up = [("gate", hidden, width), ("up", hidden, width)]
    for matrix, inputs, outputs in (
        *(up if shape.mlp == "gated" else up[1:]),
        ("down", width, hidden),
    ):
        yield Operation(
            f"mlp.experts.{matrix}",
            "mlp",
            "product",
            inputs=inputs,
            outputs=outputs,
            cut="row" if matrix == "down" else "column",
            routed=True,
            matrices=moe.experts,
            passed=moe.top_k,
            fused="" if matrix == "down" else "mlp.experts.gate_up",
        )


def _output_bias(shape: LayerShape, name: str, half: Half) -> Operation:
    return Operation(name, half, "bias", inputs=1, outputs=shape.hidden, cut="whole")
