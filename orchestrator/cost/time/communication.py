"""Seconds of communication that no compute hides.

They are those of one micro-batch, of transfers between stages, and of gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from orchestrator.cost.dual import Number, larger, value_of
from orchestrator.cost.model.layers import sample_layers
from orchestrator.cost.rates import Rates
from orchestrator.cost.software import Software
from orchestrator.cost.time import collective
from orchestrator.cost.workload import Workload
from orchestrator.plan.cluster import Operation
from orchestrator.plan.document import Parallel
from orchestrator.plan.expert_mesh import axes, expert_mesh
from orchestrator.plan.flops import prediction_blocks

from .compute import Compute
from .expert_exchange import phases
from .fabric import Path
from .imbalance import imbalance
from .layer_traffic import (
    Overlap,
    TensorOperation,
    expert_operations,
    tensor_operations,
    vocabulary_operations,
)
from .traffic import PathKey, context_parallel_operations, gradient_traffic


class TensorSeconds(NamedTuple):
    """Exposed tensor-parallel communication of one micro-batch."""

    dense: Number  # one dense layer, forward and backward
    moe: Number  # one layer with experts
    first: Number  # the first stage, outside its layers
    last: Number  # the last stage, outside its layers


def tensor_seconds(
    workload: Workload,
    rate: Rates,
    compute: Compute,
    paths: Mapping[PathKey, Path],
) -> TensorSeconds:
    """Returns the exposed tensor-parallel communication of one micro-batch.

    Each further prediction looks tokens up and has a loss.
    """
    model = workload.model
    ahead = prediction_blocks(model)
    par = workload.parallel
    if par.tp == 1:
        return TensorSeconds(0.0, 0.0, 0.0, 0.0)
    costs = _TensorCosts(workload, rate, compute, paths[("tp",), "ring"])
    dense: Number = 0.0
    moe: Number = 0.0
    load = value_of(imbalance(par, rate))
    dense_layer, moe_layer = sample_layers(model)
    if dense_layer is not None:
        dense = costs.exposed(tensor_operations(workload, False, load))
    if moe_layer is not None:
        moe = costs.exposed(tensor_operations(workload, True, load))
    first = costs.exposed(vocabulary_operations(workload, 1, 0))
    last = costs.exposed(vocabulary_operations(workload, ahead, 1 + ahead))
    # The loss exchanges two numbers per token.
    loss_bytes = workload.tokens * 2 * 4 * par.tp
    loss = TensorOperation("all_gather", "", loss_bytes, 1.0, par.tp)
    return TensorSeconds(
        dense,
        moe,
        first,
        last + (1 + ahead) * costs.exposed_once(loss),
    )


class _TensorCosts:
    """The exposed seconds of tensor-parallel operations. Equal operations are computed once."""

    def __init__(self, workload: Workload, rate: Rates, compute: Compute, path: Path):
        self.in_pieces = workload.software.tp_overlap
        self.shown = rate.tp_exposed
        self.overlap_s = compute.overlap_s
        self.path = path
        self.links = rate.tensor_outside if path.fabric_s else rate.tensor
        self._seconds: dict[tuple[Operation, float, int], Number] = {}

    def exposed(self, operations: Iterable[TensorOperation]) -> Number:
        """Returns the exposed seconds of these operations."""
        total: Number = 0.0
        for operation in operations:
            total += operation.times * self.exposed_once(operation)
        return total

    def exposed_once(self, operation: TensorOperation) -> Number:
        """Returns the exposed seconds of an operation that runs once."""
        if operation.pieces > 1:
            return self.shown * self._exposed_pieces(operation)
        once = self._once(operation)
        if operation.overlap:  # the whole operation runs behind a product that does not need it
            return self.shown * self._late(once, operation.overlap)
        # the operation runs in pieces behind the product before or after it
        if self.in_pieces:
            late = self._late(once, "attention") + self._late(once, "mlp")
            return self.shown * once + (1.0 - self.shown) / 2 * late
        return self.shown * once

    def _exposed_pieces(self, operation: TensorOperation) -> Number:
        """Returns the exposed seconds of pieces between the pieces of a product.

        Nothing hides the first one of an input, or the last one of a result.
        """
        piece = self._once(operation._replace(size=operation.size / operation.pieces))
        product = self.overlap_s[operation.overlap] / operation.pieces
        return piece + (operation.pieces - 1) * larger(0.0, piece - product)

    def _once(self, operation: TensorOperation) -> Number:
        """Returns the seconds of an operation that runs once and alone."""
        key = operation.operation, operation.size, operation.ranks
        if key not in self._seconds:
            self._seconds[key] = collective.seconds(*key, self.path, self.links)
        return self._seconds[key]

    def _late(self, once: Number, overlap: Overlap) -> Number:
        """Returns the seconds by which an operation outlasts the product that it overlaps with."""
        return larger(0.0, once - self.overlap_s[overlap])


def context_seconds(
    workload: Workload,
    rate: Rates,
    paths: Mapping[PathKey, Path],
) -> Number:
    """Returns the exposed context-parallel communication of a layer and micro-batch.

    Forward and backward are included.
    """
    par = workload.parallel
    total: Number = 0.0
    for operation, size, count, window in context_parallel_operations(workload):
        path = paths[("cp",), collective.PATTERN[operation]]
        seconds = count * collective.seconds(operation, size, par.cp, path, rate.ring)
        total += seconds * rate.cp_exposed if window == "attention" else seconds
    return total


def expert_seconds(
    workload: Workload,
    rate: Rates,
    paths: Mapping[PathKey, Path],
) -> Number:
    """Returns the exposed all-to-all of an MoE layer and micro-batch, forward and backward."""
    model = workload.model
    par = workload.parallel
    total: Number = 0.0
    ranks = expert_mesh(par).ep
    load = imbalance(par, rate)
    for operation, size, count in expert_operations(workload) if ranks > 1 else ():
        for path in phases(paths[axes(par), collective.PATTERN[operation]], model, par):
            total += (
                count
                * collective.seconds(operation, size * load, ranks, path, rate.ring)
                * rate.ep_exposed
            )
    return total


def transfer_seconds(
    size: float,
    pp: int,
    rate: Rates,
    paths: Mapping[PathKey, Path],
) -> Number:
    """Returns the exposed seconds of one transfer of `size` bytes between stages."""
    return rate.pp_exposed * collective.seconds("p2p", size, pp, paths[("pp",), "chain"], rate.ring)


def gradient_seconds(
    workload: Workload,
    held: tuple[int, int],
    rate: Rates,
    paths: Mapping[PathKey, Path],
    outside: int = 0,
) -> Number:
    """Returns the seconds of all communication of a rank's gradients and weights.

    `held` and `outside` are the same as in `gradient_traffic`.
    """
    total: Number = 0.0
    for message in gradient_traffic(workload, held, outside):
        total += message.count * collective.seconds(
            message.operation,
            message.size,
            message.members,
            paths[message.key],
            rate.ring,
        )
    return total


def exposed_gradients(
    total: Number,
    par: Parallel,
    rate: Rates,
    software: Software,
    micro_batch: Number,
) -> Number:
    """Returns the exposed seconds of gradient communication that takes `total` seconds.

    `micro_batch` is the seconds of one micro-batch on the rank.
    """
    shown, windows = gradient_overlap(par, rate, software)
    if not windows:
        return shown * total
    return shown * total + (1.0 - shown) * larger(0.0, total - micro_batch * windows)


def gradient_overlap(par: Parallel, rate: Rates, software: Software) -> tuple[Number, int]:
    """Returns (share of gradient communication that is exposed, micro-batches that may hide it).

    With 0 micro-batches, the rest is always hidden.
    """
    overlap = software.dp_overlap
    if par.zero == 3 and overlap in ("modern", "early"):
        overlap = "fsdp"
        shown = rate.dp_sharded
    else:
        shown = rate.dp_exposed
    if overlap in ("early", "zero_2021"):
        return shown, 0
    return shown, par.micro_batches if par.zero >= 2 or overlap == "jax" else 1
