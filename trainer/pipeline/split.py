"""Split backward: a matrix's weight gradient waits until the schedule asks for it (zero-bubble, DualPipe).

Each `Linear.op` is replaced by one whose backward computes the input's gradient at once and leaves the weight's as a
note of its two factors. The weight is hidden from autograd (a hook on it would else run without a gradient), so its
gradient reaches `param.grad` and `on_grad` from here alone. Nothing looks into the autograd graph, so it holds for
compiled blocks (the op is a graph break), recomputed ones, and any attention mask. Everything that is not a matrix
(norms, biases, embeddings) gets its gradient with the input's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.linear import Linear

#: Told after `param.grad` has received one more micro-batch's gradient, as a post-accumulate-grad hook would be.
OnGrad = Callable[[Tensor], None]
Note = tuple[Linear, Tensor, Tensor]  # whose weight, its input x [..., in], the gradient of its output [..., out]


class WeightQueue:
    """Collects notes while a backward runs, and works them off later. While closed, it works each off at once."""

    def __init__(self, on_grad: OnGrad | None = None):
        self._on_grad = on_grad
        self._notes: list[Note] | None = None

    def open(self) -> None:
        self._notes = []

    def close(self) -> list[Note]:
        """What was noted since `open`, in order of backward."""
        notes, self._notes = self._notes, None
        return notes

    def note(self, linear: Linear, x: Tensor, grad: Tensor) -> None:
        if self._notes is None:
            self.work_off([(linear, x, grad)])
        else:
            self._notes.append((linear, x, grad))

    @torch.no_grad()
    def work_off(self, notes: list[Note]) -> None:
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


def install(stages: Iterable[nn.Module], queue: WeightQueue, compiled: bool = False) -> None:
    """Give every `Linear` in `stages` an op that can wait; `compiled`: one that the compiler leaves alone.

    A matrix that something else uses as well (a head tied to the embedding on the same rank) keeps its own op: its
    parts must be summed within one backward, or its gradient would arrive twice.
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
    """A `Linear.op`: F.linear forward; backward in one part or two, as the queue says."""

    def __init__(self, linear: Linear, queue: WeightQueue):
        self.linear, self.queue = linear, queue
        # Makes the output need a gradient where neither the hidden weight nor the input does.
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
        ctx.op.queue.note(ctx.op.linear, x, grad)
        return grad_x, None, grad_bias, None, None
