"""Split backward: what waits between the input's gradient (I) and the weights' (W), and how much of it at once.

Of every matrix its input and the gradient of its output stay (`trainer/pipeline/split.py`); all else that the forward
kept, or that recomputation made again, is gone after I. Qi et al. (arXiv 2401.10241, section 2) call it M_W.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from orchestrator.plan.document import Model, Parallel, Train
from orchestrator.plan.schedules import SCHEDULES, TABLE, Action, Kind, schedule_of
from orchestrator.planner.cost.traffic import WIDTH
from orchestrator.planner.model.layers import is_moe_layer, samples_of_kinds

#: Schedules that cut backward in two, and how far ahead of its backwards, and behind them with its weights, a rank is
#: for each rank that is behind or ahead of it; None: read off the schedule.
SPLIT: dict[str, int | None] = {"zb_h1": 1, "zb_h2": 2, "zbv": None, "dualpipe": None, "dualpipev": None}

#: (micro-batches before their I, micro-batches between I and W), each through one stage of a rank, just before an I
Point = tuple[int, int]


class Waits:
    """Bytes of one micro-batch on one rank."""

    def __init__(self, model: Model, parallel: Parallel, train: Train):
        self.parallel = parallel
        size = WIDTH[train.precision] * parallel.micro_batch_size * train.seq_len / parallel.cp
        #: by kind of layer as in `samples_of_kinds`: (all that waits, gradients made while its inputs still stand)
        self.layers = [
            None if layer is None else tuple(size * count for count in _layer(model, layer, parallel.tp))
            for layer in samples_of_kinds(model)
        ]
        self.logits = size * -(-model.vocab // parallel.tp)  # their gradient
        self.head = self.logits + size * model.hidden

    def peak(
        self,
        rank: int,
        flying: int,
        held: float,
        stages: int,
        layers: Sequence[tuple[int, int, float]],
        head: float | None,
    ) -> float:
        """Most bytes that a pipeline rank keeps.

        flying: micro-batches at once, as `pipeline.in_flight`; held: of one before its I, in one of the rank's
        `stages`; layers: (how many, kind, what one has more while it runs again); head: what the output projection and
        its loss keep, on the rank that has them.
        """
        waits = sum(count * self.layers[kind][0] for count, kind, _ in layers) + (self.head if head else 0.0)
        waits /= stages
        turning = max((more + self.layers[kind][1] for _, kind, more in layers), default=0.0)
        if head is not None:
            turning = max(head + self.logits, self.head + turning)
        # the last layer to run again, beside what waits of all others
        again = max((max(0.0, more - self.layers[kind][0]) for _, kind, more in layers if more), default=0.0)
        return max(
            max(full * held + count * waits + turning, (full - 1) * held + (count + 1) * waits + again)
            for full, count in held_points(self.parallel, rank, flying if waits <= held else None)
        )


def _layer(model: Model, layer: int, tp: int) -> tuple[float, float]:
    """Elements a token: inputs, whole along the sequence, with gradients of outputs; and those of the feed-forward."""
    if model.mla is not None:
        m = model.mla
        latent, heads = m.q_lora_rank + m.kv_lora_rank, model.heads / tp
        inputs = heads * m.v_head_dim + latent
        grads = heads * (2 * (m.qk_nope_head_dim + m.qk_rope_head_dim) + m.v_head_dim) + latent
    else:
        inputs = model.heads / tp * model.head_dim
        grads = inputs + 2 * max(1.0, model.kv_heads / tp) * model.head_dim
    ffn, many = model.ffn_hidden / tp, 1
    if is_moe_layer(model, layer):
        ffn, many = (model.moe.top_k * model.moe.ffn_hidden + model.moe.shared_ffn_hidden) / tp, model.moe.top_k
    forward = model.hidden * many + (2 if model.mlp == "gated" else 1) * ffn  # gradients
    return inputs + grads + model.hidden * (2 + many) + ffn + forward, forward


def held_points(parallel: Parallel, rank: int, flying: int | None = None) -> list[Point]:
    """What one pipeline rank holds where it holds most. `flying`: the most at once, for those who know that none weighs
    more while it waits for W than while it waits for I.
    """
    if parallel.schedule == TABLE:
        return _highest(schedule_of(parallel).orders[rank])
    step, (p, m) = SPLIT[parallel.schedule], (parallel.pp, parallel.micro_batches)
    if step is None:  # none of these waits for W when most are there
        if flying is not None:
            return [(flying, 0)]
        rank = min(rank, p - 1 - rank) if parallel.schedule == "dualpipe" else rank  # a mirror image
        return _counted(parallel.schedule, p, min(m, 2 * p + 2 + m % 2), parallel.vpp, rank)
    ahead, behind = min(step * (p - 1 - rank), m), step * rank
    turns = (min(behind, max(0, m - 1 - ahead)), min(behind, m - 1))  # in full swing, and as forwards run out
    return sorted({(min(m, turn + ahead + 1) - turn, turn) for turn in turns}, reverse=True)


def full_at_once(schedule: str, p: int, m: int, rank: int, held: int) -> int:
    """Most micro-batches before their I; `held`: all that wait, as `pipeline.held_at_once`."""
    step = SPLIT.get(schedule)
    return held if step is None else min(m, step * (p - 1 - rank) + 1)


@lru_cache(maxsize=4096)
def _counted(name: str, p: int, m: int, v: int, rank: int) -> list[Point]:
    """From some rounds of micro-batches on every further one looks like the last."""
    return _highest(SCHEDULES[name].order(rank, p, m, v))


def _highest(order: Iterable[Action]) -> list[Point]:
    """The points that no other exceeds in both numbers."""
    kept: list[Point] = []
    for full, waiting in sorted(set(_points(order)), reverse=True):
        if not kept or waiting > kept[-1][1]:
            kept.append((full, waiting))
    return kept


def _points(order: Iterable[Action]) -> Iterator[Point]:
    full = waiting = 0
    for kind, *_ in order:
        if kind is Kind.F:
            full += 1
        elif kind is Kind.W:
            waiting -= 1
        else:
            yield full, waiting
            full -= 1
            waiting += kind is Kind.I
