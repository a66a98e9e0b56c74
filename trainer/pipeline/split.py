"""Split backward: the weight gradients of linears are deferred until the schedule runs them
(zero-bubble, DualPipe).

Each `Linear.run` is replaced by a function whose backward computes the input's gradient at once and
stores the two factors of the weight's gradient; the linear's `op` computes both gradients. The
weight is hidden from autograd (whose hooks would run without a gradient), so only this module
passes its gradient to `param.grad` and `on_grad`. Nothing depends on the autograd graph, so it
works for compiled blocks (the product is a graph break), recomputed ones and any attention mask.
All other parameters (norms, biases, embeddings) get their gradient together with the input's.
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
#: (the linear, the tensors that its op saved of its input, the gradient of its output [..., out])
DeferredWeightGrad = tuple[Linear, Sequence[Tensor], Tensor]


class DeferredWeightGrads:
    """A queue of weight gradients. While it is open, it collects them; while it is closed, it
    computes each at once."""

    def __init__(self, on_grad: OnGrad | None = None):
        self._on_grad = on_grad
        self._deferred: list[DeferredWeightGrad] | None = None
        #: Called with each output gradient that is kept until the weight gradient is computed.
        self.on_defer: Callable[[Tensor], None] | None = None

    def open(self) -> None:
        """Starts to collect."""
        self._deferred = []

    def close(self) -> list[DeferredWeightGrad]:
        """Stops to collect. Returns the deferred gradients since `open`, in order of backward."""
        deferred = self._deferred
        self._deferred = None
        return deferred or []

    def add(self, linear: Linear, saved: Sequence[Tensor], grad: Tensor) -> None:
        """Defers or computes a weight gradient."""
        if not linear.weight.requires_grad:
            return
        if self._deferred is None:
            self.compute([(linear, saved, grad)])
        else:
            self._deferred.append((linear, saved, grad))
            if self.on_defer is not None:
                self.on_defer(grad)

    @torch.no_grad()
    def compute(self, deferred: list[DeferredWeightGrad]) -> None:
        """Computes the weight gradients, adds each to its parameter, and drops the activations one
        by one."""
        deferred.reverse()
        while deferred:
            linear, saved, grad = deferred.pop()
            weight = linear.weight
            if weight.grad is None:
                weight.grad = linear.op.weight_grad(grad, saved)
            else:
                linear.op.add_weight_grad(weight.grad, grad, saved)
            if self._on_grad is not None:
                self._on_grad(weight)


def install(
    stages: Iterable[nn.Module],
    queue: DeferredWeightGrads,
    compiled: bool = False,
) -> None:
    """Splits the backward of every `Linear` in `stages`. `compiled`: keeps the compiler from
    tracing it.

    A weight that is used twice (a head tied to the embedding on the same rank, or one that predicts
    further tokens) keeps its backward: its gradients must be summed within one backward, otherwise
    two would arrive.
    """
    modules = [module for stage in stages for module in stage.modules()]
    holders = Counter(id(param) for module in modules for param in module.parameters(recurse=False))
    split = SplitBackward(queue)
    # A decorator on the class would import torch._dynamo in every process, which takes a second.
    run = torch.compiler.disable(split) if compiled else split
    for module in modules:
        if isinstance(module, Linear) and holders[id(module.weight)] == 1 and not module.reused:
            module.run = run


class SplitBackward:
    """A `Linear.run` whose backward defers the weight gradient while `queue` is open."""

    def __init__(self, queue: DeferredWeightGrads):
        self.queue = queue
        # The anchor makes the output require a gradient if neither the hidden weight nor the input
        # does.
        self.anchor = torch.empty(0, requires_grad=True)

    def __call__(self, linear: Linear, x: Tensor) -> Tensor:
        return _Split.apply(
            x,
            linear.weight.detach(),
            linear.bias,
            self.anchor,
            linear,
            self.queue,
        )


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
