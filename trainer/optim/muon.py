"""Muon: a matrix moves along the orthogonal part of its momentum (arXiv 2502.16982, section 2).

The orthogonal part comes from five Newton-Schulz steps, which bring every singular value near 1.
The steps need the whole matrix: its owner computes them (`owners`), so every layout gets the result
of one process. They are computed in the master dtype: in bf16, which is common elsewhere, layouts
would differ. They are computed on the device, also if the momentum is on the host: a matrix takes
fifteen products of its size, for two copies over the link.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestrator.plan.document import Optim
from trainer.comm.collectives import CommCounter
from trainer.parallel.params import StateKind

from .owners import map_whole_matrices, rounds
from .rule import Matrix, Update

#: The coefficients of the quintic a x + b x^3 + c x^5 that each step applies to singular values,
#: and the number of steps.
QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
#: The root mean square of an update of any shape. It is that of AdamW's, so that both use the same
#: learning rate.
RMS = 0.2


class Muon:
    kinds: tuple[StateKind, ...] = ("momentum",)

    def __init__(self, optim: Optim):
        self.momentum = optim.beta1
        self.weight_decay = optim.weight_decay

    def step(
        self,
        matrices: Sequence[Matrix],
        update: Update,
        counter: CommCounter,
    ) -> None:
        """m = beta1 m + g; w = (1 - lr decay) w - lr 0.2 sqrt(longer side) orthogonal(g + beta1
        m)."""
        keep = 1 - update.lr * self.weight_decay
        for indices in rounds([matrix.cuts for matrix in matrices]):
            group = [matrices[at] for at in indices]
            momenta = [matrix.grad + self.momentum * matrix.state["momentum"] for matrix in group]
            lookaheads = [
                (matrix.grad + self.momentum * momentum).to(matrix.device)
                for matrix, momentum in zip(group, momenta, strict=True)
            ]
            cuts = [matrix.cuts for matrix in group]
            directions = map_whole_matrices(lookaheads, cuts, counter, orthogonal)
            for matrix, momentum, direction in zip(group, momenta, directions, strict=True):
                size = update.lr * RMS * max(matrix.info.global_shape) ** 0.5
                update.set(matrix.state["momentum"], momentum)
                move = direction.to(matrix.master.device) * size
                update.set(matrix.master, matrix.master * keep - move)


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns U f(S) V^T for a matrix that is U S V^T after division by its Frobenius norm. f
    brings singular values to between 0.7 and 1.2; zeros stay zeros."""
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if tall else matrix
    wide = wide / (wide.norm() + 1e-7)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        square = wide @ wide.T
        wide = a * wide + (b * square + c * square @ square) @ wide
    return wide.T if tall else wide
