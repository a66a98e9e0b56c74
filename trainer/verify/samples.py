"""The tokens that parity is measured on: a pure function of a sample's place in the global order.

Made to be unkind: another share of masked targets in each sample, one sample in five wholly masked, so that valid
tokens are unequal over ranks and micro-batches; packed samples hold three documents cut at places of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.plan import Plan
from trainer.data.batch import IGNORED, MicroBatch, numbered


def sample(plan: Plan, place: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both [seq_len]."""
    generator = torch.Generator().manual_seed(977 * place + 5)
    window = torch.randint(plan.model.vocab, (plan.job.train.seq_len + 1,), generator=generator)
    targets = window[1:].clone()
    share = 1.0 if place % 5 == 4 else (place % 3) * 0.3
    targets[torch.rand(targets.shape, generator=generator) < share] = IGNORED
    return window[:-1], targets


def micro_batch(plan: Plan, places: list[int], packed: bool = False) -> MicroBatch:
    """The samples at these places as one batch."""
    tokens, targets = (torch.stack(column) for column in zip(*(sample(plan, place) for place in places), strict=True))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    if not packed:
        return numbered(MicroBatch(tokens, targets, positions, None), places)
    length = tokens.shape[1]
    cuts = torch.tensor([sorted((1 + place % (length - 1), 1 + 5 * place % (length - 1))) for place in places])
    documents = (positions[:, None, :] >= cuts[:, :, None]).sum(1)
    starts = torch.where(documents == 0, 0, cuts.gather(1, (documents - 1).clamp(min=0)))
    return numbered(MicroBatch(tokens, targets, positions - starts, documents), places)
