"""Consecutive layers of the model, which one pipeline stage computes. With all layers a stage is
the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from torch import Tensor, nn

from orchestrator.plan.document import Model
from orchestrator.plan.layer import POST_NORM, layer_kind

from .block import Block, make_block
from .documents import Documents
from .dropout import Dropout, draws
from .experts import term_names as expert_terms
from .linear import Embedding, Linear, identities
from .loss import LossTerms, cross_entropy_sum
from .mlp import ACTIVATIONS
from .norm import make_norm
from .prediction import MTP, PredictionBlock, numbers, prediction_loss
from .rope import Rope, rope_tables


class Batch(Protocol):
    """The fields of a micro-batch that the model reads (`trainer.data.batch.MicroBatch`), int64 [b,
    s]."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor:
        """The tokens' positions, counted from the start of each document."""
        ...

    @property
    def documents(self) -> Documents | None:
        """The documents that are packed into samples, if they are kept apart."""
        ...

    @property
    def serial(self) -> Tensor | None:
        """The tokens' numbers in the data order, read where random numbers are drawn."""
        ...

    # For a model that predicts further tokens, [b, s, depth]: at depth k, from 1, the token k
    # positions ahead and its target.
    @property
    def next_tokens(self) -> Tensor | None: ...
    @property
    def next_targets(self) -> Tensor | None: ...


class Stage(nn.Module):
    """The blocks `layers` of the model, with the embedding if `first`, and with the final norm and
    head if `last`. Blocks with norms behind their halves read normed embeddings.

    Parameters have global names (`layers.17.attn.wq.weight`), so a name means the same tensor on
    every layout. With tied embeddings the head's weight is `embed.weight`. A last stage that is not
    also the first holds its own copy under that name, and so does one that predicts further tokens.
    Build under `torch.device("meta")` to allocate nothing.

    Tensor parallelism replaces `embed_out`, `positions_out` and `head_in` like the modules of a
    block; `rows` selects this rank's part of the sequence. `before` is called with the name of each
    of `parts` before it computes. `terms`, if they are set, get the loss of further tokens, which
    `token_loss` computes.
    """

    def __init__(self, model: Model, layers: range, first: bool, last: bool):
        super().__init__()
        self.model = model
        self.first = first
        self.last = last
        self.ahead = [str(number) for number in numbers(model)] if last else []
        self.embeds = first or bool(self.ahead)
        if self.embeds or (last and model.tied_embeddings):
            self.embed = Embedding(model.vocab, model.hidden)
        self.learned_positions = first and model.position == "learned"
        if self.learned_positions:
            self.embed_positions = Embedding(model.max_seq_len, model.hidden)
        self.norms_embedding = first and layer_kind(model) == POST_NORM
        if self.norms_embedding:
            self.embed_norm = make_norm(model)
        self.embed_out, self.positions_out, self.head_in, self.rows = identities(4)
        self.before: Callable[[str], object] = nothing
        self.drop_embed = Dropout(model.dropout, model.hidden)
        self.layers = nn.ModuleDict({str(index): make_block(model, index) for index in layers})
        self.terms: LossTerms | None = None
        self.token_loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        if last:
            self.layers.update({name: PredictionBlock(model) for name in self.ahead})
            self._make_head()

    def _make_head(self) -> None:
        model = self.model
        if model.head_transform:
            self.transform = Linear(model.hidden, model.hidden, bias=True)
        self.norm = make_norm(model)
        self.head = Linear(model.hidden, model.vocab, bias=bool(model.head_transform))
        self.head.reused = bool(self.ahead)
        self.tie()

    @property
    def blocks(self) -> dict[int, Block]:
        """The blocks by their number in the model, in order; those that predict further tokens come
        last."""
        return {int(name): cast(Block, block) for name, block in self.layers.items()}

    def parts(self) -> dict[str, list[nn.Module]]:
        """Returns the modules whose weights each part of a forward reads, in the order in which the
        parts compute."""
        blocks: dict[str, list[nn.Module]] = {name: [block] for name, block in self.layers.items()}
        ahead = {name: blocks.pop(name) for name in self.ahead}
        return {
            "embed": self.embeddings,
            **blocks,
            "head": self.head_modules,
            **ahead,
        }

    @property
    def embeddings(self) -> list[nn.Module]:
        """The modules with weights that compute before the blocks."""
        modules: list[nn.Module] = [self.embed] if self.embeds else []
        if self.learned_positions:
            modules.append(self.embed_positions)
        return [*modules, self.embed_norm] if self.norms_embedding else modules

    @property
    def head_modules(self) -> list[nn.Module]:
        """The modules with weights that compute after the blocks."""
        if not self.last:
            return []
        transform = [self.transform] if self.model.head_transform else []
        return [*transform, self.norm, self.head]

    def tie(self) -> None:
        """Makes head and embedding one parameter, after the embedding's weight was replaced."""
        if self.last and self.model.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Hidden states [b, s, hidden] (None on the first stage) -> hidden states, or logits [b, s,
        vocab] if last."""
        token_index = batch.serial if self.model.dropout else None
        shard_index = None
        if draws(self.model) and batch.serial is not None:
            shard_index = self.rows(batch.serial)
        if self.embeds:
            self.before("embed")
        if self.first:
            x = self._embedded(batch, shard_index)
        assert x is not None, "only the first stage starts from tokens"
        rope = None
        if self.model.position == "rope":
            rope = rope_tables(batch.positions, self.model, x.dtype)
        for name in list(self.layers)[: len(self.layers) - len(self.ahead)]:
            self.before(name)
            x = self.layers[name](x, token_index, batch.documents, rope, shard_index)
        if not self.last:
            return x
        self.before("head")
        if self.model.head_transform:
            x = ACTIVATIONS[self.model.activation](self.transform(x))
        x = self.norm(x)
        if self.ahead and self.terms is not None:
            loss = self._look_ahead(x, batch, token_index, rope, shard_index)
            x = self.terms.add(MTP, x, loss)
        return self._logits(x)

    def _embedded(self, batch: Batch, shard_index: Tensor | None) -> Tensor:
        x = self.embed_out(self.embed(batch.tokens))
        if self.learned_positions:
            x = x + self.positions_out(self.embed_positions(batch.positions))
        if self.norms_embedding:
            x = self.embed_norm(x)
        return self.drop_embed(x, shard_index)

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self.head_in(x))

    def _look_ahead(
        self,
        x: Tensor,
        batch: Batch,
        token_index: Tensor | None,
        rope: Rope | None,
        shard_index: Tensor | None,
    ) -> Tensor:
        """Returns the loss of the tokens after the next one; `x`: the state that the head reads."""
        tokens = batch.next_tokens
        targets = batch.next_targets
        mtp = self.model.mtp
        assert tokens is not None and targets is not None and mtp, "the batch does not look ahead"

        def step(k: int, state: Tensor) -> Tensor:
            self.before(self.ahead[k])
            token = self.embed_out(self.embed(tokens[..., k]))
            block = self.layers[self.ahead[k]]
            return block(
                state,
                token,
                token_index=token_index,
                documents=batch.documents,
                rope=rope,
                shard_index=shard_index,
            )

        def loss(state: Tensor, target: Tensor) -> Tensor:
            return self.token_loss(self._logits(state), target)

        return prediction_loss(mtp, x, targets, step, loss)


def term_names(model: Model) -> list[str]:
    """Returns the terms that a model's modules add to the loss."""
    names = expert_terms(model)
    return [*names, MTP] if model.mtp else names


def nothing(name: str) -> None:
    """Does nothing: the default of `Stage.before`."""
