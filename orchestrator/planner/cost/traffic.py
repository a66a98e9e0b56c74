"""Communication of one optimizer step by axis: operations, message sizes, counts, and what compute may hide them.

It does not depend on where the ranks are: the same list is costed for every placement.
Sources: Megatron-LM (arXiv 1909.08053, section 3) and Korthikanti et al. (arXiv 2205.05198, section 4.2) for tensor and
sequence parallel; Rajbhandari et al. (ZeRO, arXiv 1910.02054, section 7) for 2Psi / 2Psi / 3Psi; Liu et al. (arXiv
2310.01889) for ring attention; Lepikhin et al. (GShard, arXiv 2006.16668) for expert all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import Literal, NamedTuple

from msgspec import Struct

from orchestrator.plan import expert_mesh
from orchestrator.plan.cluster import Operation
from orchestrator.plan.document import Axis, Model, Parallel, Train
from orchestrator.plan.flops import prediction_blocks
from orchestrator.plan.ranks import embeds_at_both_ends
from orchestrator.plan.schedules import copies_of
from orchestrator.planner.model.layers import (
    DTYPE_BYTES,
    dense_and_moe,
    params_outside_layers,
    prediction_params,
)
from orchestrator.planner.model.stages import held_layers, rank_parameters, rank_stages, splits_backward

from .collective import PATTERN, sent_bytes
from .fabric import Pattern
from .software import Software

#: Compute that can hide a series of operations: none, the attention core (ring attention), the backward of the last
#: micro-batch (gradient buckets), or all of it (weights gathered ahead).
Window = Literal["none", "attention", "backward", "compute"]

#: Matrix product that a single operation overlaps with: query-key-value, gate and up projections, output projection.
#: The trainer sums an input's gradient while it computes the weights' gradient, and gathers the input again while it
#: computes the input's gradient (`trainer/parallel/column_parallel.py`).
Overlap = Literal["", "attention", "mlp", "head"]

TensorOperation = tuple[Operation, Overlap, float]  # with the count
SizedOperation = tuple[Operation, float, float, Window]  # with bytes and count


#: Axes whose ranks hold the same dense, and the same expert, parameters.
DENSE_REPLICAS: tuple[Axis, ...] = ("cp", "ep", "dp")
EXPERT_REPLICAS = expert_mesh.REPLICAS

#: Part of the replicas that an operation joins: all of them; neighbours that share one copy; holders of one shard.
Part = Literal["", "shard", "replica"]
#: (axes that vary in a group, pattern or part): what a path depends on, on a given cluster in a given nesting order.
PathKey = tuple[tuple[Axis, ...], Pattern | Literal["shard", "replica"]]


class Traffic(Struct, frozen=True):
    """`count` operations a step on tensors of `size` bytes, over groups in which the `varying` axes vary."""

    axis: Axis
    varying: tuple[Axis, ...]
    operation: Operation
    size: float
    count: float
    members: int
    part: Part = ""

    @property
    def key(self) -> PathKey:
        return self.varying, self.part or PATTERN[self.operation]

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends in a step."""
        return self.count * sent_bytes(self.operation, self.size, self.members)


def step_traffic(model: Model, parallel: Parallel, train: Train, software: Software) -> list[list[Traffic]]:
    """All communication of one step, of every pipeline rank."""
    held = rank_parameters(model, parallel)
    seen: dict[tuple[object, ...], list[Traffic]] = {}
    result = []
    for stages, parameters in zip(rank_stages(parallel), held, strict=True):
        parts = [held_layers(model, parallel, stage) for stage in stages]
        moe = sum(dense_and_moe(model, part.start, part.stop)[1] for part in parts)
        key = sum(map(len, parts)), moe, end_shares(parallel, stages), parameters, sends_of(parallel, stages)
        if key not in seen:
            seen[key] = _rank_traffic(model, parallel, train, software, *key)
        result.append(seen[key])
    return result


def _rank_traffic(
    model: Model,
    parallel: Parallel,
    train: Train,
    software: Software,
    held: int,
    moe: int,
    ends: tuple[float, float],
    parameters: tuple[int, int],
    sends: float,
) -> list[Traffic]:
    """Of a rank with `held` layers, `moe` of them MoE layers; ends: `end_shares`; parameters: (dense, expert)."""
    copies = copies_of(parallel)  # a bidirectional schedule has two, which share the micro-batches
    layers, m = held / copies, parallel.micro_batches
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    hidden = hidden_bytes(model, parallel, train)
    recomputed = recomputed_share(parallel, train, software)
    result: list[Traffic] = []

    def add(axis: Axis, operation: Operation, size: float, count: float, varying: Sequence[Axis] = ()) -> None:
        varying = varying or (axis,)
        n = expert_mesh.expert_mesh(parallel).ep if axis == "ep" else prod(getattr(parallel, name) for name in varying)
        if n > 1 and size > 0 and count > 0:
            result.append(Traffic(axis, tuple(varying), operation, size, count, n))

    for operation, _, count in tensor_operations(parallel, recomputed):
        add("tp", operation, hidden, count * layers * m)
    first, last = ends
    ahead = prediction_blocks(model) * last  # each looks tokens up and has a loss
    for operation, _, count in vocabulary_operations(parallel, first + ahead, last + ahead):
        add("tp", operation, hidden, count * m)
    losses = last + ahead
    add("tp", "all_gather", tokens * 2 * 4 * parallel.tp, losses * m)  # the loss: two fp32 numbers per token and rank

    if parallel.sp:  # gradients of projections that every rank holds whole, and computes from tokens of its own
        whole = prediction_blocks(model) * bool(last) * prediction_params(model)
        add("tp", "all_reduce", _shard_bytes(whole, parallel, train, software), 1.0)

    for operation, size, count, _ in context_parallel_operations(model, parallel, train, recomputed):
        add("cp", operation, size, count * layers * m)

    for operation, size, count in expert_operations(model, parallel, train, recomputed):
        add("ep", operation, size, count * moe / copies * m, expert_mesh.axes(parallel))

    add("pp", "p2p", boundary_bytes(model, parallel, train), m * sends)
    if bool(first) != bool(last) and sums_table(model, parallel):
        size = table_gradient_bytes(model, parallel, train, software)
        result.append(Traffic("pp", ("pp",), "all_reduce", size, 1.0, 2))

    result.extend(gradient_traffic(parameters, parallel, train, software, params_outside_layers(model, parallel.tp)))
    return result


def hidden_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """Bytes of one micro-batch's hidden states on a rank, not cut by sequence parallelism."""
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp
    return tokens * model.hidden * DTYPE_BYTES[train.precision]


def boundary_bytes(model: Model, parallel: Parallel, train: Train) -> float:
    """Bytes of one micro-batch's hidden states between two layers, or two stages, on one rank."""
    return hidden_bytes(model, parallel, train) / (parallel.tp if parallel.sp else 1)


def grad_bytes(train: Train, software: Software) -> int:
    """Bytes of one gradient on the wire."""
    return software.grad_bytes or DTYPE_BYTES[train.grad_dtype]


def expert_operations(
    model: Model, parallel: Parallel, train: Train, recomputed: RecomputedShare
) -> list[tuple[Operation, float, float]]:
    """(operation, bytes, count) of one MoE layer and micro-batch: dispatch and combine, forward and backward."""
    if model.moe is None:
        return []
    tokens = parallel.micro_batch_size * train.seq_len / parallel.cp / (parallel.tp if parallel.sp else 1)
    routed = tokens * model.hidden * DTYPE_BYTES[train.precision] * model.moe.top_k
    return [("all_to_all", routed, 2 * (2 + recomputed.layer))]


def tensor_operations(parallel: Parallel, recomputed: RecomputedShare) -> list[TensorOperation]:
    """(operation on the hidden states, overlap, count) of one layer and micro-batch, forward and backward.

    Attention and feed-forward each begin and end with an all-reduce; with SP, with an all-gather and a reduce-scatter.
    With a split backward there is no weight gradient to overlap with, and inputs are kept whole.
    """
    overlap: tuple[Overlap, Overlap] = ("", "") if splits_backward(parallel) else ("attention", "mlp")
    if not parallel.sp:
        again: list[TensorOperation] = [("all_gather", "", recomputed.inputs)] if recomputed.inputs else []
        summed: TensorOperation = ("all_reduce", "", 2 + recomputed.layer + recomputed.end)
        return [summed, *_each("all_reduce", overlap, 1.0), *again]
    plain: list[TensorOperation] = [("all_gather", "", 2 * (2 + recomputed.gather))]
    plain += [("reduce_scatter", "", 2 + recomputed.layer + recomputed.end), *_each("reduce_scatter", overlap, 1.0)]
    return plain if splits_backward(parallel) else [*plain, *_each("all_gather", overlap, 1.0 - recomputed.gather)]


def _each(operation: Operation, overlaps: Sequence[Overlap], count: float) -> list[TensorOperation]:
    return [(operation, overlap, count) for overlap in overlaps]


def context_parallel_operations(
    model: Model, parallel: Parallel, train: Train, recomputed: RecomputedShare
) -> list[SizedOperation]:
    """(operation, bytes, count, window) of one layer and micro-batch, forward and backward.

    Zig-zag and contiguous ring: keys and values go around the ring during attention; in backward also their fp32
    gradients, which return to their owner. All-gather (Llama 3): before attention and again in backward, followed by a
    reduce-scatter of gradients. Ulysses: an all-to-all of queries, keys and values and one of the results, each way.
    """
    cp, width = parallel.cp, DTYPE_BYTES[train.precision]
    if cp == 1:
        return []
    tokens = parallel.micro_batch_size * train.seq_len / cp
    heads, kv_heads = model.heads // parallel.tp, max(1, model.kv_heads // parallel.tp)
    key_values = 2 * kv_heads * model.head_dim * tokens
    if parallel.cp_method == "allgather":
        return [
            ("all_gather", key_values * width * cp, 2 + recomputed.core, "none"),
            ("reduce_scatter", key_values * 4 * cp, 1.0, "none"),
        ]
    if parallel.cp_method == "ulysses":
        exchanged = (heads + 2 * lcm(kv_heads, cp)) * model.head_dim * tokens * width
        result = heads * model.head_dim * tokens * width
        return [("all_to_all", size, 2 + recomputed.core, "none") for size in (exchanged, result)]
    return [
        ("p2p", key_values * width, (cp - 1) * (1 + recomputed.core), "attention"),
        ("p2p", key_values * width, cp - 1, "attention"),
        ("p2p", key_values * 4, cp, "attention"),
    ]


def vocabulary_operations(parallel: Parallel, first: float, last: float) -> list[TensorOperation]:
    """As `tensor_operations`, for token table and output projection. first, last: see `end_shares`."""
    overlap: Overlap = "" if splits_backward(parallel) else "head"
    if not parallel.sp:
        return [("all_reduce", "", first), ("all_reduce", overlap, last)]
    found: list[TensorOperation] = [("reduce_scatter", "", first), ("all_gather", "", first + last)]
    found.append(("reduce_scatter", overlap, last))
    return found if splits_backward(parallel) else [*found, ("all_gather", overlap, last)]


def end_shares(parallel: Parallel, stages: Sequence[int]) -> tuple[float, float]:
    """Shares of the micro-batches whose first, and last, stage is on the rank that holds `stages`."""
    copies = copies_of(parallel)
    return stages.count(0) / copies, stages.count(len(parallel.stage_layers) - 1) / copies


class RecomputedShare(NamedTuple):
    """Share of the layers that recompute a part of forward in backward."""

    layer: float  # the whole layer
    gather: float  # the all-gather of the sequence (sequence parallelism)
    core: float  # attention, with its communication of keys and values (context parallelism)
    end: float  # the layer's last operation too: this trainer stops when it has what backward needs
    inputs: float = 0.0  # inputs of a recomputed part that its tensor-parallel ranks share, and gather again


def recomputed_share(parallel: Parallel, train: Train, software: Software) -> RecomputedShare:
    """This trainer's selective recomputation keeps neither gathered inputs nor attention over other ranks' keys."""
    if train.recompute == "budget":
        modes = train.recompute_layers or ["full"]
        full, selective = (modes.count(mode) / len(modes) for mode in ("full", "selective"))
    else:
        full, selective = float(train.recompute == "full"), float(train.recompute == "selective")
    orch = software.selective == "orch"
    selective *= orch
    end = 0.0 if orch else full
    inputs = 0.0
    if shares_inputs(parallel, train):
        whole = held_inputs(parallel) / max(1, sum(parallel.stage_layers))
        inputs = full * (1.0 - whole) + selective * (2.0 - whole)
    return RecomputedShare(full, full + selective * parallel.sp, full + selective * (parallel.cp > 1), end, inputs)


def shares_inputs(parallel: Parallel, train: Train) -> bool:
    """Whether tensor-parallel ranks each keep a share of what recomputation starts from (ZeRO-R's Pa, arXiv 1910.02054,
    section 6.1). Sequence parallelism shares it already."""
    return train.partition_activations is True and parallel.tp > 1 and not parallel.sp


def held_inputs(parallel: Parallel) -> int:
    """Layers whose input a pipeline stage has received, and holds whole until its gradient is sent back."""
    return sum(count > 0 for count in parallel.stage_layers[1:])


def sums_table(model: Model, parallel: Parallel) -> bool:
    """Whether both ends of the model hold a copy of the token table, on two ranks that sum its gradients."""
    if not embeds_at_both_ends(model) or parallel.pp == 1:
        return False
    last = len(parallel.stage_layers) - 1
    return any((0 in stages) != (last in stages) for stages in rank_stages(parallel))


def table_gradient_bytes(model: Model, parallel: Parallel, train: Train, software: Software) -> float:
    """Bytes of a rank's gradient of the token table, or of its shard of it."""
    return _shard_bytes(-(-model.vocab // parallel.tp) * model.hidden, parallel, train, software)


def _shard_bytes(parameters: int, parallel: Parallel, train: Train, software: Software) -> float:
    """Bytes of a rank's gradients of so many parameters, or of its shard of them."""
    replicas = parallel.dp * parallel.cp * parallel.ep  # with one copy of the model
    shards = min(replicas, parallel.zero_group or replicas) if parallel.zero else 1
    return parameters * grad_bytes(train, software) / shards


def sends_per_micro_batch(parallel: Parallel) -> float:
    """Messages per micro-batch of the rank that sends most: hidden states forward, gradients backward."""
    return max(sends_of(parallel, stages) for stages in rank_stages(parallel))


def sends_of(parallel: Parallel, stages: Sequence[int]) -> float:
    """Messages per micro-batch of the rank that holds `stages`; half of them in a bidirectional schedule."""
    last, copies = parallel.pp * parallel.vpp - 1, copies_of(parallel)
    own = stages if copies == 1 else ()  # a neighbour on the same rank needs no message
    sent = sum((stage < last and stage + 1 not in own) + (stage > 0 and stage - 1 not in own) for stage in stages)
    return sent / copies


def gradient_traffic(
    held: tuple[int, int], parallel: Parallel, train: Train, software: Software, outside: int = 0
) -> Iterator[Traffic]:
    """Of gradients and weights of a rank that holds `held` (dense, expert) parameters, `outside` of them in no layer.
    In a bidirectional pipeline both ends hold the same: groups are as `axis_order.mirrored`."""
    width, gradient, by_round = DTYPE_BYTES[train.precision], grad_bytes(train, software), software.reduces_by_round
    copies = copies_of(parallel)
    for parameters, replicas in zip(held, (DENSE_REPLICAS, expert_mesh.replicas(parallel)), strict=True):
        varying = replicas if copies == 1 else (*replicas, "pp")
        members = copies * prod(getattr(parallel, axis) for axis in replicas)
        if members == 1 or not parameters:
            continue
        once = outside if software.keeps_tables and replicas is DENSE_REPLICAS else 0
        for part, share, operations in _gradient_parts(parameters, members, parallel, width, gradient, by_round, once):
            for operation, size, count, _ in operations:
                yield Traffic("dp", varying, operation, size, count, share, part)


def _gradient_parts(
    parameters: int, members: int, parallel: Parallel, width: int, grad_width: int, by_round: bool, once: int
) -> list[tuple[Part, int, list[SizedOperation]]]:
    """(part of the `members` replicas, ranks of it, operations) of gradients and weights of a rank.

    Hybrid sharding (`zero_group`): neighbours share one copy and exchange as ZeRO does; once a step the ranks that hold
    the same shard sum its gradient (HSDP, arXiv 2304.11277; MiCS, arXiv 2205.00119).
    """
    group = parallel.zero_group
    own = _gradient_operations(parameters, parallel, width, grad_width, by_round, once)
    if not 1 < group < members or not parallel.zero:
        return [("", members, own)]
    gradients = parameters * grad_width / group
    buckets = max(1.0, gradients / parallel.bucket_bytes)
    across: SizedOperation = ("all_reduce", gradients / buckets, buckets, "backward")
    return [("shard", group, own), ("replica", members // group, [across])]


def reductions(parallel: Parallel, by_round: bool) -> int:
    """How often a step a parameter's gradients are summed over the replicas. by_round: `Software.reduces_by_round`."""
    in_a_row = parallel.pp if by_round and parallel.schedule == "interleaved" else 1
    return -(-parallel.micro_batches // in_a_row) if parallel.zero >= 2 else 1


def _gradient_operations(
    parameters: int, parallel: Parallel, width: int, grad_width: int, by_round: bool, once: int
) -> list[SizedOperation]:
    """(operation, bytes, count per step, window) of gradients and weights of `parameters` parameters on a rank.

    ZeRO-0 and -1 send 2 Psi a step. ZeRO-2 and -3 reduce-scatter for every micro-batch; ZeRO-3 gathers weights, but for
    `once` of them, for every forward and every backward, in a pipeline, whose micro-batches interleave, once a step.
    `by_round`: reduced after the pp micro-batches that an interleaved schedule runs in a row on a virtual stage.
    """
    if parameters == 0:
        return []
    gradients, weights = parameters * grad_width, parameters * width
    buckets = max(1.0, gradients / parallel.bucket_bytes)
    if parallel.zero == 0:
        return [("all_reduce", gradients / buckets, buckets, "backward")]
    many = reductions(parallel, by_round)
    window: Window = "backward" if many == 1 else "compute"
    scatter: SizedOperation = ("reduce_scatter", gradients / buckets, buckets * many, window)
    if parallel.zero < 3 or parallel.pp > 1:
        return [scatter, ("all_gather", weights / buckets, buckets, "none")]
    twice = 2 - once / parameters
    return [scatter, ("all_gather", weights / buckets, twice * buckets * many, "compute")]
