"""Split backward: the weight gradients of linears are deferred until the schedule runs them (zero-bubble, DualPipe).

Each `Linear.op` is replaced by one whose backward computes the input's gradient at once and stores the two factors of
the weight's. The weight is hidden from autograd (whose hooks would run without a gradient), so its gradient reaches
`param.grad` and `on_grad` only from here. Nothing depends on the autograd graph, so it works for compiled blocks (the
op is a graph break), recomputed ones and any attention mask. All other parameters (norms, biases, embeddings) get their
gradient together with the input's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.linear import Linear

#: Called after `param.grad` has received one more micro-batch's gradient, like a post-accumulate-grad hook.
OnGrad = Callable[[Tensor], None]
DeferredWeightGrad = tuple[
    Linear, Tensor, Tensor
]  # whose weight, its input x [..., in], the gradient of its output [..., out]


class DeferredWeightGrads:
    """Collects weight gradients to compute later while open; while closed, computes each at once."""

    def __init__(self, on_grad: OnGrad | None = None):
        self._on_grad = on_grad
        self._notes: list[DeferredWeightGrad] | None = None
        self.on_defer: Callable[[Tensor], None] | None = None  # called with each gradient that is kept until then

    def open(self) -> None:
        self._notes = []

    def close(self) -> list[DeferredWeightGrad]:
        """The deferred gradients since `open`, in order of backward."""
        notes, self._notes = self._notes, None
        return notes or []

    def add(self, linear: Linear, x: Tensor, grad: Tensor) -> None:
        if self._notes is None:
            self.compute([(linear, x, grad)])
        else:
            self._notes.append((linear, x, grad))
            if self.on_defer is not None:
                self.on_defer(grad)

    @torch.no_grad()
    def compute(self, notes: list[DeferredWeightGrad]) -> None:
        """Compute the weight gradients, [out, in], summed over all leading dimensions of [..., in] and [..., out]; add
        each to its parameter, drop the activations one by one."""
        notes.reverse()
        while notes:
            linear, x, grad = notes.pop()
            weight, factors = linear.weight, (grad.flatten(0, -2).T, x.flatten(0, -2))
            if weight.grad is None:
                weight.grad = torch.mm(*factors)
            else:
                weight.grad.addmm_(*factors)
            if self._on_grad is not None:
                self._on_grad(weight)


def install(stages: Iterable[nn.Module], queue: DeferredWeightGrads, compiled: bool = False) -> None:
    """Give every `Linear` in `stages` a splitting op; `compiled`: one that the compiler does not trace.

    A weight that another module uses too (a head tied to the embedding on the same rank) keeps its op: its gradients
    must be summed within one backward, or two would arrive.
    """
    modules = [module for stage in stages for module in stage.modules()]
    holders = Counter(id(param) for module in modules for param in module.parameters(recurse=False))
    for module in modules:
        if isinstance(module, Linear) and holders[id(module.weight)] == 1:
            if module.op is not F.linear:
                raise ValueError(f"split backward cannot replace the op {module.op!r} of a Linear")
            op = SplitLinear(module, queue)
            # Not a decorator on the class: that imports torch._dynamo, a second in every process.
            module.op = torch.compiler.disable(op) if compiled else op


class SplitLinear:
    """A `Linear.op`: F.linear forward; backward defers the weight gradient while `queue` is open."""

    def __init__(self, linear: Linear, queue: DeferredWeightGrads):
        self.linear, self.queue = linear, queue
        # Makes the output require a gradient if neither the hidden weight nor the input does.
        self.anchor = torch.empty(0, requires_grad=True)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _Split.apply(x, weight.detach(), bias, self.anchor, self)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Tensor, op: SplitLinear) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        ctx.op.queue.add(ctx.op.linear, x, grad)
        return grad_x, None, grad_bias, None, None
