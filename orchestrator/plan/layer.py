"""One decoder layer as a list of operations.

Every size of a layer is a sum over this list: parameters by how tensor parallelism cuts them,
FLOPs, matrix products. A kind of layer is described here and in the trainer's module of that kind,
and nowhere else; tests compare the two for every model of `conf/`.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def layer_operations(model: Model, layer: int) -> tuple[Operation, ...]:
    """The operations of decoder layer `layer` (0-based), in the order in which a token passes
    them."""
    moe = layer_moe(model, layer)
    attention = _attention(model) if model.mla is None else _latent_attention(model, model.mla)
    feed_forward = _mlp(model, "mlp", model.ffn_hidden) if moe is None else _experts(model, moe)
    return (
        _norm(model, "norm1", "attention"),
        *attention,
        _norm(model, "norm2", "mlp"),
        *feed_forward,
    )


def _norm(model: Model, name: str, half: Half) -> Operation:
    return Operation(
        name, half, "norm", inputs=1, outputs=model.hidden, cut="whole", bias=model.norm == "layer"
    )


def _attention(model: Model) -> Iterator[Operation]:
    """Multi-head attention with grouped key-value heads (arXiv 2305.13245)."""
    hidden = model.hidden
    queries = model.heads * model.head_dim
    keys = model.kv_heads * model.head_dim
    for name, outputs in (("wq", queries), ("wk", keys), ("wv", keys)):
        yield Operation(
            f"attn.{name}",
            "attention",
            "product",
            inputs=hidden,
            outputs=outputs,
            cut="column",
            bias=model.bias,
            shared_outputs=model.head_dim,
            fused="attn.wqkv",
        )
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Operation(
                f"attn.{name}", "attention", "norm", inputs=1, outputs=model.head_dim, cut="whole"
            )
    yield Operation("attn.core", "attention", "core", inputs=queries, outputs=queries, cut="column")
    yield Operation("attn.wo", "attention", "product", inputs=queries, outputs=hidden, cut="row")
    if model.bias:
        yield _output_bias(model, "attn.out_bias", "attention")


def _latent_attention(model: Model, mla: Mla) -> Iterator[Operation]:
    """Queries, keys and values are made from latents (DeepSeek-V2, arXiv 2405.04434, section
    2.1)."""
    hidden = model.hidden
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
    yield product("wq", mla.q_lora_rank or hidden, model.heads * key, "column")
    yield product("wkv", mla.kv_lora_rank, model.heads * key_value, "column")
    heads = model.heads * mla.v_head_dim
    yield Operation(
        "attn.core", "attention", "core", inputs=model.heads * key, outputs=heads, cut="column"
    )
    yield product("wo", heads, hidden, "row")


def _mlp(model: Model, name: str, width: int) -> Iterator[Operation]:
    """down(act(up(x))), or down(act(gate(x)) * up(x)) (arXiv 2002.05202)."""
    for matrix in ("gate", "up") if model.mlp == "gated" else ("up",):
        yield Operation(
            f"{name}.{matrix}",
            "mlp",
            "product",
            inputs=model.hidden,
            outputs=width,
            cut="column",
            bias=model.bias,
            fused=f"{name}.gate_up",
        )
    yield Operation(f"{name}.down", "mlp", "product", inputs=width, outputs=model.hidden, cut="row")
    if model.bias:
        yield _output_bias(model, f"{name}.out_bias", "mlp")


def _experts(model: Model, moe: Moe) -> Iterator[Operation]:
    """A router, experts of which a token passes `top_k` (arXiv 1701.06538), and shared experts,
    which every token passes."""
    hidden = model.hidden
    yield Operation("mlp.router", "mlp", "product", inputs=hidden, outputs=moe.experts, cut="whole")
    if moe.shared_ffn_hidden:
        yield from _mlp(model, "mlp.shared", moe.shared_ffn_hidden)
    width = moe.ffn_hidden
    up = [("gate", hidden, width), ("up", hidden, width)]
    for matrix, inputs, outputs in (
        *(up if model.mlp == "gated" else up[1:]),
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


def _output_bias(model: Model, name: str, half: Half) -> Operation:
    return Operation(name, half, "bias", inputs=1, outputs=model.hidden, cut="whole")
