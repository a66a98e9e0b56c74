"""The tokens that verify trains on: a pure function of a sample's index in the global order.

Made difficult: samples have different shares of masked targets, so that valid tokens differ between
ranks and micro-batches; packed samples hold three documents of varying lengths. Every sample has a
target, unless `empty` asks for micro-batches without one: a third of them, never the same in two
steps, so that no place in a step goes without weight, whatever the number of micro-batches.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from trainer.data.batch import IGNORED, MicroBatch, with_serials
from trainer.data.order import micro_batches_at, samples_at, samples_of_step
from trainer.model.documents import Documents


def sample(plan: Plan, index: int, empty: bool = False) -> tuple[Tensor, Tensor]:
    """(tokens, targets), both [seq_len]."""
    generator = torch.Generator().manual_seed(977 * index + 5)
    window = torch.randint(plan.model.vocab, (plan.job.train.seq_len + 1,), generator=generator)
    targets = window[1:].clone()
    masked = torch.rand(targets.shape, generator=generator) < 0.7 * torch.rand(
        (), generator=generator
    )
    masked[index % len(masked)] = False
    return window[:-1], targets.masked_fill(
        masked | (empty and _without_targets(plan, index)), IGNORED
    )


def _without_targets(plan: Plan, index: int) -> bool:
    """Whether the sample is of one of the micro-batches that are left empty."""
    step, place = divmod(index, plan.parallel.global_batch_samples)
    return place // plan.parallel.micro_batch_size % 3 == 1 + step % 2


def micro_batch(
    plan: Plan, indices: list[int], packed: bool = False, empty: bool = False
) -> MicroBatch:
    """The samples at these indices as one batch."""
    samples = (sample(plan, index, empty) for index in indices)
    tokens, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    if not packed:
        return with_serials(MicroBatch(tokens, targets, positions, None), indices)
    length = tokens.shape[1]
    cuts = torch.tensor(
        [sorted((1 + index % (length - 1), 1 + 5 * index % (length - 1))) for index in indices]
    )
    documents = (positions[:, None, :] >= cuts[:, :, None]).sum(1)
    starts = torch.where(documents == 0, 0, cuts.gather(1, (documents - 1).clamp(min=0)))
    return with_serials(
        MicroBatch(tokens, targets, positions - starts, Documents.of(documents)), indices
    )


def token_by_token(batch: MicroBatch, depth: int) -> MicroBatch:
    """`trainer.data.batch.look_ahead`, spelled out."""
    tokens, targets = (torch.full((*batch.tokens.shape, depth), fill) for fill in (0, IGNORED))
    rows, length = batch.tokens.shape
    for row, at, k in (
        (row, at, k) for row in range(rows) for at in range(length) for k in range(depth)
    ):
        later = at + k + 1
        if later < length:
            tokens[row, at, k] = batch.tokens[row, later]
            numbers = None if batch.documents is None else batch.documents.numbers
            if numbers is None or numbers[row, later] == numbers[row, at]:
                targets[row, at, k] = batch.targets[row, later]
    return replace(batch, next_tokens=tokens, next_targets=targets)


def step_batches(
    plan: Plan, coord: Coord, consumed: int, packed: bool = False, empty: bool = False
) -> tuple[list[MicroBatch], int]:
    """The micro-batches of one rank in the step after `consumed` samples, and the valid tokens of
    all ranks' ones."""
    par = plan.parallel
    ramp = plan.job.train.batch_ramp
    everything = list(range(consumed, consumed + samples_at(par, ramp, consumed)))
    mine = samples_of_step(par, coord, consumed, micro_batches_at(par, ramp, consumed))
    valid_tokens = micro_batch(plan, everything, False, empty).valid_tokens
    return [micro_batch(plan, one, packed, empty) for one in mine], valid_tokens
