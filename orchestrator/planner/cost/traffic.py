"""What every axis sends in one optimizer step: operations, message sizes and counts, and what may hide them.

Independent of where the ranks are: the same list is costed for every placement. Bytes are of the busiest stage.
Sources: Megatron-LM (arXiv 1909.08053, section 3) and Korthikanti et al. (arXiv 2205.05198, section 4.2) for tensor and
sequence parallel; Rajbhandari et al. (ZeRO, arXiv 1910.02054, section 7) for 2Psi / 2Psi / 3Psi; Liu et al. (arXiv
2310.01889) for ring attention; Lepikhin et al. (GShard, arXiv 2006.16668) for expert all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Literal, NamedTuple

from msgspec import Struct

from orchestrator.plan.document import Axis, Model, Parallel, Train
from orchestrator.plan.schedules import copies_of
from orchestrator.planner.model.layers import (
    dense_and_moe,
    dense_on_rank,
    embedding_params,
    layer_params,
    norm_params,
    samples_of_kinds,
)
from orchestrator.planner.model.stages import rank_stages, splits, stage_range

from .collective import Operation, sent_bytes

#: What a transfer can run beside: nothing, the attention core (ring attention), the last micro-batch's backward
#: (gradient buckets), or all compute (weights gathered ahead).
Window = Literal["none", "attention", "backward", "compute"]

#: A matrix product that each single operation runs beside, by what its columns are: queries, keys and values; the inner
#: features of a feed-forward; the vocabulary. The trainer sums an input's gradient while it computes the weights', and
#: gathers the input again while it computes the input's gradient (`trainer/parallel/column_parallel.py`).
Beside = Literal["", "attention", "mlp", "head"]

WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}


class Traffic(Struct, frozen=True):
    """`count` operations of `size` bytes (of the whole tensor) a step, over groups in which `varying` axes vary."""

    axis: Axis
    varying: tuple[Axis, ...]
    operation: Operation
    size: float
    count: float
    window: Window = "none"
    members: int = 1
    beside: Beside = ""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a step."""
        return self.count * sent_bytes(self.operation, self.size, self.members)


def rank_parameters(model: Model, parallel: Parallel) -> list[tuple[int, int]]:
    """(dense, expert) parameters that one rank of each pipeline stage holds: all its virtual stages.

    Tied embeddings with pp > 1: the last stage holds a copy of the table as its head.
    """
    kinds = []
    for layer in samples_of_kinds(model):
        if layer is None:
            kinds.append((0, 0))
        else:
            experts = layer_params(model, layer).experts // (parallel.tp * parallel.ep)
            kinds.append((dense_on_rank(model, layer, parallel.tp), experts))
    (dense, dense_experts), (moe, moe_experts) = kinds
    stages, start = [], 0
    for count in parallel.stage_layers:
        few, many = dense_and_moe(model, start, start + count)
        start += count
        stages.append([few * dense + many * moe, few * dense_experts + many * moe_experts])
    table, positions = embedding_params(model)
    table = -(-model.vocab // parallel.tp) * model.hidden  # padded to a multiple of tp
    stages[0][0] += table + positions
    stages[-1][0] += norm_params(model) + (0 if model.tied_embeddings and len(stages) == 1 else table)
    return [
        (sum(stages[stage][0] for stage in held), sum(stages[stage][1] for stage in held))
        for held in rank_stages(parallel)
    ]


def step_traffic(model: Model, parallel: Parallel, train: Train) -> list[Traffic]:
    """Every transfer of one step on the busiest pipeline rank."""
    width = WIDTH[train.precision]
    held = rank_parameters(model, parallel)
    busiest = held.index(max(held, key=sum))
    stages = [stage_range(parallel, stage) for stage in rank_stages(parallel)[busiest]]
    copies = copies_of(parallel)  # two copies of the model share the micro-batches
    layers = sum(map(len, stages)) / copies
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    hidden_bytes = tokens * model.hidden * width
    again = repeats(parallel, train)
    m = parallel.micro_batches
    result: list[Traffic] = []

    def add(
        axis: Axis,
        operation: Operation,
        size: float,
        count: float,
        window: Window = "none",
        varying: Sequence[Axis] = (),
        beside: Beside = "",
    ) -> None:
        varying = varying or (axis,)
        n = 1
        for name in varying:
            n *= getattr(parallel, name)
        if n > 1 and size > 0 and count > 0:
            result.append(Traffic(axis, tuple(varying), operation, size, count, window, n, beside))

    for operation, beside, count in tensor_operations(parallel, again):
        add("tp", operation, hidden_bytes, count * layers * m, beside=beside)
    first, last = ends(parallel, rank_stages(parallel)[busiest])
    for operation, beside, count in vocabulary_operations(parallel, first, last):
        add("tp", operation, hidden_bytes, count * m, beside=beside)
    add("tp", "all_gather", tokens * 2 * 4 * parallel.tp, last * m)  # two numbers a token and rank, for the loss

    for operation, size, count, window in context_operations(model, parallel, train, again):
        add("cp", operation, size, count * layers * m, window)

    if model.moe is not None:
        moe_layers = sum(dense_and_moe(model, part.start, part.stop)[1] for part in stages) / copies
        routed = hidden_bytes * model.moe.top_k / (parallel.tp if parallel.sp else 1)
        add("ep", "all_to_all", routed, 2 * moe_layers * m * (2 + again.layer))

    boundary = hidden_bytes / (parallel.tp if parallel.sp else 1)
    add("pp", "p2p", boundary, m * sends_a_micro_batch(parallel))

    dense, experts = held[busiest]
    grad_width = WIDTH[train.grad_dtype]
    for count, varying in ((dense, ("cp", "ep", "dp")), (experts, ("cp", "dp"))):
        _gradients(add, count, varying, parallel, width, grad_width)
    return result


def tensor_operations(parallel: Parallel, again: Repeats) -> list[tuple[Operation, Beside, float]]:
    """(operation on the hidden states, what it runs beside, count) of one layer and micro-batch, forward and backward.

    Into and out of attention and feed-forward: an all-reduce, or with SP the all-gather and reduce-scatter that make
    one up. Where weight gradients wait (`splits`) nothing is left to run beside, and inputs are kept whole.
    """
    beside: tuple[Beside, Beside] = ("", "") if splits(parallel) else ("attention", "mlp")
    if not parallel.sp:
        return [("all_reduce", "", 2 * (1 + again.layer)), *(("all_reduce", part, 1.0) for part in beside)]
    found = [("all_gather", "", 2 * (2 + again.gather)), ("reduce_scatter", "", 2 * (1 + again.layer))]
    found += [("reduce_scatter", part, 1.0) for part in beside]
    if not splits(parallel):
        found += [("all_gather", part, 1.0 - again.gather) for part in beside]
    return found


def context_operations(
    model: Model, parallel: Parallel, train: Train, again: Repeats
) -> list[tuple[Operation, float, float, Window]]:
    """(operation, bytes, count, window) of one layer and micro-batch, forward and backward.

    Zig-zag and contiguous ring: keys and values go round beside attention, in backward with their fp32 gradients, which
    go all the way home. All-gather (Llama 3): before attention and again in backward, a reduce-scatter behind it.
    Ulysses: queries, keys and values for heads, and results for sequence, each way.
    """
    cp, width = parallel.cp, WIDTH[train.precision]
    if cp == 1:
        return []
    tokens = parallel.micro_batch_size * train.seq_len / cp
    heads, kv_heads = model.heads // parallel.tp, max(1, model.kv_heads // parallel.tp)
    key_values = 2 * kv_heads * model.head_dim * tokens
    if parallel.cp_method == "allgather":
        gathers = ("all_gather", key_values * width * cp, 2 + again.core, "none")
        return [gathers, ("reduce_scatter", key_values * 4 * cp, 1.0, "none")]
    if parallel.cp_method == "ulysses":
        exchanged = (heads + 2 * lcm(kv_heads, cp)) * model.head_dim * tokens * width
        result = heads * model.head_dim * tokens * width
        return [("all_to_all", size, 2 + again.core, "none") for size in (exchanged, result)]
    return [
        ("p2p", key_values * width, (cp - 1) * (1 + again.core), "attention"),
        ("p2p", key_values * width, cp - 1, "attention"),
        ("p2p", key_values * 4, cp, "attention"),
    ]


def vocabulary_operations(parallel: Parallel, first: float, last: float) -> list[tuple[Operation, Beside, float]]:
    """As `tensor_operations`, of the token table and the output projection. first, last: micro-batches of theirs that
    pass a rank, as a share of all (`ends`)."""
    beside: Beside = "" if splits(parallel) else "head"
    if not parallel.sp:
        return [("all_reduce", "", first), ("all_reduce", beside, last)]
    found = [("reduce_scatter", "", first), ("all_gather", "", first + last), ("reduce_scatter", beside, last)]
    return found if splits(parallel) else [*found, ("all_gather", beside, last)]


def ends(parallel: Parallel, stages: Sequence[int]) -> tuple[float, float]:
    """Share of the micro-batches that pass the first, and the last, stage on the rank that holds `stages`."""
    copies = copies_of(parallel)
    return stages.count(0) / copies, stages.count(len(parallel.stage_layers) - 1) / copies


class Repeats(NamedTuple):
    """Share of the layers that do a part of forward again in backward."""

    layer: float  # all of it
    gather: float  # the sequence is gathered again (sequence parallelism)
    core: float  # attention: keys and values go round again (context parallelism)


def repeats(parallel: Parallel, train: Train) -> Repeats:
    """Selective recomputation repeats what it does not keep: gathered inputs, attention over other ranks' keys."""
    if train.recompute == "budget":
        modes = train.recompute_layers or ["full"]
        full, selective = (modes.count(mode) / len(modes) for mode in ("full", "selective"))
    else:
        full, selective = float(train.recompute == "full"), float(train.recompute == "selective")
    return Repeats(full, full + selective * parallel.sp, full + selective * (parallel.cp > 1))


def sends_a_micro_batch(parallel: Parallel) -> float:
    """Messages a micro-batch from the rank that sends most: hidden states on, gradients back, never beyond an end."""
    held, last = rank_stages(parallel), parallel.pp * parallel.vpp - 1
    share = (last + 1) / sum(map(len, held))  # of the micro-batches: half where each direction has its own stages
    return share * max(sum((stage < last) + (stage > 0) for stage in stages) for stages in held)


def _gradients(add, parameters: int, varying, parallel: Parallel, width: int, grad_width: int) -> None:
    for operation, size, count, window in gradient_operations(parameters, parallel, width, grad_width):
        add("dp", operation, size, count, window, varying)


def gradient_operations(
    parameters: int, parallel: Parallel, width: int, grad_width: int
) -> list[tuple[Operation, float, float, Window]]:
    """(operation, bytes, count a step, window) that sum `parameters` a rank and gather them, as the trainer does.

    2 Psi a step for ZeRO-0 and -1. ZeRO-2 and -3 reduce-scatter for every micro-batch; ZeRO-3 gathers for every forward
    and again for every backward, but once a step under a pipeline, where micro-batches mix.
    """
    if parameters == 0:
        return []
    gradients, weights = parameters * grad_width, parameters * width
    buckets = max(1.0, gradients / parallel.bucket_bytes)
    if parallel.zero == 0:
        return [("all_reduce", gradients / buckets, buckets, "backward")]
    many = parallel.micro_batches if parallel.zero >= 2 else 1
    scatter = "reduce_scatter", gradients / buckets, buckets * many, "backward" if many == 1 else "compute"
    if parallel.zero < 3 or parallel.pp > 1:
        return [scatter, ("all_gather", weights / buckets, buckets, "none")]
    return [scatter, ("all_gather", weights / buckets, 2 * buckets * many, "compute")]
