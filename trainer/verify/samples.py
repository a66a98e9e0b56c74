"""The tokens that verify trains on: a pure function of a sample's index in the global order.

Samples are difficult: they have different shares of masked targets, so that valid tokens differ
between ranks and micro-batches; packed samples hold three documents of varying lengths. Every
sample has a target, unless `empty` asks for micro-batches without one: a third of them, never the
same in two steps, so that every position in a step has weight in one of them. With
train.objective=masked the targets are tokens that it hides.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.document import Coord
from trainer.data.batch import IGNORED, MicroBatch, with_serials
from trainer.data.objectives.masked import MaskedTokens
from trainer.data.order import micro_batches_at, samples_at, samples_of_step
from trainer.model.documents import Documents

from .plain_masked import plain_masked


def sample(plan: Plan, index: int, empty: bool = False) -> tuple[Tensor, Tensor]:
    """Returns (tokens, targets) of a sample, both [seq_len]."""
    generator = torch.Generator().manual_seed(977 * index + 5)
    window = torch.randint(
        plan.model.vocab,
        (plan.job.train.seq_len + 1,),
        generator=generator,
    )
    targets = window[1:].clone()
    draws = torch.rand(targets.shape, generator=generator)
    masked = draws < 0.7 * torch.rand((), generator=generator)
    masked[index % len(masked)] = False
    masked |= empty and _without_targets(plan, index)
    return window[:-1], targets.masked_fill(masked, IGNORED)


def _without_targets(plan: Plan, index: int) -> bool:
    """Whether the sample belongs to one of the empty micro-batches."""
    step, index_in_step = divmod(index, plan.parallel.global_batch_samples)
    return index_in_step // plan.parallel.micro_batch_size % 3 == 1 + step % 2


def micro_batch(
    plan: Plan,
    indices: list[int],
    packed: bool = False,
    empty: bool = False,
    plain: bool = False,
) -> MicroBatch:
    """Returns the samples at these indices as one batch. `plain`: tokens are hidden by the oracle,
    not by the trainer."""
    samples = (sample(plan, index, empty) for index in indices)
    tokens, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    batch = MicroBatch(tokens, targets, positions, None)
    if plan.job.train.objective:
        batch = _masked(plan, batch, indices, plain)
    batch = with_serials(batch, indices)
    return _packed(batch, indices) if packed else batch


def _masked(plan: Plan, batch: MicroBatch, indices: list[int], plain: bool) -> MicroBatch:
    """Returns the batch with hidden tokens as targets, in samples that had a target. The last id of
    the vocabulary is the mask, and the first one ends documents."""
    mask = plan.model.vocab - 1
    settings = {"seed": plan.job.data.seed, "mask": mask, "vocabulary": mask, "eod": 0}
    if plain:
        tokens, targets = plain_masked(batch.tokens, indices, **settings)
        hidden = replace(batch, tokens=tokens, targets=targets)
    else:
        hidden = MaskedTokens(**settings)(batch, indices)
    is_empty = (batch.targets == IGNORED).all(dim=1, keepdim=True)
    return replace(hidden, targets=hidden.targets.masked_fill(is_empty, IGNORED))


def _packed(batch: MicroBatch, indices: list[int]) -> MicroBatch:
    """Returns the batch with three documents in each sample."""
    tokens = batch.tokens
    positions = batch.positions
    length = tokens.shape[1]
    inner = length - 1
    cuts_of_rows = [sorted((1 + index % inner, 1 + 5 * index % inner)) for index in indices]
    cuts = torch.tensor(cuts_of_rows)
    documents = (positions[:, None, :] >= cuts[:, :, None]).sum(1)
    starts = torch.where(
        documents == 0,
        0,
        cuts.gather(1, (documents - 1).clamp(min=0)),
    )
    return replace(batch, positions=positions - starts, documents=Documents.of(documents))


def token_by_token(batch: MicroBatch, depth: int) -> MicroBatch:
    """Computes `trainer.data.batch.look_ahead` token by token."""
    tokens = torch.zeros((*batch.tokens.shape, depth), dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    rows, length = batch.tokens.shape
    numbers = None if batch.documents is None else batch.documents.numbers
    for row, position, k in itertools.product(range(rows), range(length), range(depth)):
        later = position + k + 1
        if later < length:
            tokens[row, position, k] = batch.tokens[row, later]
            if numbers is None or numbers[row, later] == numbers[row, position]:
                targets[row, position, k] = batch.targets[row, later]
    return replace(batch, next_tokens=tokens, next_targets=targets)


def step_batches(
    plan: Plan,
    coord: Coord,
    consumed: int,
    packed: bool = False,
    empty: bool = False,
) -> tuple[list[MicroBatch], int]:
    """Returns the micro-batches of one rank in the step after `consumed` samples, and the valid
    tokens of all ranks together."""
    par = plan.parallel
    ramp = plan.job.train.batch_ramp
    all_samples = list(range(consumed, consumed + samples_at(par, ramp, consumed)))
    own_samples = samples_of_step(par, coord, consumed, micro_batches_at(par, ramp, consumed))
    valid_tokens = micro_batch(plan, all_samples, False, empty).valid_tokens
    return [micro_batch(plan, indices, packed, empty) for indices in own_samples], valid_tokens
