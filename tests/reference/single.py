"""One process that trains the whole model on the whole global batch: what every layout must equal.

Made of the naive twins (decoder, AdamW, clipping) and of nothing that is under test but the initial weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.plan import Plan
from tests.reference import adamw, transformer
from trainer.data.batch import IGNORED, MicroBatch
from trainer.model.init import init_stage
from trainer.model.stage import Stage
from trainer.optim.lr import learning_rate


@dataclass
class Outcome:
    """Of one optimizer step: mean loss over valid tokens, gradient before clipping, its norm, weights after it."""

    loss: float
    norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]


def sample(plan: Plan, place: int) -> tuple[Tensor, Tensor]:
    """(tokens, targets) of the sample at a place of the global order: random, with a different share of masked targets
    in each, one sample in five wholly masked."""
    generator = torch.Generator().manual_seed(977 * place + 5)
    window = torch.randint(plan.model.vocab, (plan.job.train.seq_len + 1,), generator=generator)
    targets = window[1:].clone()
    share = 1.0 if place % 5 == 4 else (place % 3) * 0.3
    targets[torch.rand(targets.shape, generator=generator) < share] = IGNORED
    return window[:-1], targets


def micro_batch(plan: Plan, places: list[int], packed: bool = False) -> MicroBatch:
    """The samples at these places as one batch; `packed`: of three documents each, cut at places of their own."""
    tokens, targets = (torch.stack(column) for column in zip(*(sample(plan, place) for place in places), strict=True))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
    if not packed:
        return MicroBatch(tokens, targets, positions, None)
    length = tokens.shape[1]
    cuts = torch.tensor([sorted((1 + place % (length - 1), 1 + 5 * place % (length - 1))) for place in places])
    documents = (positions[:, None, :] >= cuts[:, :, None]).sum(1)
    starts = torch.where(documents == 0, 0, cuts.gather(1, (documents - 1).clamp(min=0)))
    return MicroBatch(tokens, targets, positions - starts, documents)


def initial_weights(plan: Plan, dtype: torch.dtype) -> dict[str, Tensor]:
    stage = Stage(plan.model, range(plan.model.layers), first=True, last=True).to(dtype)
    init_stage(stage, plan.model, plan.job.train.seed)
    return {name: param.detach().clone() for name, param in stage.named_parameters()}


def train(plan: Plan, steps: int, dtype: torch.dtype, packed: bool = False) -> list[Outcome]:
    """`steps` optimizer steps from the plan's seed, the batches being the places 0, 1, 2, ... of the global order."""
    optim, size = plan.job.optim, plan.parallel.global_batch_samples
    weights = initial_weights(plan, dtype)
    twin = adamw.AdamW(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
    outcomes = []
    for step in range(1, steps + 1):
        batch = micro_batch(plan, list(range((step - 1) * size, step * size)), packed)
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        scores = transformer.logits(leaves, plan.model, batch.tokens, batch.positions, batch.documents)
        loss = transformer.loss_sum(scores, batch.targets) / int((batch.targets != IGNORED).sum())
        found = torch.autograd.grad(loss, list(leaves.values()))
        grads = dict(zip(leaves, found, strict=True))
        clipped = adamw.clipped(grads, plan.job.train.clip_grad_norm)
        weights = twin.step(weights, clipped, learning_rate(step, optim, plan.job.train.steps))
        outcomes.append(Outcome(loss.item(), adamw.norm(grads), grads, weights))
    return outcomes
