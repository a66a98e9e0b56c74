"""The communication of one optimizer step by axis.

Each entry has an operation, a message size, a count, and the compute that may hide it. The list
does not depend on where the ranks are, so every placement costs the same one. Sources: Rajbhandari
et al. (ZeRO, arXiv 1910.02054, section 7) for 2Psi / 2Psi / 3Psi; Liu et al. (arXiv 2310.01889) for
ring attention. Tensor and expert parallelism: `layer_traffic`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import lcm, prod
from typing import Literal, NamedTuple

from msgspec import Struct

from orchestrator.cost.dual import value_of
from orchestrator.cost.model.layers import (
    dense_and_moe,
    layer_params,
    params_outside_layers,
    prediction_params,
    sample_layers,
    whole_head_params,
)
from orchestrator.cost.model.stages import held_layers, rank_parameters, rank_stages
from orchestrator.cost.workload import Workload
from orchestrator.plan import expert_mesh
from orchestrator.plan.cluster import Operation
from orchestrator.plan.document import Axis, Model, Parallel
from orchestrator.plan.flops import prediction_blocks
from orchestrator.plan.ranks import embeds_at_both_ends
from orchestrator.plan.schedules import copies_of, splits_backward

from .collective import PATTERN, sent_bytes
from .fabric import Pattern
from .layer_traffic import (
    Carried,
    TensorOperation,
    choice_bytes,
    expert_operations,
    label_operations,
    prediction_operations,
    routing_operations,
    tensor_operations,
    vocabulary_operations,
)

#: Compute that can hide a series of operations: none, the attention core (ring attention), the
#: backward of the last micro-batch (gradient buckets), or all of it (weights gathered ahead).
Window = Literal["none", "attention", "backward", "compute"]

SizedOperation = tuple[Operation, float, float, Window]  # (operation, bytes, count, window)

#: The axes whose ranks hold the same dense, and the same expert, parameters.
DENSE_REPLICAS: tuple[Axis, ...] = ("cp", "ep", "dp")

#: The part of the replicas that an operation joins: all of them, neighbours that share one copy, or
#: holders of the same shard.
ReplicaPart = Literal["", "shard", "replica"]
#: (axes that vary in a group, pattern or part): the key of a path on a given cluster in a given
#: nesting order.
PathKey = tuple[tuple[Axis, ...], Pattern | Literal["shard", "replica"]]


class Traffic(Struct, frozen=True):
    """`count` operations per step on tensors of `size` bytes.

    The `varying` axes vary in the groups that run them.
    """

    axis: Axis
    varying: tuple[Axis, ...]
    operation: Operation
    size: float
    count: float
    members: int
    replica_part: ReplicaPart = ""
    carried: Carried = "rows"  # the content of an all-to-all to experts

    @property
    def key(self) -> PathKey:
        """The key of the path that this traffic takes."""
        return self.varying, self.replica_part or PATTERN[self.operation]

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends per step."""
        return self.count * value_of(sent_bytes(self.operation, self.size, self.members))


class RankContents(NamedTuple):
    """The contents of a pipeline rank, on which its communication depends."""

    layers: int
    moe: int  # the MoE layers among them
    ends: tuple[float, float]  # the result of `end_shares`
    parameters: tuple[int, int]  # (dense, expert)
    sends: float  # the result of `sends_of`


def step_traffic(workload: Workload) -> list[list[Traffic]]:
    """Returns all communication of one step, by pipeline rank."""
    model = workload.model
    parallel = workload.parallel
    held = rank_parameters(model, parallel)
    seen: dict[RankContents, list[Traffic]] = {}
    traffic = []
    for stages, parameters in zip(rank_stages(parallel), held, strict=True):
        layer_ranges = [held_layers(model, parallel, stage) for stage in stages]
        contents = RankContents(
            layers=sum(map(len, layer_ranges)),
            moe=sum(dense_and_moe(model, layers.start, layers.stop)[1] for layers in layer_ranges),
            ends=end_shares(parallel, stages),
            parameters=parameters,
            sends=sends_of(parallel, stages),
        )
        if contents not in seen:
            seen[contents] = _rank_traffic(workload, contents)
        traffic.append(seen[contents])
    return traffic


def _rank_traffic(workload: Workload, rank: RankContents) -> list[Traffic]:
    """Returns the communication of a pipeline rank."""
    activations = chain(
        _tensor_traffic(workload, rank),
        _context_traffic(workload, rank),
        _expert_traffic(workload, rank),
        _stage_traffic(workload, rank),
    )
    traffic = [
        message
        for message in activations
        if message.members > 1 and message.size > 0 and message.count > 0
    ]
    outside = params_outside_layers(workload.model, workload.parallel.tp)
    traffic.extend(gradient_traffic(workload, rank.parameters, outside))
    return traffic


def _tensor_traffic(workload: Workload, rank: RankContents) -> Iterator[Traffic]:
    """Yields the tensor-parallel communication of a rank."""
    model = workload.model
    parallel = workload.parallel
    tp = parallel.tp
    if tp == 1:
        return
    # A bidirectional schedule has two copies of the model, which share the micro-batches.
    copies = copies_of(parallel)
    m = parallel.micro_batches
    dense = rank.layers - rank.moe
    first, last = rank.ends
    if dense:
        operations = tensor_operations(workload, moe=False)
        yield from _neighbour_traffic(operations, dense / copies * m)
    if rank.moe:
        operations = [*tensor_operations(workload, moe=True), *routing_operations(workload)]
        yield from _neighbour_traffic(operations, rank.moe / copies * m)
    ahead = prediction_blocks(model) * last  # each prediction block looks tokens up and has a loss
    yield from _neighbour_traffic(vocabulary_operations(workload, first + ahead, last + ahead), m)
    yield from _neighbour_traffic(prediction_operations(workload, ahead), m)
    yield from _neighbour_traffic(_partial_gradients(workload, dense, rank.moe, bool(last)), 1.0)
    # The loss exchanges two fp32 numbers per token.
    loss_bytes = workload.tokens * 2 * 4 * tp
    loss = TensorOperation("all_gather", "", loss_bytes, last + ahead, tp)
    yield from _neighbour_traffic([loss], m)
    # Every rank holds these projections whole and computes their gradients from its own tokens.
    if parallel.sp:
        replicated = prediction_blocks(model) * bool(last) * prediction_params(model)
        size = _shard_bytes(workload, replicated)
        yield from _neighbour_traffic([TensorOperation("all_reduce", "", size, 1.0, tp)], 1.0)


def _neighbour_traffic(operations: Iterable[TensorOperation], times: float) -> Iterator[Traffic]:
    """Yields `times` these operations; `etp` neighbours count as far apart as those of tp."""
    for tensor_operation in operations:
        yield Traffic(
            axis="tp",
            varying=("tp",),
            operation=tensor_operation.operation,
            size=tensor_operation.size,
            count=tensor_operation.times * times,
            members=tensor_operation.ranks,
        )


def _context_traffic(workload: Workload, rank: RankContents) -> Iterator[Traffic]:
    """Yields the context-parallel communication of a rank."""
    parallel = workload.parallel
    cp = parallel.cp
    if cp == 1:
        return
    copies = copies_of(parallel)
    m = parallel.micro_batches
    layers = rank.layers / copies
    for operation, size, count, _ in context_parallel_operations(workload):
        yield Traffic(
            "cp",
            ("cp",),
            operation,
            size,
            count * layers * m,
            members=cp,
        )
    # Ranks of cp that share sequences agree on the tokens that experts take.
    if rank.moe:
        size = choice_bytes(workload) * cp
        count = (1 + workload.recomputed.layer) * rank.moe / copies * m
        yield Traffic(
            "cp",
            ("cp",),
            "all_gather",
            size,
            count,
            members=cp,
        )


def _expert_traffic(workload: Workload, rank: RankContents) -> Iterator[Traffic]:
    """Yields the all-to-alls of a rank's MoE layers, with their labels."""
    parallel = workload.parallel
    ranks = expert_mesh.expert_mesh(parallel).ep
    if ranks == 1 or not rank.moe:
        return
    copies = copies_of(parallel)
    m = parallel.micro_batches
    varying = expert_mesh.axes(parallel)
    for operation, size, count in expert_operations(workload):
        times = count * rank.moe / copies * m
        yield Traffic(
            "ep",
            varying,
            operation,
            size,
            times,
            members=ranks,
        )
    for carried, size, count in label_operations(workload):
        times = count * rank.moe / copies * m
        yield Traffic(
            "ep",
            varying,
            "all_to_all",
            size,
            times,
            members=ranks,
            carried=carried,
        )


def _stage_traffic(workload: Workload, rank: RankContents) -> Iterator[Traffic]:
    """Yields the communication of a rank with other stages."""
    parallel = workload.parallel
    count = parallel.micro_batches * rank.sends
    yield Traffic("pp", ("pp",), "p2p", workload.boundary_bytes, count, members=parallel.pp)
    first, last = rank.ends
    if bool(first) != bool(last) and sums_table(workload.model, parallel):
        size = table_gradient_bytes(workload)
        yield Traffic("pp", ("pp",), "all_reduce", size, 1.0, members=2)


def _partial_gradients(
    workload: Workload, dense: int, moe: int, last: bool
) -> list[TensorOperation]:
    """Returns the sums over tp ranks, once per step, of gradients of which each rank has a part.

    With SP these are gradients of everything that is whole on each rank. Without latent attention,
    they also include key and value heads that several ranks hold. `dense` and `moe` are numbers of
    layers.
    """
    model = workload.model
    parallel = workload.parallel
    width = workload.gradient_width
    tp = parallel.tp
    numbers = 0
    shards = shard_ranks(parallel) * copies_of(parallel)
    if tp == 1:
        return []
    sums = []
    if parallel.sp:
        for layer, count in zip(sample_layers(model), (dense, moe), strict=True):
            numbers += count * layer_params(model, layer).replicated if layer is not None else 0
        numbers += whole_head_params(model) * last
        sums.append(TensorOperation("all_reduce", "", numbers * width / shards, 1.0, tp))
    if model.mla is None and tp > model.kv_heads:
        head = (dense + moe) * 2 * model.head_dim * (model.hidden + model.bias)
        sums.append(
            TensorOperation("all_reduce", "", head * width / shards, 1.0, tp // model.kv_heads)
        )
    return sums


def shard_ranks(parallel: Parallel) -> int:
    """Returns the number of ranks with a shard of a gradient in one copy of the model."""
    replicas = parallel.dp * parallel.cp * parallel.ep
    return min(replicas, parallel.zero_group or replicas) if parallel.zero else 1


def context_parallel_operations(workload: Workload) -> list[SizedOperation]:
    """Returns (operation, bytes, count, window) of one layer and micro-batch, forward and backward.

    Zig-zag and contiguous ring: keys and values go around the ring during attention. In backward,
    their fp32 gradients do too and return to their owner. All-gather (Llama 3): before attention
    and again in backward, followed by a reduce-scatter of gradients. Ulysses: an all-to-all of
    queries, keys and values and one of the results, each way.
    """
    model = workload.model
    parallel = workload.parallel
    cp = parallel.cp
    width = workload.width
    if cp == 1:
        return []
    tokens = workload.tokens
    heads = model.heads // parallel.tp
    kv_heads = max(1, model.kv_heads // parallel.tp)
    dim = model.head_dim
    # Keys of every head travel, with values padded to their length, as the attention core takes
    # them.
    if model.mla is not None:
        kv_heads = heads
        dim = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
    key_values = 2 * kv_heads * dim * tokens
    if parallel.cp_method == "allgather":
        return [
            ("all_gather", key_values * width * cp, 2 + workload.recomputed.core, "none"),
            ("reduce_scatter", key_values * 4 * cp, 1.0, "none"),
        ]
    if parallel.cp_method == "ulysses":
        exchanged = (heads + 2 * lcm(kv_heads, cp)) * dim * tokens * width
        result = heads * dim * tokens * width
        return [
            ("all_to_all", size, 2 + workload.recomputed.core, "none")
            for size in (exchanged, result)
        ]
    return [
        ("p2p", key_values * width, (cp - 1) * (1 + workload.recomputed.core), "attention"),
        ("p2p", key_values * width, cp - 1, "attention"),
        ("p2p", key_values * 4, cp, "attention"),
    ]


def end_shares(parallel: Parallel, stages: Sequence[int]) -> tuple[float, float]:
    """Returns the shares of micro-batches whose (first, last) stage is on the rank of `stages`."""
    copies = copies_of(parallel)
    return stages.count(0) / copies, stages.count(len(parallel.stage_layers) - 1) / copies


def sums_table(model: Model, parallel: Parallel) -> bool:
    """Reports whether two ranks hold copies of the token table and sum its gradients.

    The copies are at both ends of the model.
    """
    if not embeds_at_both_ends(model) or parallel.pp == 1:
        return False
    last = len(parallel.stage_layers) - 1
    return any((0 in stages) != (last in stages) for stages in rank_stages(parallel))


def table_gradient_bytes(workload: Workload) -> float:
    """Returns the bytes of a rank's gradient of the token table, or of its shard."""
    model = workload.model
    return _shard_bytes(workload, workload.vocabulary_rows * model.hidden)


def _shard_bytes(workload: Workload, parameters: int) -> float:
    """Returns the bytes of a rank's gradients of this many parameters, or of its shard."""
    # A bidirectional pipeline sums no such gradients.
    return parameters * workload.gradient_width / shard_ranks(workload.parallel)


def sends_per_micro_batch(parallel: Parallel) -> float:
    """Returns the messages per micro-batch of the rank that sends most.

    Hidden states go forward, gradients backward.
    """
    return max(sends_of(parallel, stages) for stages in rank_stages(parallel))


def sends_of(parallel: Parallel, stages: Sequence[int]) -> float:
    """Returns the messages per micro-batch of the rank that holds `stages`.

    A bidirectional schedule halves them.
    """
    last = parallel.pp * parallel.vpp - 1
    copies = copies_of(parallel)
    # A neighbour on the same rank needs no message.
    neighbours_here = frozenset(stages if copies == 1 else ())
    sent = sum(
        (stage < last and stage + 1 not in neighbours_here)
        + (stage > 0 and stage - 1 not in neighbours_here)
        for stage in stages
    )
    return sent / copies


def gradient_traffic(
    workload: Workload, held: tuple[int, int], outside: int = 0
) -> Iterator[Traffic]:
    """Yields the communication of a rank's gradients and weights.

    The rank holds `held` (dense, expert) parameters, of which `outside` belong to no layer. In a
    bidirectional pipeline both ends hold the same layers; their groups are those of
    `path_cache.mirrored`.
    """
    parallel = workload.parallel
    copies = copies_of(parallel)
    for parameters, replicas in zip(
        held, (DENSE_REPLICAS, expert_mesh.replicas(parallel)), strict=True
    ):
        varying = replicas if copies == 1 else (*replicas, "pp")
        members = copies * prod(getattr(parallel, axis) for axis in replicas)
        if members == 1 or not parameters:
            continue
        once = outside if workload.software.keeps_tables and replicas is DENSE_REPLICAS else 0
        group = parallel.zero_group // (1 if "ep" in replicas else expert_mesh.spread(parallel))
        groups = _gradient_parts(workload, parameters, once, members, group)
        for group_part, ranks, operations in groups:
            for operation, size, count, _ in operations:
                yield Traffic(
                    "dp", varying, operation, size, count, members=ranks, replica_part=group_part
                )


def _gradient_parts(
    workload: Workload, parameters: int, once: int, members: int, group: int
) -> list[tuple[ReplicaPart, int, list[SizedOperation]]]:
    """Returns (part of the `members` replicas, ranks in it, operations) of gradients and weights.

    Hybrid sharding: `group` neighbours share one copy and exchange as ZeRO does. Once per step, the
    ranks that hold the same shard sum its gradient (HSDP, arXiv 2304.11277; MiCS, arXiv
    2205.00119). With a single neighbour, only this sum remains.
    """
    parallel = workload.parallel
    operations = _gradient_operations(workload, parameters, once)
    if not 0 < group < members or not parallel.zero:
        return [("", members, operations)]
    gradients = parameters * workload.gradient_width / group
    buckets = max(1.0, gradients / parallel.bucket_bytes)
    across: SizedOperation = ("all_reduce", gradients / buckets, buckets, "backward")
    if group == 1:
        return [("", members, [across])]
    return [("shard", group, operations), ("replica", members // group, [across])]


def reductions(parallel: Parallel, by_round: bool) -> int:
    """Returns how often per step a parameter's gradients are summed over the replicas.

    `by_round` is `Software.reduces_by_round`.
    """
    in_a_row = parallel.pp if by_round and parallel.schedule == "interleaved" else 1
    return -(-parallel.micro_batches // in_a_row) if parallel.zero >= 2 else 1


def _gradient_operations(workload: Workload, parameters: int, once: int) -> list[SizedOperation]:
    """Returns (operation, bytes, count per step, window) of gradients and weights of `parameters`.

    ZeRO-0 and -1 send 2 Psi per step. ZeRO-2 and -3 reduce-scatter for every micro-batch. ZeRO-3
    gathers all weights, except for `once` of them, for every forward and every backward; in a
    pipeline, whose micro-batches interleave, and if backward is split, it gathers once per step. If
    the software reduces by round, gradients are reduced after the pp micro-batches that an
    interleaved schedule runs in a row on a virtual stage.
    """
    parallel = workload.parallel
    if parameters == 0:
        return []
    gradients = parameters * workload.gradient_width
    weights = parameters * workload.width
    buckets = max(1.0, gradients / parallel.bucket_bytes)
    if parallel.zero == 0:
        return [("all_reduce", gradients / buckets, buckets, "backward")]
    rounds = reductions(parallel, workload.software.reduces_by_round)
    window: Window = "backward" if rounds == 1 else "compute"
    # Narrow gradients travel by an all-to-all, and are summed on arrival.
    operation: Operation = "all_to_all" if workload.train.grad_wire else "reduce_scatter"
    sent = parameters * workload.wire_width / buckets
    scatter: SizedOperation = (operation, sent, buckets * rounds, window)
    if parallel.zero < 3 or parallel.pp > 1 or splits_backward(parallel):
        return [scatter, ("all_gather", weights / buckets, buckets, "none")]
    twice = 2 - once / parameters
    return [scatter, ("all_gather", weights / buckets, twice * buckets * rounds, "compute")]
