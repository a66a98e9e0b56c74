"""Split backward: the weight gradients of linears are deferred until the schedule runs them
(zero-bubble, DualPipe).

Each `Linear.run` is replaced by one whose backward computes the input's gradient at once and stores
the two factors of the weight's, both by the linear's `op`. The weight is hidden from autograd
(whose hooks would run without a gradient), so its gradient reaches `param.grad` and `on_grad` only
from here. Nothing depends on the autograd graph, so it works for compiled blocks (the product is a
graph break), recomputed ones and any attention mask. All other parameters (norms, biases,
embeddings) get their gradient together with the input's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.linear import Linear

#: Called after `param.grad` has received one more micro-batch's gradient, like a
#: post-accumulate-grad hook.
OnGrad = Callable[[Tensor], None]
#: whose weight, what its op saved of its input, the gradient of its output [..., out]
DeferredWeightGrad = tuple[Linear, Sequence[Tensor], Tensor]


class DeferredWeightGrads:
    """Collects weight gradients to compute later while open; while closed, computes each at
    once."""

    def __init__(self, on_grad: OnGrad | None = None):
        self._on_grad = on_grad
        self._notes: list[DeferredWeightGrad] | None = None
        self.on_defer: Callable[[Tensor], None] | None = (
            None  # called with each gradient that is kept until then
        )

    def open(self) -> None:
        self._notes = []

    def close(self) -> list[DeferredWeightGrad]:
        """The deferred gradients since `open`, in order of backward."""
        notes = self._notes
        self._notes = None
        return notes or []

    def add(self, linear: Linear, saved: Sequence[Tensor], grad: Tensor) -> None:
        if not linear.weight.requires_grad:
            return
        if self._notes is None:
            self.compute([(linear, saved, grad)])
        else:
            self._notes.append((linear, saved, grad))
            if self.on_defer is not None:
                self.on_defer(grad)

    @torch.no_grad()
    def compute(self, notes: list[DeferredWeightGrad]) -> None:
        """Compute the weight gradients; add each to its parameter, drop the activations one by
        one."""
        notes.reverse()
        while notes:
            linear, saved, grad = notes.pop()
            weight = linear.weight
            if weight.grad is None:
                weight.grad = linear.op.weight_grad(grad, saved)
            else:
                linear.op.add_weight_grad(weight.grad, grad, saved)
            if self._on_grad is not None:
                self._on_grad(weight)


def install(
    stages: Iterable[nn.Module], queue: DeferredWeightGrads, compiled: bool = False
) -> None:
    """Split the backward of every `Linear` in `stages`; `compiled`: the compiler must not trace it.

    A weight that is used twice (a head tied to the embedding on the same rank, or one that predicts
    further tokens) is left alone: its gradients must be summed within one backward, or two would
    arrive.
    """
    modules = [module for stage in stages for module in stage.modules()]
    holders = Counter(id(param) for module in modules for param in module.parameters(recurse=False))
    split = SplitBackward(queue)
    # Not a decorator on the class: that imports torch._dynamo, a second in every process.
    run = torch.compiler.disable(split) if compiled else split
    for module in modules:
        if isinstance(module, Linear) and holders[id(module.weight)] == 1 and not module.reused:
            module.run = run


class SplitBackward:
    """A `Linear.run` whose backward defers the weight gradient while `queue` is open."""

    def __init__(self, queue: DeferredWeightGrads):
        self.queue = queue
        # Makes the output require a gradient if neither the hidden weight nor the input does.
        self.anchor = torch.empty(0, requires_grad=True)

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        return _Split.apply(x, linear.weight.detach(), linear.bias, self.anchor, linear, self.queue)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        _: Tensor,
        linear: Linear,
        queue: DeferredWeightGrads,
    ) -> Tensor:
        ctx.linear = linear
        ctx.queue = queue
        ctx.save_for_backward(weight, *linear.op.saved(x))
        return linear.op.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        grad_x = ctx.linear.op.input_grad(grad, weight) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        ctx.queue.add(ctx.linear, saved, grad)
        return grad_x, None, grad_bias, None, None, None
