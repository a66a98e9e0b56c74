"""Communication over tensor- and expert-parallel ranks, of one layer and of the model's ends.

All numbers are per micro-batch. Sources: Megatron-LM (arXiv 1909.08053, section 3) and Korthikanti
et al. (arXiv 2205.05198, section 4.2) for tensor and sequence parallelism; Lepikhin et al. (GShard,
arXiv 2006.16668) for the expert all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import UNSET

from orchestrator.cost.model.layers import DTYPE_BYTES, sample_layers
from orchestrator.cost.workload import Workload
from orchestrator.plan.batch import largest_cut
from orchestrator.plan.cluster import Operation
from orchestrator.plan.document import Parallel, Train
from orchestrator.plan.expert_capacity import taken_choices
from orchestrator.plan.expert_mesh import expert_mesh
from orchestrator.plan.layer import Half, layer_operations
from orchestrator.plan.schedules import splits_backward

#: The matrix product that an operation overlaps with: the first and the last one of a half of a
#: layer, or the output projection. The trainer sums an input's gradient while it computes the
#: weights' gradient. It gathers the input again while it computes the input's gradient
#: (`trainer/parallel/column_parallel.py`).
Overlap = Literal["", "attention", "attention end", "mlp", "mlp end", "head"]

#: The content of an all-to-all to experts: rows of tokens, numbers that each copy of a token has,
#: or names of copies, which only the exchange by domain needs.
Carried = Literal["rows", "copies", "names"]


class TensorOperation(NamedTuple):
    """`times` operations on tensors of `size` bytes over `ranks` neighbours.

    In several `pieces`, one travels while the product of another is computed.
    """

    operation: Operation
    overlap: Overlap
    size: float
    times: float
    ranks: int
    pieces: int = 1

    def in_pieces(self, pieces: int, overlap: Overlap) -> TensorOperation:
        """Returns the operation in pieces, if there is a product that can hide them."""
        if pieces == 1 or not overlap:
            return self
        return self._replace(overlap=overlap, pieces=pieces)


class Cut(NamedTuple):
    """The pieces of a region's messages, and the products between which they travel."""

    pieces: int
    first: Overlap
    last: Overlap
    #: How often layers gather their input whole all the same: those that keep whole products.
    whole_gathers: float


WHOLE = Cut(1, "", "", 0.0)


def tensor_operations(
    workload: Workload,
    moe: bool,
    load: float = 1.0,
) -> list[TensorOperation]:
    """Returns the tp operations of one layer and micro-batch, forward and backward.

    `moe` marks a layer with experts. `load` is the load of a rank that shares experts over the
    mean. Attention and feed-forward each begin and end with an all-reduce; with SP, with an
    all-gather and a reduce-scatter. With a split backward there is no weight gradient to overlap
    with, and inputs are kept whole.
    """
    parallel = workload.parallel
    if parallel.tp == 1:
        return []
    tp = parallel.tp
    hidden = workload.hidden_bytes
    recomputed = workload.recomputed
    operations = _half(workload, "attention", moe, recomputed.layer)
    if recomputed.inputs:
        operations.append(TensorOperation("all_gather", "", hidden, recomputed.inputs, tp))
    if moe:
        return [*operations, *_mixture(workload, load)]
    if recomputed.mlp_inputs:
        operations.append(TensorOperation("all_gather", "", hidden, recomputed.mlp_inputs, tp))
    return [*operations, *_half(workload, "mlp", moe, recomputed.end)]


def _half(
    workload: Workload,
    half: Half,
    moe: bool,
    sums: float,
) -> list[TensorOperation]:
    """Returns the operations of a half of a layer that is one tensor-parallel region.

    It begins with the tensors that its column-parallel products read whole and ends with the output
    of its row-parallel product. A tensor that is kept whole is not gathered again in backward, and
    no product overlaps with the sum of its gradient. `sums` counts how often recomputation repeats
    the region's last operation.
    """
    layer = sample_layers(workload.model)[moe]
    assert layer is not None, "the model has layers of this kind"
    products = [
        operation
        for operation in layer_operations(workload.model, layer)
        if operation.half == half and operation.kind == "product"
    ]
    entries = {
        saved.tensor: saved
        for operation in products
        for saved in operation.saves
        if saved.spread in ("regathered", "whole")
    }
    token_bytes = workload.tokens * workload.width
    is_kept = any(saved.spread == "whole" for saved in entries.values())
    is_plain = is_kept or splits_backward(workload.parallel)
    gathers = workload.recomputed.gather
    overlap: Overlap = half
    regathers = 1.0 - gathers
    if is_plain:
        overlap = ""
        regathers = 0.0
    region = _region(
        workload.parallel,
        token_bytes * sum(saved.features for saved in entries.values()),
        token_bytes * products[-1].outputs,
        overlap=overlap,
        gathers=gathers,
        sums=sums,
        regathers=regathers,
        cut=_cut(workload, half, overlap),
    )
    return list(region)


def _cut(workload: Workload, half: Half, first: Overlap) -> Cut:
    """Returns the cut of a half of a layer. `first`: its first product; "": it is not cut."""
    last: Overlap = "attention end" if half == "attention" else "mlp end"
    whole_gathers = 0.0
    if first:
        recomputed = workload.recomputed
        whole_gathers = 2 * (recomputed.gather - recomputed.layer)
    return Cut(message_pieces(workload), first, last, whole_gathers)


def message_pieces(workload: Workload) -> int:
    """Returns the pieces of a micro-batch in which the trainer communicates it; 1: whole."""
    parallel = workload.parallel
    if not isinstance(parallel.tp_pieces, int) or splits_backward(parallel):
        return 1
    if not workload.software.tp_pieces:
        return 1
    length = workload.train.seq_len // parallel.cp // workload.sequence_shards
    return largest_cut(parallel.micro_batch_size, length, parallel.tp_pieces)


def _region(
    parallel: Parallel,
    entry: float,
    end: float,
    *,
    gathers: float,
    sums: float,
    overlap: Overlap = "",
    regathers: float = 0.0,
    cut: Cut = WHOLE,
) -> Iterator[TensorOperation]:
    """Yields the operations of a tensor-parallel region with `entry` bytes in and `end` bytes out.

    `gathers` and `sums` count how often recomputation repeats its first and its last operation.
    `regathers` counts how often backward gathers the input that forward did not keep.
    """
    tp = parallel.tp
    if not parallel.sp:
        total = TensorOperation("all_reduce", "", end, 1 + sums, tp)
        yield total.in_pieces(cut.pieces, cut.last)
        yield TensorOperation("all_reduce", overlap, entry, 1.0, tp)
        return
    gather = TensorOperation("all_gather", "", entry, 1 + gathers - cut.whole_gathers, tp)
    yield gather.in_pieces(cut.pieces, cut.first)
    if cut.whole_gathers:
        yield gather._replace(times=cut.whole_gathers)
    gather_back = TensorOperation("all_gather", "", end, 1.0, tp)
    yield gather_back.in_pieces(cut.pieces, cut.last)
    scatter = TensorOperation("reduce_scatter", "", end, 1 + sums, tp)
    yield scatter.in_pieces(cut.pieces, cut.last)
    yield TensorOperation("reduce_scatter", overlap, entry, 1.0, tp)
    if regathers:
        yield TensorOperation("all_gather", overlap, entry, regathers, tp)


def _mixture(workload: Workload, load: float) -> Iterator[TensorOperation]:
    """Yields the tp operations of a layer's experts, none of which overlaps with a product.

    Tokens of all tp ranks meet before the experts if all experts are on the rank, or if the ranks
    hold the same tokens. Otherwise each rank sends its own tokens away, and the ranks that cut an
    expert share the arrived ones: `top_k` rows per token.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    hidden = workload.hidden_bytes
    moe = model.moe
    assert moe is not None
    etp, ranks, _ = expert_mesh(parallel)
    if not parallel.sp or ranks == 1:
        recomputed = workload.recomputed
        yield from _region(
            parallel,
            hidden,
            hidden,
            gathers=recomputed.layer,
            sums=recomputed.end,
        )
        return
    if etp > 1:
        rows = hidden * taken_choices(moe, train.seq_len) * etp / parallel.tp * load
        for operation in ("all_gather", "reduce_scatter"):
            yield TensorOperation(
                operation,
                "",
                rows,
                2 + workload.recomputed.layer,
                etp,
            )
    if moe.shared_ffn_hidden:
        repeats = workload.recomputed.layer
        yield from _region(
            parallel,
            hidden,
            hidden,
            gathers=repeats,
            sums=repeats,
        )


def routing_operations(workload: Workload) -> list[TensorOperation]:
    """Returns the operations of a layer's choices of experts and their weights.

    The form is that of `tensor_operations`. They count among the bytes; compared with the rows they
    take no time.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    if parallel.tp == 1 or model.moe is None:
        return []
    etp, ranks, _ = expert_mesh(parallel)
    moe = model.moe
    tokens = workload.tokens
    weight = weight_bytes(train)
    if not parallel.sp:
        return [
            TensorOperation(
                "all_reduce",
                "",
                tokens * moe.top_k * weight,
                1.0,
                parallel.tp,
            )
        ]
    dropped = moe.capacity_factor is not UNSET
    choice_exchange = [
        TensorOperation(
            "all_gather",
            "",
            choice_bytes(workload),
            1 + workload.recomputed.layer,
            parallel.tp,
        )
    ]
    if ranks == 1:
        choices = tokens * moe.top_k
        size = choices * (8 + weight + dropped)
    else:
        choices = tokens * taken_choices(moe, train.seq_len) * etp / parallel.tp
        size = choices * weight
    operations = choice_exchange if dropped else []
    if etp > 1:
        operations.append(
            TensorOperation(
                "all_gather",
                "",
                size,
                1 + workload.recomputed.layer,
                etp,
            )
        )
        operations.append(
            TensorOperation(
                "reduce_scatter",
                "",
                choices * weight,
                1.0,
                etp,
            )
        )
    return operations


def choice_bytes(workload: Workload) -> float:
    """Returns the bytes of the choices of a micro-batch's tokens on a cp rank.

    The ranks that share a sequence exchange them if experts drop tokens
    (`trainer/parallel/expert/capacity.py`); otherwise the result is 0.
    """
    model = workload.model
    if model.moe is None or model.moe.capacity_factor is UNSET:
        return 0.0
    return workload.tokens * model.moe.top_k * 4


def weight_bytes(train: Train) -> int:
    """Returns the bytes of the weight of a choice: routers compute in fp32 or wider."""
    return max(4, DTYPE_BYTES[train.precision])


def expert_operations(workload: Workload) -> list[tuple[Operation, float, float]]:
    """Returns (operation, bytes, count) of one MoE layer and micro-batch.

    Dispatch and combine are included, forward and backward.
    """
    model = workload.model
    train = workload.train
    if model.moe is None:
        return []
    copies = workload.sent_tokens * taken_choices(model.moe, train.seq_len)
    routed = copies * model.hidden * workload.width
    return [("all_to_all", routed, 2 * (2 + workload.recomputed.layer))]


def label_operations(workload: Workload) -> list[tuple[Carried, float, float]]:
    """Returns (content, bytes, count) of the all-to-alls that accompany the rows.

    These are the weight of each copy on its way and its gradient on the way back, and by domain the
    four bytes that name the copy. They count among the bytes; compared with the rows they take no
    time.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    if model.moe is None:
        return []
    copies = workload.sent_tokens * taken_choices(model.moe, train.seq_len)
    labels: list[tuple[Carried, float, float]] = [
        ("copies", copies * weight_bytes(train), 2 + workload.recomputed.layer)
    ]
    if parallel.expert_all_to_all == "hierarchical":
        labels.append(("names", copies * 4, 1 + workload.recomputed.layer))
    return labels


def vocabulary_operations(
    workload: Workload,
    first: float,
    last: float,
) -> list[TensorOperation]:
    """Returns the operations of token table and output projection, as `tensor_operations` does.

    `first` and `last` are the results of `end_shares`.
    """
    parallel = workload.parallel
    overlap: Overlap = "" if splits_backward(parallel) else "head"
    hidden = workload.hidden_bytes
    tp = parallel.tp
    if not parallel.sp:
        return [
            TensorOperation(
                "all_reduce",
                "",
                hidden,
                first,
                tp,
            ),
            TensorOperation(
                "all_reduce",
                overlap,
                hidden,
                last,
                tp,
            ),
        ]
    head_gather = TensorOperation(
        "all_gather",
        "",
        hidden,
        last,
        tp,
    )
    operations = [
        TensorOperation(
            "reduce_scatter",
            "",
            hidden,
            first,
            tp,
        ),
        TensorOperation(
            "all_gather",
            "",
            hidden,
            first,
            tp,
        ),
        head_gather.in_pieces(message_pieces(workload), overlap),
        TensorOperation(
            "reduce_scatter",
            overlap,
            hidden,
            last,
            tp,
        ),
    ]
    if not splits_backward(parallel):
        operations.append(
            TensorOperation(
                "all_gather",
                overlap,
                hidden,
                last,
                tp,
            )
        )
    return operations


def prediction_operations(workload: Workload, ahead: float) -> list[TensorOperation]:
    """Returns the operations of `ahead` modules that predict further tokens.

    Those of their layer, table and projection are not included. Recomputation repeats a module with
    the norm behind its layer, and so the layer's last operation.
    """
    model = workload.model
    parallel = workload.parallel
    if model.moe is not None and parallel.sp and expert_mesh(parallel).ep > 1:
        return []  # results of experts return by all-to-all
    operation: Operation = "reduce_scatter" if parallel.sp else "all_reduce"
    size = workload.hidden_bytes
    return [
        TensorOperation(
            operation,
            "",
            size,
            ahead * workload.recomputed.layer,
            parallel.tp,
        )
    ]
