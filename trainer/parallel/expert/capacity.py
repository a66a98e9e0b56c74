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
        whole = rows.int()
        tp = mesh.group("tp") if self.sp else None
        cp = mesh.group("cp")
        if tp is not None:
            whole = gather_sequence(whole, tp, self.counter, AXIS)
        if cp is not None:
            parts = cp.size() * (2 if self.method in BALANCED else 1)
            laid = gather_sequence(whole, cp, self.counter, "cp").chunk(parts, dim=1)
            whole = torch.cat(
                [laid[place] for place in natural_order(self.method, parts, cp.size())], dim=1
            )
        found = function(whole.to(rows.dtype))
        if cp is not None:
            mine = chunks(self.method, found.shape[1], cp.size(), mesh.index("cp"))
            found = torch.cat([found[:, one.start : one.stop] for one in mine], dim=1)
        return found if tp is None else found.chunk(tp.size(), dim=1)[mesh.index("tp")]
