"""Consecutive layers of the decoder: what one pipeline stage computes. With all layers it is the
whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from torch import Tensor, nn

from orchestrator.plan.document import Model

from .block import Block
from .documents import Documents
from .dropout import Dropout, draws
from .experts import term_names as expert_terms
from .linear import Embedding, Linear, identities
from .loss import LossTerms, cross_entropy_sum
from .norm import make_norm
from .prediction import MTP, PredictionBlock, numbers, prediction_loss
from .rope import Rope, rope_tables


class Batch(Protocol):
    """The fields of a micro-batch that the model reads (`trainer.data.batch.MicroBatch`), int64 [b,
    s]."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...  # counted from the start of each document
    @property
    def documents(
        self,
    ) -> Documents | None: ...  # that are packed into samples, where they are kept apart
    @property
    def serial(
        self,
    ) -> (
        Tensor | None
    ): ...  # number of the token in the data order; read where random numbers are drawn
    # For a model that predicts further tokens, [b, s, depth]: at depth k, from 1, the token k
    # places on and its target.
    @property
    def next_tokens(self) -> Tensor | None: ...
    @property
    def next_targets(self) -> Tensor | None: ...


class Stage(nn.Module):
    """Blocks `layers` of the model, with the embedding if `first` and the final norm and head if
    `last`.

    Parameters carry global names (`layers.17.attn.wq.weight`), so a name means the same tensor on
    every layout. With tied embeddings the head's weight is `embed.weight`; a last stage that is not
    also the first holds its own copy under that name, and one that predicts further tokens does,
    too. Build under `torch.device("meta")` to allocate nothing. `embed_out`, `positions_out` and
    `head_in` are replaced by tensor parallelism like those of a block; `rows` selects the part of
    the sequence in hidden states. `before` is called with the name of each of `parts` before it
    computes. `terms`, where they are set, get the loss of further tokens, by `token_loss`.
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
        self.embed_out, self.positions_out, self.head_in, self.rows = identities(4)
        self.before: Callable[[str], object] = nothing
        self.drop_embed = Dropout(model.dropout, model.hidden)
        self.layers = nn.ModuleDict({str(index): Block(model, index) for index in layers})
        self.terms: LossTerms | None = None
        self.token_loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
        if last:
            self.layers.update({name: PredictionBlock(model) for name in self.ahead})
            self.norm = make_norm(model)
            self.head = Linear(model.hidden, model.vocab)
            self.head.reused = bool(self.ahead)
            self.tie()

    @property
    def blocks(self) -> dict[int, Block]:
        """The blocks by their number in the model, in order; those that predict further tokens
        follow."""
        return {int(name): cast(Block, block) for name, block in self.layers.items()}

    def parts(self) -> dict[str, list[nn.Module]]:
        """The modules whose weights each part of a forward reads, in the order in which they
        compute."""
        embeddings: list[nn.Module] = [self.embed] if self.embeds else []
        if self.learned_positions:
            embeddings.append(self.embed_positions)
        blocks: dict[str, list[nn.Module]] = {name: [block] for name, block in self.layers.items()}
        ahead = {name: blocks.pop(name) for name in self.ahead}
        return {
            "embed": embeddings,
            **blocks,
            "head": [self.norm, self.head] if self.last else [],
            **ahead,
        }

    def tie(self) -> None:
        """Make head and embedding one parameter again, after something replaced the embedding's
        weight."""
        if self.last and self.model.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Hidden states [b, s, hidden] (None on the first stage) -> hidden states, or logits [b, s,
        vocab] if last."""
        token_index = batch.serial if self.model.dropout else None
        rows = self.rows(batch.serial) if draws(self.model) and batch.serial is not None else None
        if self.embeds:
            self.before("embed")
        if self.first:
            x = self.embed_out(self.embed(batch.tokens))
            if self.learned_positions:
                x = x + self.positions_out(self.embed_positions(batch.positions))
            x = self.drop_embed(x, rows)
        assert x is not None, "only the first stage starts from tokens"
        rope = None
        if self.model.position == "rope":
            rope = rope_tables(batch.positions, self.model, x.dtype)
        for name in list(self.layers)[: len(self.layers) - len(self.ahead)]:
            self.before(name)
            x = self.layers[name](x, token_index, batch.documents, rope, rows)
        if not self.last:
            return x
        self.before("head")
        x = self.norm(x)
        if self.ahead and self.terms is not None:
            x = self.terms.add(MTP, x, self._look_ahead(x, batch, token_index, rope, rows))
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        return self.head(self.head_in(x))

    def _look_ahead(
        self,
        x: Tensor,
        batch: Batch,
        token_index: Tensor | None,
        rope: Rope | None,
        rows: Tensor | None,
    ) -> Tensor:
        """The loss of the tokens after the next one; `x`: what the head reads."""
        tokens = batch.next_tokens
        targets = batch.next_targets
        mtp = self.model.mtp
        assert tokens is not None and targets is not None and mtp, "the batch does not look ahead"

        def step(k: int, state: Tensor) -> Tensor:
            self.before(self.ahead[k])
            token = self.embed_out(self.embed(tokens[..., k]))
            return self.layers[self.ahead[k]](
                state, token, token_index, batch.documents, rope, rows
            )

        def loss(state: Tensor, goal: Tensor) -> Tensor:
            return self.token_loss(self._logits(state), goal)

        return prediction_loss(mtp, x, targets, step, loss)


def term_names(model: Model) -> list[str]:
    """The terms that a model's modules add to the loss."""
    return [*expert_terms(model), *([MTP] if model.mtp else [])]


def nothing(name: str) -> None:
    """What a stage does before its parts compute, unless something replaces it."""
