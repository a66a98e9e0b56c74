"""One block of the decoder or encoder.

Attention and MLP are each a region between two modules that are identities here: `attn_in` and
`attn_out`, `mlp_in` and `mlp_out`. Tensor parallelism replaces them: the first module makes the
input of column-parallel linears, the second sums the partial results of row-parallel ones. Output
biases are added after the sum, otherwise tp ranks would add them tp times.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from orchestrator.plan.document import Model
from orchestrator.plan.layer import POST_NORM, PRE_NORM, layer_kind, layer_moe

from .attention import Attention
from .documents import Documents
from .dropout import Dropout
from .experts import MixtureOfExperts
from .linear import identities
from .mla import LatentAttention
from .mlp import MLP
from .norm import make_norm
from .rope import Rope


class Block(nn.Module):
    """[b, s, hidden] -> [b, s, hidden], with a norm before each half; the input and output may be
    sequence shards, attention sees whole sequences."""

    def __init__(self, model: Model, layer: int):
        """`layer`: the block's number in the model, since the first layers of a mixture of experts
        may be dense."""
        super().__init__()
        moe = layer_moe(model, layer)
        self.norm1 = make_norm(model)
        self.attn = LatentAttention(model, model.mla) if model.mla else Attention(model)
        self.norm2 = make_norm(model)
        self.mlp = MixtureOfExperts(model, moe) if moe else MLP(model, model.ffn_hidden)
        self.attn_in, self.attn_out, self.mlp_in, self.mlp_out = identities(4)
        self.drop_attn = Dropout(model.dropout, model.hidden)
        self.drop_mlp = Dropout(model.dropout, model.hidden)

    def forward(
        self,
        x: Tensor,
        token_index: Tensor | None = None,
        documents: Documents | None = None,
        rope: Rope | None = None,
        shard_index: Tensor | None = None,
    ) -> Tensor:
        """`token_index` [b, s]: the numbers of the tokens that attention sees; `shard_index`: those
        of the tokens in `x`. Dropout reads them."""
        # The halves' outputs have no names here: a name would keep them alive while the MLP runs.
        x = x + self.drop_attn(
            self.attention_output(self.attend(x, token_index, documents, rope)),
            shard_index,
        )
        return x + self.drop_mlp(
            self.mlp_output(self.feed_forward(x, shard_index)),
            shard_index,
        )

    def attention_output(self, partial: Tensor) -> Tensor:
        """Returns what attention adds to the residual stream; `partial`: what `attend` returned."""
        return _biased(self.attn_out(partial), self.attn.out_bias)

    def mlp_output(self, partial: Tensor) -> Tensor:
        """Returns what the MLP adds to the residual stream; `partial`: what `feed_forward`
        returned."""
        return _biased(self.mlp_out(partial), self.mlp.out_bias)

    # The two halves, up to their partial sums, are methods, so that recomputation can wrap each.

    def attend(
        self, x: Tensor, token_index: Tensor | None, documents: Documents | None, rope: Rope | None
    ) -> Tensor:
        return self.attn(self.attn_in(self.norm1(x)), token_index, documents, rope)

    def feed_forward(self, x: Tensor, shard_index: Tensor | None = None) -> Tensor:
        x = self.mlp_in(self.norm2(x))
        if isinstance(self.mlp, MLP):
            return self.mlp(x)
        return self.mlp(x, shard_index)


class PostNormBlock(Block):
    """A block with a norm behind the sum of each half and its input."""

    def forward(
        self,
        x: Tensor,
        token_index: Tensor | None = None,
        documents: Documents | None = None,
        rope: Rope | None = None,
        shard_index: Tensor | None = None,
    ) -> Tensor:
        x = self.norm1(
            x
            + self.drop_attn(
                self.attention_output(self.attend(x, token_index, documents, rope)),
                shard_index,
            )
        )
        return self.norm2(
            x
            + self.drop_mlp(
                self.mlp_output(self.feed_forward(x, shard_index)),
                shard_index,
            )
        )

    def attend(
        self, x: Tensor, token_index: Tensor | None, documents: Documents | None, rope: Rope | None
    ) -> Tensor:
        return self.attn(self.attn_in(x), token_index, documents, rope)

    def feed_forward(self, x: Tensor, shard_index: Tensor | None = None) -> Tensor:
        assert isinstance(self.mlp, MLP)  # the plan's rules refuse experts
        return self.mlp(self.mlp_in(x))


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


#: The module of each kind of layer in `orchestrator.plan.layer.KINDS`; it gets the model and the
#: layer's number.
BLOCKS: dict[str, Callable[[Model, int], Block]] = {PRE_NORM: Block, POST_NORM: PostNormBlock}


def make_block(model: Model, layer: int) -> Block:
    """Returns layer `layer` (0-based) of a model."""
    return BLOCKS[layer_kind(model)](model, layer)
