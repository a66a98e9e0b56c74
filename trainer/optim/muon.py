"""Muon: a matrix moves along the orthogonal part of its momentum (arXiv 2502.16982, section 2).

The orthogonal part comes from five Newton-Schulz steps, which bring every singular value near 1.
They need the whole matrix: its owner makes them (`owners`), so that all get what one process gets.
They are made in the master dtype: in bf16, as often elsewhere, layouts would differ.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestrator.plan.document import Optim
from trainer.comm.collectives import CommCounter
from trainer.parallel.params import StateKind

from .owners import map_whole_matrices, rounds
from .rule import Matrix, Update

#: Of the quintic a x + b x^3 + c x^5 that each step applies to singular values, and how many steps.
QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
#: An update's root mean square, as AdamW's is, whatever the shape: so both take the same learning
#: rate.
RMS = 0.2


class Muon:
    kinds: tuple[StateKind, ...] = ("momentum",)

    def __init__(self, optim: Optim):
        self.momentum = optim.beta1
        self.weight_decay = optim.weight_decay

    def step(self, matrices: Sequence[Matrix], update: Update, counter: CommCounter) -> None:
        """m = beta1 m + g; w = (1 - lr decay) w - lr 0.2 sqrt(longer side) orthogonal(g + beta1
        m)."""
        keep = 1 - update.lr * self.weight_decay
        for indices in rounds([matrix.cuts for matrix in matrices]):
            group = [matrices[at] for at in indices]
            momenta = [one.grad + self.momentum * one.state["momentum"] for one in group]
            lookaheads = [
                one.grad + self.momentum * momentum
                for one, momentum in zip(group, momenta, strict=True)
            ]
            directions = map_whole_matrices(
                lookaheads, [one.cuts for one in group], counter, orthogonal
            )
            for matrix, momentum, direction in zip(group, momenta, directions, strict=True):
                size = update.lr * RMS * max(matrix.info.global_shape) ** 0.5
                update.set(matrix.state["momentum"], momentum)
                update.set(matrix.master, matrix.master * keep - direction * size)


def orthogonal(matrix: Tensor) -> Tensor:
    """U f(S) V^T of a matrix U S V^T divided by its Frobenius norm, where f brings values to
    between 0.7 and 1.2; zeros stay zeros."""
    tall = matrix.shape[0] > matrix.shape[1]
    value = matrix.T if tall else matrix
    value = value / (value.norm() + 1e-7)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        square = value @ value.T
        value = a * value + (b * square + c * square @ square) @ value
    return value.T if tall else value
