"""The reference: one process trains the whole model on the whole global batch with plain autograd,
`clip_grad_norm_` and a plain optimizer. It shares only the model's forward and initial weights with
the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from msgspec import UNSET
from torch import Tensor
from torch.nn import Parameter

from orchestrator.plan import Plan
from orchestrator.plan.learning_rate import learning_rate
from orchestrator.plan.offload import offload_of
from trainer.model.dropout import seed_dropout
from trainer.model.experts import MixtureOfExperts
from trainer.model.init import init_stage
from trainer.model.loss import LossTerms, cross_entropy_sum
from trainer.model.router import Router
from trainer.model.stage import Stage, term_names
from trainer.model.state import states

from . import plain_fp8
from .plain_optim import plain_optimizer
from .samples import micro_batch, token_by_token


@dataclass
class Outcome:
    """One optimizer step: mean loss over valid tokens, gradient before clipping, its norm, weights
    after the step."""

    loss: float
    norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    terms: dict[str, float] = field(default_factory=dict)  # added to the loss, by name
    states: dict[str, Tensor] = field(default_factory=dict)  # what has no gradient, after the step


#: (the step's valid tokens) -> the terms that the modules of a stage add to the loss, after its
#: forward
Added = Callable[[int], dict[str, Tensor]]


def train(
    plan: Plan,
    steps: int,
    packed: bool = False,
    empty: bool = False,
    start: torch.dtype = torch.float64,
    prepare: Callable[[Stage], Added | None] = lambda stage: None,
) -> list[Outcome]:
    """`steps` optimizer steps from the plan's seed, in float64; on samples 0, 1, 2, ... of the
    global order. `start`: the precision that initial weights are rounded to. `prepare` may change
    the model before the first step, and says what is added to the loss."""
    job = plan.job
    size = plan.parallel.global_batch_samples
    stage = Stage(plan.model, range(plan.model.layers), first=True, last=True).to(start)
    init_stage(stage, plan.model, job.train.seed)
    stage.double()
    for _, module, key, state in states(stage):
        setattr(module, key, getattr(module, key).to(state.dtype))
    seed_dropout(stage, job.train.seed)
    if job.matmul:
        plain_fp8.use(stage, job.matmul, plan.parallel.micro_batch_size)
    added = prepare(stage)
    terms_of_model = LossTerms()
    terms_of_model.declare(*term_names(plan.model))
    routers = list[_CountingRouter]()
    for module in stage.modules():
        if isinstance(module, MixtureOfExperts | Stage):
            module.terms = terms_of_model
        if isinstance(module, Router) and (module.bias is not None or module.load is not None):
            routers.append(_CountingRouter(module))
    params = dict(stage.named_parameters())
    update = plain_optimizer(params, job.optim, job.train.seed)
    delayed = offload_of(job.train).delayed
    ahead = {
        name: param.detach().clone() for name, param in params.items()
    }  # of delayed updates: the weights to be
    outcomes = []
    for step in range(1, steps + 1):
        batch = micro_batch(plan, list(range((step - 1) * size, step * size)), packed, empty)
        batch = token_by_token(batch, plan.model.mtp.depth) if plan.model.mtp else batch
        valid_tokens = batch.valid_tokens
        one = torch.ones((), dtype=torch.float64)
        tokens = batch.tokens.numel()
        terms_of_model.start(
            one, valid_tokens, micro_batches=1, samples=len(batch.tokens), tokens=tokens
        )
        with terms_of_model.forward(0):
            loss = cross_entropy_sum(stage(None, batch), batch.targets) / valid_tokens
        terms = added(valid_tokens) if added is not None else {}
        stage.zero_grad()
        sum(terms.values(), loss).backward()
        grads = {
            name: param.grad.clone() for name, param in params.items() if param.grad is not None
        }
        norm = torch.nn.utils.clip_grad_norm_(
            stage.parameters(), job.train.clip_grad_norm or math.inf
        )
        lr = learning_rate(step, job.optim, job.train.steps)
        _delayed(params, ahead, update, lr) if delayed else update(lr)
        for router in routers:
            router.move()
        weights = {name: param.detach().clone() for name, param in params.items()}
        values = {name: value.item() for name, value in terms.items()}
        values |= {
            name: float(value) for name, value in terms_of_model.sums.items() if value is not None
        }
        kept = {name: getattr(module, key).clone() for name, module, key, _ in states(stage)}
        outcomes.append(Outcome(loss.item(), norm.item(), grads, weights, values, kept))
    return outcomes


@torch.no_grad()
def _delayed(
    params: dict[str, Parameter],
    ahead: dict[str, Tensor],
    update: Callable[[float], None],
    lr: float,
) -> None:
    """Update the weights `ahead` with the gradients of `params`, which then get what `ahead` was
    before."""
    before = {name: weights.clone() for name, weights in ahead.items()}
    for name, param in params.items():
        param.copy_(ahead[name])
    update(lr)
    for name, param in params.items():
        ahead[name].copy_(param)
        param.copy_(before[name])


class _CountingRouter:
    """Changes a router's bias and load expert by expert, by what it has chosen since the last
    time."""

    def __init__(self, router: Router):
        self.router = router
        self.chosen = list[int]()
        router.register_forward_hook(
            lambda module, args, out: self.chosen.extend(out.experts.flatten().tolist())
        )

    def move(self) -> None:
        bias = self.router.bias
        load = self.router.load
        moe = self.router.moe
        mean = len(self.chosen) / moe.experts
        for expert in range(moe.experts):
            often = self.chosen.count(expert)
            if bias is not None and moe.bias_update is not UNSET and often != mean:
                bias[expert] += moe.bias_update if often < mean else -moe.bias_update
            if load is not None:
                load[expert] = often / mean
        self.chosen.clear()
