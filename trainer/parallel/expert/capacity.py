"""Experts that accept a bounded number of tokens per sequence (`trainer.model.capacity`), where
ranks hold parts of sequences.

Ranks gather the choices of all tokens of their sequences, 4 bytes per choice, and each decides for
the whole sequence: all ranks that share a sequence decide alike, and as one process does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.plan.supported import BALANCED
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.parallel.context.order import chunks, natural_order
from trainer.parallel.tensor import AXIS, gather_sequence


class WholeSequences:
    """A `model.experts.OfSequences` for sequences whose parts are on the ranks of cp, and of tp
    with sequence parallelism."""

    def __init__(self, mesh: Mesh, sp: bool, cp_method: str, counter: CommCounter):
        self.mesh = mesh
        self.sp = sp
        self.method = cp_method
        self.counter = counter

    def __call__(self, rows: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        tp = self.mesh.group("tp") if self.sp else None
        cp = self.mesh.group("cp")
        sequences = rows.int()
        if tp is not None:
            sequences = gather_sequence(sequences, tp, self.counter, AXIS)
        if cp is not None:
            sequences = self._gather_over_cp(sequences, cp)
        outputs = function(sequences.to(rows.dtype))
        if cp is not None:
            ranges = chunks(
                self.method,
                outputs.shape[1],
                cp.size(),
                self.mesh.index("cp"),
            )
            columns = [outputs[:, positions.start : positions.stop] for positions in ranges]
            outputs = torch.cat(columns, dim=1)
        if tp is None:
            return outputs
        return outputs.chunk(tp.size(), dim=1)[self.mesh.index("tp")]

    def _gather_over_cp(self, rows: Tensor, cp: dist.ProcessGroup) -> Tensor:
        """[b, s / cp, k] of every rank -> [b, s, k] in sequence order."""
        count = cp.size() * (2 if self.method in BALANCED else 1)
        shards = gather_sequence(rows, cp, self.counter, "cp").chunk(count, dim=1)
        order = natural_order(self.method, count, cp.size())
        return torch.cat([shards[position] for position in order], dim=1)
