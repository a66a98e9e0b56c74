"""Experts that take a bounded number of tokens of a sequence (`trainer.model.capacity`), of which
ranks hold parts.

Ranks tell each other what their tokens have chosen, 4 bytes a choice, and each decides for the
whole sequence: all that share one decide alike, and as one process does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from orchestrator.plan.supported import BALANCED
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.parallel.context.order import chunks, natural_order
from trainer.parallel.tensor import AXIS, gather_sequence


class WholeSequences:
    """A `model.experts.OfSequences` where ranks of cp, and of tp with sequence parallelism, have
    parts of sequences."""

    def __init__(self, mesh: Mesh, sp: bool, cp_method: str, counter: CommCounter):
        self.mesh = mesh
        self.sp = sp
        self.method = cp_method
        self.counter = counter

    def __call__(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        mesh = self.mesh
        sequences = rows.int()
        tp = mesh.group("tp") if self.sp else None
        cp = mesh.group("cp")
        if tp is not None:
            sequences = gather_sequence(sequences, tp, self.counter, AXIS)
        if cp is not None:
            count = cp.size() * (2 if self.method in BALANCED else 1)
            concatenated = gather_sequence(sequences, cp, self.counter, "cp").chunk(count, dim=1)
            sequences = torch.cat(
                [
                    concatenated[position]
                    for position in natural_order(self.method, count, cp.size())
                ],
                dim=1,
            )
        outputs = function(sequences.to(rows.dtype))
        if cp is not None:
            columns = chunks(self.method, outputs.shape[1], cp.size(), mesh.index("cp"))
            outputs = torch.cat(
                [outputs[:, positions.start : positions.stop] for positions in columns], dim=1
            )
        return outputs if tp is None else outputs.chunk(tp.size(), dim=1)[mesh.index("tp")]
