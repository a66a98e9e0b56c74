"""One decoder layer as a list of operations.

Every size of a layer is a sum over this list: parameters by how tensor parallelism cuts them,
FLOPs, matrix products, the tensors that backward reads, what recomputation drops of them, what the
ranks of tensor parallelism send. A kind of layer is one function in `KINDS` here and one module in
`trainer.model.block.BLOCKS`, and is described nowhere else; tests compare the two for every model
of `conf/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from .document import Mla, Model, Moe

Half = Literal["attention", "mlp"]

#: product: a matrix; router: the matrix that scores experts, in fp32; norm: a weight per feature,
#: with a LayerNorm's bias; bias: what is added after the sum of a row-parallel product; core:
#: attention's scores and weighted values; activation: of an MLP.
Kind = Literal["product", "router", "norm", "bias", "core", "activation"]

#: What ranks of tensor parallelism divide of an operation: its outputs, its inputs, nothing.
Cut = Literal["column", "row", "whole"]

#: What wrote a tensor. residual: the state with which a half or its norm begins; output: the sum of
#: a half's last product, which tensor parallelism completes; scores: attention, of each query with
#: each key; copy: a rearrangement.
Writer = Literal["residual", "norm", "product", "core", "scores", "activation", "output", "copy"]

#: What a rank of tensor parallelism keeps of a tensor. sequence: its shard of the sequence;
#: regathered: its shard too, although a product reads the whole sequence, which backward gathers
#: again; whole: the whole sequence; columns: the features of its heads or columns.
Spread = Literal["sequence", "regathered", "whole", "columns"]


class SavedTensor(NamedTuple):
    """A tensor that the backward of an operation reads. Operations that read the same tensor name
    it alike, and it is held once."""

    tensor: str
    features: int  # per token, on all ranks together
    spread: Spread
    writer: Writer
    shared: int = 1  # features that no two ranks divide: one key-value head
    per_key: bool = False  # there are so many features per key that a query attends to

    def read_on_rank(self, tp: int, shards: int) -> float:
        """Features per token that the operation reads on one of `tp` ranks, of which `shards` share
        the sequence."""
        if self.spread == "columns":
            return max(self.features / tp, self.shared)
        return self.features / shards if self.spread == "sequence" else self.features


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
    saves: tuple[SavedTensor, ...] = ()

    @property
    def is_matrix(self) -> bool:
        return self.kind in ("product", "router")

    @property
    def has_parameters(self) -> bool:
        return self.kind not in ("core", "activation")

    @property
    def keeps_scores(self) -> bool:
        """Whether backward reads a number of each query with each key, as no fused kernel needs."""
        return any(tensor.writer == "scores" for tensor in self.saves)

    @property
    def weights(self) -> int:
        """Elements of the matrices, or of a norm's or bias's vector."""
        return self.matrices * self.inputs * self.outputs if self.has_parameters else 0

    @property
    def parameters(self) -> int:
        return self.weights + self.outputs * self.bias

    @property
    def passed_weights(self) -> int:
        """Weights that one token is multiplied with."""
        return self.passed * self.inputs * self.outputs if self.is_matrix else 0

    def inputs_on_rank(self, ranks: int) -> float:
        """Features that one of `ranks` ranks, which cut the operation, reads."""
        return self.inputs / ranks if self.cut == "row" else self.inputs

    def outputs_on_rank(self, ranks: int) -> float:
        """Features that one of `ranks` ranks, which cut the operation, writes."""
        if self.cut == "column":
            return max(self.outputs / ranks, self.shared_outputs)
        return self.outputs

    def on_rank(self, tp: int) -> int:
        """Parameters on one of `tp` ranks, of an operation that is not routed.

        With fewer key-value heads than ranks, neighbouring ranks hold copies of the same head.
        """
        if self.cut == "whole" or not self.has_parameters:
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
        if not self.has_parameters:
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
    kind: str  # of `KINDS`
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
        kind=layer_kind(model),
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
    return tuple(KINDS[shape.kind](shape))


def pre_norm(shape: LayerShape) -> tuple[Operation, ...]:
    """Attention and MLP behind a norm each (GPT-2; Xiong et al. 2020, arXiv 2002.04745)."""
    attention = _attention(shape) if shape.mla is None else _latent_attention(shape, shape.mla)
    mlp = _dense(shape) if shape.moe is None else _experts(shape, shape.moe)
    return (
        hidden_norm(shape, "norm1", "attention"),
        *attention,
        hidden_norm(shape, "norm2", "mlp"),
        *mlp,
    )


def post_norm(shape: LayerShape) -> Iterator[Operation]:
    """Attention and MLP with a norm each behind the sum of their output and their input (Vaswani et
    al. 2017, arXiv 1706.03762; BERT, arXiv 1810.04805)."""
    halves: dict[str, Half] = {"norm1": "attention", "norm2": "mlp"}
    inputs = {"norm1": "input", "norm2": "norm1"}  # what a half reads in place of its norm
    for norm, half in halves.items():
        for operation in pre_norm(shape):
            if operation.half == half and operation.name != norm:
                saves = (
                    saved._replace(tensor=inputs[norm], writer="residual")
                    if saved.tensor == norm
                    else saved
                    for saved in operation.saves
                )
                yield operation._replace(saves=tuple(saves))
        yield hidden_norm(shape, norm, half)


#: The kind of layers of a model that names none.
PRE_NORM = "pre_norm"
POST_NORM = "post_norm"
#: The kinds of layers that a model can name (`model.block`).
KINDS: dict[str, Callable[[LayerShape], Iterable[Operation]]] = {
    PRE_NORM: pre_norm,
    POST_NORM: post_norm,
}


def layer_kind(model: Model) -> str:
    """The kind of a model's layers, of `KINDS`."""
    return model.block or PRE_NORM


def hidden_norm(
    shape: LayerShape,
    name: str,
    half: Half,
    normed: Writer = "residual",
) -> Operation:
    """The norm of a hidden state; `normed`: what wrote that state. A half begins with one."""
    return Operation(
        name,
        half,
        "norm",
        inputs=1,
        outputs=shape.hidden,
        cut="whole",
        bias=shape.norm == "layer",
        saves=(SavedTensor(f"input of {name}", shape.hidden, "sequence", normed),),
    )


def _attention(shape: LayerShape) -> Iterator[Operation]:
    """Multi-head attention with grouped key-value heads (arXiv 2305.13245)."""
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    widths = {"q": queries, "k": keys, "v": keys}
    for name, outputs in widths.items():
        yield Operation(
            f"attn.w{name}",
            "attention",
            "product",
            inputs=hidden,
            outputs=outputs,
            cut="column",
            bias=shape.bias,
            shared_outputs=shape.head_dim,
            fused="attn.wqkv",
            saves=(SavedTensor("norm1", hidden, "regathered", "norm"),),
        )

    def heads(name: str, writer: Writer) -> SavedTensor:
        return SavedTensor(name, widths[name[-1]], "columns", writer, shared=shape.head_dim)

    if shape.qk_norm:
        for name in ("q", "k"):
            yield Operation(
                f"attn.{name}_norm",
                "attention",
                "norm",
                inputs=1,
                outputs=shape.head_dim,
                cut="whole",
                saves=(heads(f"attn.w{name}", "product"),),
            )
    normed: Writer = "norm" if shape.qk_norm else "product"
    output = SavedTensor("attn.core", queries, "columns", "core")
    yield Operation(
        "attn.core",
        "attention",
        "core",
        inputs=queries,
        outputs=queries,
        cut="column",
        saves=(heads("q", normed), heads("k", normed), heads("v", "product"), output),
    )
    yield Operation(
        "attn.wo",
        "attention",
        "product",
        inputs=queries,
        outputs=hidden,
        cut="row",
        saves=(output,),
    )
    if shape.bias:
        yield _output_bias(shape, "attn.out_bias", "attention")


def _latent_attention(shape: LayerShape, mla: Mla) -> Iterator[Operation]:
    """Queries, keys and values are made from latents (DeepSeek-V2, arXiv 2405.04434, section
    2.1).

    Each rank makes the latents of its shard of the sequence; the ranks gather the latents. The
    kernel needs values as wide as keys, so its output is cut to the width of values.
    """
    hidden = shape.hidden
    key = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    key_value = mla.qk_nope_head_dim + mla.v_head_dim
    keys = shape.heads * key
    values = shape.heads * mla.v_head_dim

    shard = SavedTensor("norm1", hidden, "sequence", "norm")
    # The ranks gather one tensor, which holds all that queries, keys and values are made of.
    queries_of = SavedTensor("gathered, of queries", mla.q_lora_rank or hidden, "whole", "norm")
    if mla.q_lora_rank:
        yield _latent_product("q_down", hidden, mla.q_lora_rank, "whole", shard, fused="attn.down")
        latent_queries = SavedTensor("attn.q_down", mla.q_lora_rank, "sequence", "product")
        yield _latent_norm("q_norm", mla.q_lora_rank, latent_queries)
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    yield _latent_product("kv_down", hidden, latent, "whole", shard, fused="attn.down")
    yield _latent_norm(
        "kv_norm", mla.kv_lora_rank, SavedTensor("attn.kv_down", latent, "sequence", "product")
    )
    yield _latent_product("wq", queries_of.features, keys, "column", queries_of)
    keys_of = SavedTensor("gathered, of keys and values", latent, "whole", "norm")
    yield _latent_product("wkv", mla.kv_lora_rank, shape.heads * key_value, "column", keys_of)
    output = SavedTensor("attn.core", keys, "columns", "core")
    core_saves = tuple(SavedTensor(name, keys, "columns", "copy") for name in ("q", "k", "v"))
    yield Operation(
        "attn.core",
        "attention",
        "core",
        inputs=keys,
        outputs=values,
        cut="column",
        saves=(*core_saves, output),
    )
    narrowed = SavedTensor("attn.core, cut", values, "columns", "copy")
    yield _latent_product(
        "wo", values, hidden, "row", output if mla.v_head_dim == key else narrowed
    )


def _latent_product(
    name: str, inputs: int, outputs: int, cut: Cut, saved: SavedTensor, fused: str = ""
) -> Operation:
    """A matrix of latent attention."""
    return Operation(
        f"attn.{name}",
        "attention",
        "product",
        inputs=inputs,
        outputs=outputs,
        cut=cut,
        fused=fused,
        saves=(saved,),
    )


def _latent_norm(name: str, features: int, saved: SavedTensor) -> Operation:
    """A norm of latents."""
    return Operation(
        f"attn.{name}",
        "attention",
        "norm",
        inputs=1,
        outputs=features,
        cut="whole",
        saves=(saved,),
    )


def _dense(shape: LayerShape) -> Iterator[Operation]:
    """The MLP of a layer without experts."""
    gathered = SavedTensor("norm2", shape.hidden, "regathered", "norm")
    return _mlp(shape, "mlp", shape.ffn_hidden, gathered)


def _mlp(
    shape: LayerShape,
    name: str,
    width: int,
    tokens: SavedTensor,
    experts: int = 0,
    passed: int = 1,
) -> Iterator[Operation]:
    """down(act(up(x))), or down(act(gate(x)) * up(x)) (arXiv 2002.05202), of `tokens`.

    It is one MLP, or as many `experts` without biases, of which a token passes `passed`.
    """
    routed = experts > 0
    matrices = experts or 1
    columns = ("gate", "up") if shape.mlp == "gated" else ("up",)
    for column in columns:
        yield Operation(
            f"{name}.{column}",
            "mlp",
            "product",
            inputs=shape.hidden,
            outputs=width,
            cut="column",
            bias=shape.bias and not routed,
            routed=routed,
            matrices=matrices,
            passed=passed,
            fused=f"{name}.gate_up",
            saves=(tokens,),
        )
    yield Operation(
        f"{name}.activation",
        "mlp",
        "activation",
        inputs=len(columns) * width,
        outputs=width,
        cut="column",
        routed=routed,
        saves=tuple(
            SavedTensor(f"{name}.{column}", width, "columns", "product") for column in columns
        ),
    )
    yield Operation(
        f"{name}.down",
        "mlp",
        "product",
        inputs=width,
        outputs=shape.hidden,
        cut="row",
        routed=routed,
        matrices=matrices,
        passed=passed,
        saves=(SavedTensor(f"{name}.activation", width, "columns", "activation"),),
    )
    if shape.bias and not routed:
        yield _output_bias(shape, f"{name}.out_bias", "mlp")


def _experts(shape: LayerShape, moe: Moe) -> Iterator[Operation]:
    """A router, experts of which a token passes `top_k` (arXiv 1701.06538), and shared experts,
    which every token passes."""
    hidden = shape.hidden
    yield Operation(
        "mlp.router",
        "mlp",
        "router",
        inputs=hidden,
        outputs=moe.experts,
        cut="whole",
        saves=(SavedTensor("norm2", hidden, "sequence", "norm"),),
    )
    if moe.shared_ffn_hidden:
        # Shared experts keep the gathered sequence.
        gathered = SavedTensor("norm2", hidden, "whole", "norm")
        yield from _mlp(shape, "mlp.shared", moe.shared_ffn_hidden, gathered)
    routed = SavedTensor("routed tokens", hidden, "whole", "copy")
    yield from _mlp(
        shape,
        "mlp.experts",
        moe.ffn_hidden,
        routed,
        experts=moe.experts,
        passed=moe.top_k,
    )


def _output_bias(shape: LayerShape, name: str, half: Half) -> Operation:
    """The bias that is added after the sum of a row-parallel product."""
    return Operation(name, half, "bias", inputs=1, outputs=shape.hidden, cut="whole")
