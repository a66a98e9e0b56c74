"""Experts cut over tensor-parallel ranks. The router is whole on every rank and computes before the
region, so its scores and the terms that balance them are those of a rank's own tokens."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_reduce
from trainer.comm.mesh import Mesh
from trainer.model.router import Routing
from trainer.parallel.tensor import AXIS, Copy, Gather, gather_sequence


class ReplicatedTokens:
    """A `model.experts.Enter` without sequence parallelism: all ranks hold the same tokens, and
    each rank computes a part of the gradients of tokens and weights."""

    def __init__(self, group: dist.ProcessGroup, counter: CommCounter):
        self.group = group
        self.counter = counter

    def __call__(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        weights = Copy.apply(routing.weights, self.group, self.counter)
        return Copy.apply(x, self.group, self.counter), routing._replace(weights=weights)


class GatheredTokens:
    """A `model.experts.Enter` with sequence parallelism: gathers the tokens of all ranks of the
    group and their routing."""

    def __init__(self, group: dist.ProcessGroup, counter: CommCounter):
        self.group = group
        self.counter = counter

    def __call__(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        shape = *x.shape[:2], -1
        experts = gather_sequence(
            routing.experts.view(shape),
            self.group,
            self.counter,
        )
        weights = Gather.apply(
            routing.weights.view(shape),
            self.group,
            self.counter,
        )
        all_x = Gather.apply(x, self.group, self.counter)
        accepted = routing.accepted
        if accepted is not None:
            accepted = gather_sequence(accepted.view(shape), self.group, self.counter)
            accepted = accepted.flatten(0, 1)
        return all_x, routing._replace(
            experts=experts.flatten(0, 1),
            weights=weights.flatten(0, 1),
            accepted=accepted,
        )


class SequenceCounts:
    """Sums choices over the ranks that hold parts of the same sequences: cp, and tp with sequence
    parallelism."""

    def __init__(self, mesh: Mesh, sp: bool, counter: CommCounter):
        self.groups = [("cp", mesh.group("cp")), (AXIS, mesh.group("tp") if sp else None)]
        self.counter = counter

    def __call__(self, counts: Tensor) -> Tensor:
        for axis, group in self.groups:
            counts = all_reduce(counts, group, axis, self.counter)
        return counts
