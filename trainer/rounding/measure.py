"""The measurement: the errors of every linear's products, and the loss with parts of the model in 8
bits."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor, nn

from orchestrator.plan import Plan
from orchestrator.plan.parity import HOPELESS
from orchestrator.plan.rounding.measurement import (
    Answer,
    LinearErrors,
    Measurement,
    Proposal,
    Request,
)
from orchestrator.plan.rounding.proposal import propose
from orchestrator.plan.rounding.wide import is_wide, linears
from trainer.data.batch import MicroBatch
from trainer.errors import CheckpointError
from trainer.model.experts import GroupedLinear
from trainer.model.fp8.experts import ExpertOp, expert_by_expert
from trainer.model.linear import PLAIN, Linear, LinearOp
from trainer.model.loss import LossTerms, cross_entropy_sum
from trainer.model.stage import Stage

from .model import Linears, in_one_process, make_stage, newest_checkpoint, read_batches
from .ops import MeasuredExperts, MeasuredOp, ProductErrors

#: A linear: the number of its block, and its name in it.
Key = tuple[int, str]


def measure(request: Request) -> Iterator[Answer]:
    """Measures a model, and yields its progress; the last answer has the measurement. Raises
    DataError, CheckpointError, MemoryError."""
    plan = in_one_process(request.plan, request.batches)
    checkpoint = newest_checkpoint(request.checkpoints) if request.checkpoints else None
    batches = read_batches(plan, checkpoint)
    stage = make_stage(plan, checkpoint)
    rounding = _Rounding(plan, stage, batches)
    progress = _Progress(len(rounding.linears.modules) + len(rounding.names) + 3)
    yield progress("errors of products")
    errors, wide_loss = rounding.errors()
    if not math.isfinite(wide_loss):
        raise CheckpointError(
            f"the loss of {plan.model.name} is {wide_loss} without 8 bits: there is nothing to"
            " compare with"
        )
    yield progress("loss with every linear in 8 bits")
    narrow_loss = rounding.loss(rounding.keys)
    changes_by_name = {}
    for name in rounding.names:
        yield progress(f"loss with {name} in 8 bits")
        changes_by_name[name] = rounding.loss(rounding.named(name)) - wide_loss
    errors_of_linears = []
    for key in rounding.keys:
        yield progress(f"loss with {key[0]}.{key[1]} in 8 bits")
        errors_of_linears.append(_linear_errors(key, errors[key], rounding.loss([key]) - wide_loss))
    yield progress("loss with the proposal")
    proposals = propose(errors_of_linears, changes_by_name, wide_loss, plan.model.layers)
    measurement = Measurement(
        step=None if checkpoint is None else checkpoint.manifest.step,
        tokens=rounding.valid_tokens,
        dtype=str(next(stage.parameters()).dtype).removeprefix("torch."),
        wide_loss=wide_loss,
        narrow_loss=narrow_loss,
        names=changes_by_name,
        linears=errors_of_linears,
        proposals=proposals,
        proposal_loss=rounding.loss(rounding.narrow(proposals)),
    )
    yield progress("measured", measurement)


class _Progress:
    """Counts the parts of a measurement that are done."""

    def __init__(self, total: int):
        self.total = total
        self.done = -1

    def __call__(self, label: str, measurement: Measurement | None = None) -> Answer:
        self.done += 1
        return Answer(done=self.done, total=self.total, label=label, measurement=measurement)


def _linear_errors(key: Key, errors: ProductErrors, loss: float) -> LinearErrors:
    layer, name = key
    return LinearErrors(
        layer=layer,
        name=name,
        forward=errors.forward.value,
        input_grad=errors.input_grad.value,
        weight_grad=errors.weight_grad.value,
        loss=loss,
    )


class _Rounding:
    """A model on some batches, with any of its linears in 8 bits."""

    def __init__(self, plan: Plan, stage: Stage, batches: Sequence[MicroBatch]):
        self.plan = plan
        self.stage = stage
        self.batches = batches
        self.linears = Linears(plan, stage)
        self.keys = [key for key in linears(plan.model) if key in self.linears.modules]
        self.names = list(dict.fromkeys(name for _, name in self.keys))
        self.valid_tokens = sum(batch.valid_tokens for batch in batches)

    def named(self, name: str) -> list[Key]:
        """Returns the linears of this name in all layers."""
        return [key for key in self.keys if key[1] == name]

    def narrow(self, proposals: Sequence[Proposal]) -> list[Key]:
        """Returns the linears that the proposals do not keep wide."""
        patterns = tuple(proposal.pattern for proposal in proposals)
        layers = self.plan.model.layers
        return [key for key in self.keys if not is_wide(patterns, *key, layers)]

    def errors(self) -> tuple[dict[Key, ProductErrors], float]:
        """Returns the errors of every linear's products, and the mean loss, all computed wide."""
        errors = {key: ProductErrors() for key in self.keys}
        for key, module in self.linears.modules.items():
            narrow = self.linears.ops[key]()
            if isinstance(narrow, ExpertOp):
                _set_op(module, MeasuredExperts(narrow, errors[key]))
            else:
                _set_op(module, MeasuredOp(narrow, errors[key]))
        loss = 0.0
        for batch in self.batches:
            batch_loss = self._batch_loss(batch)
            batch_loss.backward()
            loss += float(batch_loss.detach())
        self.stage.zero_grad(set_to_none=True)
        return errors, loss

    @torch.no_grad()
    def loss(self, narrow: Collection[Key]) -> float:
        """Returns the mean loss with these linears in 8 bits and all others wide."""
        chosen = set(narrow)
        for key, module in self.linears.modules.items():
            plain = PLAIN if isinstance(module, Linear) else expert_by_expert
            _set_op(module, self.linears.ops[key]() if key in chosen else plain)
        loss = sum(float(self._batch_loss(batch)) for batch in self.batches)
        return loss if math.isfinite(loss) else HOPELESS

    def _batch_loss(self, batch: MicroBatch) -> Tensor:
        """Returns a batch's share of the mean loss over valid tokens, with the terms that modules
        add."""
        terms = self.stage.terms
        assert terms is not None
        _start(terms, batch, self.valid_tokens, len(self.batches))
        with terms.forward(0):
            logits = self.stage(None, batch)
        loss = cross_entropy_sum(logits, batch.targets) / self.valid_tokens
        # A term gets its gradient through the state to which it is attached.
        added = sum(float(term) for term in terms.sums.values() if term is not None)
        return loss + added


def _start(terms: LossTerms, batch: MicroBatch, valid_tokens: int, batches: int) -> None:
    terms.start(
        torch.ones((), dtype=torch.float64),
        valid_tokens,
        micro_batches=1,
        samples=len(batch.tokens) * batches,
        tokens=batch.tokens.numel() * batches,
    )


def _set_op(module: nn.Module, op: object) -> None:
    assert isinstance(module, Linear | GroupedLinear)
    if isinstance(module, Linear):
        assert isinstance(op, LinearOp)
        module.op = op
    else:
        assert callable(op)
        module.op = op
