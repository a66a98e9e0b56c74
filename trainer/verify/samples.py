"""The tokens that verify trains on: a pure function of a sample's index in the global order.

Made difficult: samples have different shares of masked targets, one in five is wholly masked, so that valid tokens
differ between ranks and micro-batches; packed samples hold three documents of varying lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from trainer.data.batch import IGNORED, MicroBatch, with_serials
from trainer.data.order import micro_batches_at, samples_at, samples_of_step


def sample(plan: Plan, index: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both [seq_len]."""
    generator = torch.Generator().manual_seed(977 * index + 5)
    window = torch.randint(plan.model.vocab, (plan.job.train.seq_len + 1,), generator=generator)
    targets = window[1:].clone()
    share = 1.0 if index % 5 == 4 else (index % 3) * 0.3
    targets[torch.rand(targets.shape, generator=generator) < share] = IGNORED
    return window[:-1], targets


def micro_batch(plan: Plan, indices: list[int], packed: bool = False) -> MicroBatch:
    """The samples at these indices as one batch."""
    tokens, targets = (torch.stack(column) for column in zip(*(sample(plan, index) for index in indices), strict=True))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    if not packed:
        return with_serials(MicroBatch(tokens, targets, positions, None), indices)
    length = tokens.shape[1]
    cuts = torch.tensor([sorted((1 + index % (length - 1), 1 + 5 * index % (length - 1))) for index in indices])
    documents = (positions[:, None, :] >= cuts[:, :, None]).sum(1)
    starts = torch.where(documents == 0, 0, cuts.gather(1, (documents - 1).clamp(min=0)))
    return with_serials(MicroBatch(tokens, targets, positions - starts, documents), indices)


def step_batches(plan: Plan, coord: Coord, consumed: int, packed: bool = False) -> tuple[list[MicroBatch], int]:
    """The micro-batches of one rank in the step after `consumed` samples, and the valid tokens of all ranks' ones."""
    par, ramp = plan.parallel, plan.job.train.batch_ramp
    everything = list(range(consumed, consumed + samples_at(par, ramp, consumed)))
    mine = samples_of_step(par, coord, consumed, micro_batches_at(par, ramp, consumed))
    return [micro_batch(plan, one, packed) for one in mine], micro_batch(plan, everything).valid_tokens
