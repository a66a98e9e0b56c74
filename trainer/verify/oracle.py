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
from trainer.data.batch import MicroBatch
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
    """The outcome of one optimizer step: mean loss over valid tokens, gradient before clipping, its
    norm, weights after the step."""

    loss: float
    norm: float
    grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    terms: dict[str, float] = field(default_factory=dict)  # added to the loss, by name
    states: dict[str, Tensor] = field(default_factory=dict)  # without gradient, after the step


#: (the step's valid tokens) -> the terms that the modules of a stage add to the loss in its forward
Added = Callable[[int], dict[str, Tensor]]


def train(
    plan: Plan,
    steps: int,
    packed: bool = False,
    empty: bool = False,
    start: torch.dtype = torch.float64,
    prepare: Callable[[Stage], Added | None] = lambda stage: None,
) -> list[Outcome]:
    """Runs `steps` optimizer steps from the plan's seed, in float64, on samples 0, 1, 2, ... of the
    global order. `start` is the precision to which initial weights are rounded. `prepare` may
    change the model before the first step, and returns the terms that are added to the loss."""
    reference = _Reference(plan, _initial_stage(plan, start), prepare)
    return [reference.step(number, packed, empty) for number in range(1, steps + 1)]


class _Reference:
    """The model and the optimizer of one process."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        prepare: Callable[[Stage], Added | None],
    ) -> None:
        self.plan = plan
        self.stage = stage
        self.histories = list[plain_fp8.Delayed]()
        if plan.job.matmul:
            size = plan.parallel.micro_batch_size
            wide = plan.job.train.matmul_wide or []
            self.histories = plain_fp8.use(stage, plan.job.matmul, size, wide)
        self.added = prepare(stage)
        self.model_terms = LossTerms()
        self.model_terms.declare(*term_names(plan.model))
        self.routers = list[_CountingRouter]()
        for module in stage.modules():
            if isinstance(module, MixtureOfExperts | Stage):
                module.terms = self.model_terms
            if isinstance(module, Router) and (module.bias is not None or module.load is not None):
                self.routers.append(_CountingRouter(module))
        self.params = dict(stage.named_parameters())
        self.optimizer = plain_optimizer(self.params, plan.job.optim, plan.job.train.seed)
        #: of delayed updates: the weights of the next step
        self.ahead = {name: param.detach().clone() for name, param in self.params.items()}

    def step(self, number: int, packed: bool, empty: bool) -> Outcome:
        """Runs optimizer step `number`, counted from 1."""
        job = self.plan.job
        loss, terms = self._forward(_step_batch(self.plan, number, packed, empty))
        self.stage.zero_grad()
        sum(terms.values(), loss).backward()
        grads = {
            name: param.grad.clone()
            for name, param in self.params.items()
            if param.grad is not None
        }
        limit = job.train.clip_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.stage.parameters(), limit)
        self._update(learning_rate(number, job.optim, job.train.steps))
        for router in self.routers:
            router.move()
        for history in self.histories:
            history.move()
        weights = {name: param.detach().clone() for name, param in self.params.items()}
        stored = states(self.stage)
        return Outcome(
            loss=loss.item(),
            norm=norm.item(),
            grads=grads,
            weights=weights,
            terms=self._term_sums(terms),
            states={name: getattr(module, key).clone() for name, module, key, _ in stored},
        )

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the mean loss of a batch, and the terms that `added` adds to it."""
        valid_tokens = batch.valid_tokens
        self.model_terms.start(
            torch.ones((), dtype=torch.float64),
            valid_tokens,
            micro_batches=1,
            samples=len(batch.tokens),
            tokens=batch.tokens.numel(),
        )
        with self.model_terms.forward(0):
            loss = cross_entropy_sum(self.stage(None, batch), batch.targets) / valid_tokens
        return loss, self.added(valid_tokens) if self.added is not None else {}

    def _update(self, lr: float) -> None:
        if offload_of(self.plan.job.train).delayed:
            _delayed(self.params, self.ahead, self.optimizer, lr)
        else:
            self.optimizer(lr)

    def _term_sums(self, terms: dict[str, Tensor]) -> dict[str, float]:
        sums = {name: term.item() for name, term in terms.items()}
        for name, model_term in self.model_terms.sums.items():
            if model_term is not None:
                sums[name] = float(model_term)
        return sums


def _initial_stage(plan: Plan, start: torch.dtype) -> Stage:
    """Returns the whole model in float64, with initial weights that are rounded to `start`."""
    seed = plan.job.train.seed
    stage = Stage(plan.model, range(plan.model.layers), first=True, last=True).to(start)
    init_stage(stage, plan.model, seed)
    stage.double()
    for _, module, key, state in states(stage):
        setattr(module, key, getattr(module, key).to(state.dtype))
    seed_dropout(stage, seed)
    return stage


def _step_batch(plan: Plan, step: int, packed: bool, empty: bool) -> MicroBatch:
    """Returns all samples of step number `step`, from 1, as one batch."""
    size = plan.parallel.global_batch_samples
    batch = micro_batch(
        plan,
        list(range((step - 1) * size, step * size)),
        packed,
        empty,
        plain=True,
    )
    return token_by_token(batch, plan.model.mtp.depth) if plan.model.mtp else batch


@torch.no_grad()
def _delayed(
    params: dict[str, Parameter],
    ahead: dict[str, Tensor],
    update: Callable[[float], None],
    lr: float,
) -> None:
    """Updates the weights `ahead` with the gradients of `params`, which then get the weights that
    `ahead` had before."""
    previous = {name: weights.clone() for name, weights in ahead.items()}
    for name, param in params.items():
        param.copy_(ahead[name])
    update(lr)
    for name, param in params.items():
        ahead[name].copy_(param)
        param.copy_(previous[name])


class _CountingRouter:
    """Changes a router's bias and load expert by expert, by its choices since the last update."""

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
