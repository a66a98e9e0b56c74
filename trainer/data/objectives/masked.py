"""Masked tokens (BERT: Devlin et al. 2019, arXiv 1810.04805, section 3.1, task 1): the model sees a
text with some tokens hidden, and predicts them.

15 % of the tokens are chosen, at least one of each sample. Of these 80 % become the mask token,
10 % a random token, and 10 % stay as they are; all of them are targets. The choice is a function of
(seed, the token's number in the run's data order), so each pass over the corpus hides other tokens
(as in RoBERTa, arXiv 1907.11692, section 4.1). The token that ends a document is never chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orchestrator.plan import Plan
from trainer.data.batch import IGNORED, MicroBatch, with_serials
from trainer.data.tokenizer import MASK_TOKENS, load_tokenizer
from trainer.errors import DataError
from trainer.model.dropout import mix, salt_of, spread

CHOSEN = 0.15  # of all tokens
MASKED = 0.8  # of the chosen ones
REPLACED = 0.9  # the chosen ones from `MASKED` up to here become random tokens
_BITS = 53  # of a random number: the precision of fp64


@dataclass(frozen=True)
class MaskedTokens:
    """Hides tokens of micro-batches. Random tokens are below `vocabulary`; `eod` ends documents."""

    seed: int
    mask: int
    vocabulary: int
    eod: int

    def __call__(self, batch: MicroBatch, indices: Sequence[int]) -> MicroBatch:
        """Returns the batch of the samples with these numbers, with hidden tokens as targets."""
        tokens = batch.tokens
        serial = with_serials(batch, indices).serial
        assert serial is not None
        ends = tokens == self.eod
        draws = _fractions(self._random(serial, "chosen")).masked_fill(ends, 1.0)
        least = draws == draws.amin(dim=1, keepdim=True)
        chosen = ((draws < CHOSEN) | least) & ~ends
        outcomes = _fractions(self._random(serial, "outcome"))
        random = self._random(serial, "token").remainder(self.vocabulary)
        hidden = random.where(outcomes < REPLACED, tokens)
        hidden = hidden.masked_fill(outcomes < MASKED, self.mask)
        return replace(
            batch,
            tokens=hidden.where(chosen, tokens),
            targets=tokens.masked_fill(~chosen, IGNORED),
        )

    def _random(self, serial: Tensor, use: str) -> Tensor:
        """Returns a random int64 for each token, from 0."""
        mixed = mix(spread(serial) + salt_of(f"{self.seed}/masked/{use}"))
        return mixed & torch.iinfo(torch.int64).max


def _fractions(random: Tensor) -> Tensor:
    """Returns random numbers of [0, 1) in fp64."""
    return (random >> (63 - _BITS)).double() / (1 << _BITS)


def masked_tokens(plan: Plan, vocabulary: int, eod: int) -> MaskedTokens:
    """Returns the objective of a plan for a corpus whose tokens are below `vocabulary`.

    Raises DataError if the tokenizer has no mask token, or the model no embedding for it.
    """
    name = plan.job.data.tokenizer
    mask = load_tokenizer(name).mask
    if mask is None:
        raise DataError(
            f"tokenizer {name!r} has no mask token, which train.objective=masked needs; known"
            f" names: {', '.join(MASK_TOKENS)}"
        )
    if mask >= plan.model.vocab:
        raise DataError(
            f"tokenizer {name!r} has the mask token at id {mask}, model {plan.model.name} only"
            f" {plan.model.vocab} ids (model.vocab)"
        )
    return MaskedTokens(plan.job.data.seed, mask, vocabulary, eod)
