"""One process that trains the whole model on the whole global batch: what every layout must equal.

Made of the naive twins (decoder, AdamW, clipping) and of nothing that is under test but the initial
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.learning_rate import learning_rate
from orchestrator.plan.offload import offload_of
from tests.reference import adamw, prediction, transformer
from trainer.data.batch import IGNORED
from trainer.model.init import init_stage
from trainer.model.stage import Stage
from trainer.verify.oracle import Outcome
from trainer.verify.samples import micro_batch


def initial_weights(plan: Plan, dtype: torch.dtype) -> dict[str, Tensor]:
    stage = Stage(plan.model, range(plan.model.layers), first=True, last=True).to(dtype)
    init_stage(stage, plan.model, plan.job.train.seed)
    return {name: param.detach().clone() for name, param in stage.named_parameters()}


def train(
    plan: Plan, steps: int, dtype: torch.dtype, packed: bool = False, empty: bool = False
) -> list[Outcome]:
    """`steps` optimizer steps from the plan's seed, the batches being the places 0, 1, 2, ... of
    the global order."""
    optim = plan.job.optim
    size = plan.parallel.global_batch_samples
    weight_history = [initial_weights(plan, dtype)]  # by each update so far
    late = 1 if offload_of(plan.job.train).delayed else 0  # updates that a step's weights lack
    twin = adamw.AdamW(optim.beta1, optim.beta2, optim.eps, optim.weight_decay)
    outcomes = []
    for step in range(1, steps + 1):
        indices = list(range((step - 1) * size, step * size))
        batch = micro_batch(plan, indices, packed, empty, plain=True)
        leaves = {
            name: weight.clone().requires_grad_()
            for name, weight in weight_history[max(0, step - 1 - late)].items()
        }
        terms = {}
        drop = batch.serial, plan.job.train.seed
        state = transformer.states(
            leaves,
            plan.model,
            batch.tokens,
            batch.positions,
            transformer.numbers_of(batch),
            drop,
            terms,
        )
        valid = int((batch.targets != IGNORED).sum())
        loss = (
            transformer.loss_sum(transformer.scores(state, leaves, plan.model), batch.targets)
            / valid
        )
        if plan.model.mtp:
            terms["mtp"] = prediction.loss(leaves, plan.model, state, batch, drop, terms) / valid
        gradients = torch.autograd.grad(sum(terms.values(), loss), list(leaves.values()))
        grads = dict(zip(leaves, gradients, strict=True))
        clipped = adamw.clipped(grads, plan.job.train.clip_grad_norm)
        weight_history.append(
            twin.step(weight_history[-1], clipped, learning_rate(step, optim, plan.job.train.steps))
        )
        values = {name: value.item() for name, value in terms.items()}
        outcomes.append(
            Outcome(
                loss.item(), adamw.norm(grads), grads, weight_history[max(0, step - late)], values
            )
        )
    return outcomes
