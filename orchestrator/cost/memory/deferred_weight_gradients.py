"""Bytes that a split backward keeps between an input's gradient (I) and the weights' gradient (W).

Of every matrix, the input and the gradient of the output are kept until W
(`trainer/pipeline/split.py`). Everything else that forward kept, or that was recomputed, is freed
after I. Qi et al. (arXiv 2401.10241, section 2) call the kept bytes M_W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from orchestrator.cost.model.layers import sample_layers
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Parallel
from orchestrator.plan.layer import Half, layer_operations
from orchestrator.plan.schedules import SCHEDULES, TABLE, Action, Kind, schedule_of

from .unequal_stages import StageBytes

#: Schedules that split backward -> n: a rank is n forwards ahead of its backwards per later rank,
#: and n W behind them per earlier rank; None: counted on the schedule.
SPLIT_BACKWARD: dict[str, int | None] = {
    "zb_h1": 1,
    "zb_h2": 2,
    "zbv": None,
    "dualpipe": None,
    "dualpipev": None,
}

#: The schedules among them whose backward is whole at their peak, where nothing is deferred.
WHOLE_AT_PEAK = ("dualpipe", "dualpipev")

#: (micro-batches before their I, micro-batches between I and W) on one stage of a rank, just before
#: an I.
Point = tuple[int, int]


#: (number, kind as in `sample_layers`, bytes of one before its I or B, further bytes while it is
#: recomputed).
Layers = tuple[int, int, float, float]


class DeferredGradients:
    """The bytes that one micro-batch defers on one rank, and their peak over a step."""

    def __init__(self, workload: Workload):
        model = workload.model
        parallel = workload.parallel
        self.parallel = parallel
        size = workload.width * workload.tokens
        #: By kind of layer as in `sample_layers`: (bytes kept until W, bytes of gradients that are
        #: computed while the inputs are kept).
        elements = (
            (0.0, 0.0) if layer is None else _layer(workload, layer)
            for layer in sample_layers(model)
        )
        self.layers = [(size * deferred, size * grads) for deferred, grads in elements]
        defers_head = not model.tied_embeddings  # a token table has a whole backward
        logits = size * workload.vocabulary_rows * defers_head
        self.head = logits + size * model.hidden * defers_head
        if model.head_transform:  # its input, and the gradient of its output
            self.head += 2 * size * model.hidden / workload.sequence_shards
        # The gradient of the logits at the peak.
        self.logits = 0.0 if parallel.schedule in WHOLE_AT_PEAK else logits

    def peak(
        self,
        rank: int,
        in_flight_count: int,
        stored: float,
        stages: int,
        layers: Sequence[Layers],
        head: float | None,
    ) -> float:
        """Returns the peak activation bytes of a pipeline rank.

        `in_flight_count` is the result of `pipeline.in_flight`. `stored` is the bytes of one
        micro-batch before its I, in one of the rank's `stages`. `head` is the bytes kept by output
        projection and loss, None on ranks without them.
        """
        deferred = (
            sum(n * self.layers[kind][0] for n, kind, *_ in layers) + (self.head if head else 0.0)
        ) / stages
        grads = [
            0.0 if self.parallel.schedule in WHOLE_AT_PEAK else self.layers[kind][1]
            for _, kind, *_ in layers
        ]
        during_input = max(
            (recomputing + grad for (*_, recomputing), grad in zip(layers, grads, strict=True)),
            default=0.0,
        )
        if head is not None:
            during_input = max(head + self.logits, self.head + during_input)
        # In the last layer's I, all other layers are deferred already.
        in_last = max(
            (
                layer_bytes + recomputing + grad - self.layers[kind][0]
                for (_, kind, layer_bytes, recomputing), grad in zip(layers, grads, strict=True)
            ),
            default=0.0,
        )
        return max(
            max(
                full * stored + count * deferred + during_input,
                (full - 1) * stored + (count + 1) * deferred + max(0.0, in_last),
            )
            for full, count in peak_points(
                self.parallel,
                rank,
                in_flight_count if deferred <= stored else None,
            )
        )

    def stage(self, layers: Sequence[Layers], stored: float, head: float) -> StageBytes:
        """Returns the bytes of one micro-batch in one stage, as `bytes_of_stage` does."""
        whole_at_peak = self.parallel.schedule in WHOLE_AT_PEAK
        last = head > 0.0
        during = [
            recomputing + (0.0 if whole_at_peak else self.layers[kind][1])
            for _, kind, _, recomputing in layers
        ]
        in_last = (
            layer_bytes + recomputing - self.layers[kind][0]
            for (_, kind, layer_bytes, _), recomputing in zip(layers, during, strict=True)
        )
        return StageBytes(
            stored=stored,
            head=head,
            during=max(during, default=0.0),
            deferred=sum(n * self.layers[kind][0] for n, kind, *_ in layers) + self.head * last,
            in_head=self.logits * last,
            head_deferred=self.head * last,
            in_last=max(0.0, *in_last) if layers else 0.0,
        )


def bytes_of_stage(
    layers: Sequence[Layers],
    stored: float,
    head: float,
    deferred: DeferredGradients | None,
) -> StageBytes:
    """Returns the bytes of one micro-batch in one stage.

    `stored` is the same as in `DeferredGradients.peak`. `head` is the bytes kept by output
    projection and loss, 0 in other stages. `deferred` is given if backward is split.
    """
    if deferred:
        return deferred.stage(layers, stored, head)
    return StageBytes(
        stored,
        head,
        max((recomputing for *_, recomputing in layers), default=0.0),
    )


def _layer(workload: Workload, layer: int) -> tuple[float, float]:
    """Returns the elements per token that a layer defers.

    The result is (inputs and output gradients of all matrices, output gradients of the MLP's).
    Products with the same inputs keep them once. Routed experts and routers defer nothing.
    """
    tp = workload.parallel.tp
    shards = workload.sequence_shards
    inputs: dict[str, float] = {}
    grads: dict[Half, float] = {"attention": 0.0, "mlp": 0.0}
    for operation in layer_operations(workload.model, layer):
        if operation.kind != "product" or operation.routed:
            continue
        for saved in operation.saves:
            inputs[saved.tensor] = saved.read_on_rank(tp, shards)
        is_shard = operation.cut == "whole"  # products that are not cut read shards
        grads[operation.half] += operation.outputs_on_rank(tp) / (shards if is_shard else 1)
    return sum(inputs.values()) + sum(grads.values()), grads["mlp"]


def peak_points(
    parallel: Parallel,
    rank: int,
    in_flight_count: int | None = None,
) -> list[Point]:
    """Returns the points of a step at which a pipeline rank may hold most.

    `in_flight_count` is the most micro-batches in flight. It is given only if no micro-batch has
    more bytes before W than before I.
    """
    if parallel.schedule == TABLE:
        return _highest(schedule_of(parallel).orders[rank])
    step, (p, m) = SPLIT_BACKWARD[parallel.schedule], (parallel.pp, parallel.micro_batches)
    if step is None:  # nothing waits for W at the peak of these schedules
        if in_flight_count is not None:
            return [(in_flight_count, 0)]
        is_dualpipe = parallel.schedule == "dualpipe"
        # the two halves of its ranks mirror each other
        rank = min(rank, p - 1 - rank) if is_dualpipe else rank
        if parallel.schedule in WHOLE_AT_PEAK and m >= 2 * p:
            return _full_bidirectional(p // 2 if is_dualpipe else p, rank)
        return _counted(
            parallel.schedule,
            p,
            min(m, 2 * p + 2 + m % 2),
            parallel.vpp,
            rank,
        )
    ahead = min(step * (p - 1 - rank), m)
    behind = step * rank
    # The turns in steady state, and when forwards run out.
    turns = (
        min(behind, max(0, m - 1 - ahead)),
        min(behind, m - 1),
    )
    return sorted(
        {(min(m, turn + ahead + 1) - turn, turn) for turn in turns},
        reverse=True,
    )


def _full_bidirectional(half: int, depth: int) -> list[Point]:
    """Returns the points of `schedules.dual.script` with a full pipeline.

    All backwards are whole except in its last two steps: there forwards have ended, and in the end
    `depth` micro-batches wait for W.
    """
    return [(2 * half + 1, 0), *((half - waiting, waiting) for waiting in range(1, depth + 1))]


@lru_cache(maxsize=4096)
def _counted(
    name: str,
    p: int,
    m: int,
    v: int,
    rank: int,
) -> list[Point]:
    """Returns the points of a schedule, cached.

    After a few rounds of micro-batches, further ones add no new points.
    """
    return _highest(SCHEDULES[name].order(rank, p, m, v))


def _highest(order: Iterable[Action]) -> list[Point]:
    """Returns the points that no other point exceeds in both numbers."""
    frontier: list[Point] = []
    for full, deferred in sorted(set(_points(order)), reverse=True):
        if not frontier or deferred > frontier[-1][1]:
            frontier.append((full, deferred))
    return frontier


def _points(order: Iterable[Action]) -> Iterator[Point]:
    """Yields the point before each backward of a rank."""
    full = deferred = 0
    for kind, *_ in order:
        if kind is Kind.F:
            full += 1
        elif kind is Kind.W:
            deferred -= 1
        else:
            yield full, deferred
            full -= 1
            deferred += kind is Kind.I
