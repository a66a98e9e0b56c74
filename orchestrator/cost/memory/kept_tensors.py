"""The tensors that one layer keeps for backward: those that its operations read there, each once.

With this project's trainer, they are what its storages were measured to hold (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import structs

from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Moe
from orchestrator.plan.expert_capacity import taken_choices
from orchestrator.plan.expert_mesh import fullest, tensor_ranks
from orchestrator.plan.layer import (
    Half,
    Operation,
    SavedTensor,
    Writer,
    layer_moe,
    layer_operations,
)
from orchestrator.plan.rounding.wide import is_wide, wide_patterns

from .kernels import Kernels

#: Besides the operations of a layer: routing writes numbers of tokens and experts; statistics are
#: those of a fused attention kernel; dropout writes masks.
KeptWriter = Writer | Literal["routing", "statistics", "mask"]


#: Bytes of a scale.
_SCALE = 4
#: The product that reads attention's output.
OUTPUT = "attn.wo"
#: The end of the name of a tensor in few bits, where products may keep it wide, too.
NARROW = ", narrow"


class KeptTensor(NamedTuple):
    """A tensor of one layer, on one rank."""

    half: Half
    name: str
    writer: KeptWriter
    size: float  # bytes per token
    #: The rank keeps its shard of the sequence, although a product reads the whole.
    is_regathered: bool = False


def listed_tensors(
    workload: Workload, layer: int, kernels: Kernels, halves: set[Half]
) -> list[KeptTensor]:
    """Returns what the operations of these halves of decoder layer `layer` (0-based) keep."""
    tensors: dict[str, KeptTensor] = {}
    for operation in layer_operations(workload.model, layer):
        if operation.half in halves:
            for tensor in _kept_by(operation, workload, layer, kernels):
                tensors.setdefault(tensor.name, tensor)
    return list(tensors.values())


def _kept_by(
    operation: Operation, workload: Workload, layer: int, kernels: Kernels
) -> Iterator[KeptTensor]:
    """Yields the tensors that an operation keeps."""
    half = operation.half
    if operation.kind in ("product", "core"):
        # Attention keeps its output narrow, too, if the product that reads it is narrow.
        reader = operation.name if operation.kind == "product" else OUTPUT
        kernels = kernels_of_product(workload, layer, kernels, reader)
    if operation.routed:
        yield from _routed(operation, workload, layer, kernels)
        return
    if operation.kind == "router":
        yield from _router_input(operation, workload)
        return
    is_head_norm = operation.kind == "norm" and operation.saves[0].writer == "product"
    if is_head_norm and not kernels.trainer:
        return  # others compute it again
    if operation.kind == "core":
        yield from _core(operation, workload, kernels)
        return
    for saved in operation.saves:
        tensor = kept_tensor(half, saved, workload, kernels)
        if operation.kind == "product":
            yield from product_input(half, saved, workload, kernels)
            if saved.writer == "core" and _joins_documents(workload, kernels):
                yield tensor._replace(name=f"{tensor.name}, joined", writer="copy")
        elif operation.kind == "activation":
            copies = activation_copies(workload, kernels) / len(operation.saves)
            yield tensor._replace(size=tensor.size * copies)
        else:
            yield tensor


def kernels_of_product(workload: Workload, layer: int, kernels: Kernels, name: str) -> Kernels:
    """Returns what the linear `name` keeps: its input is wide if `train.matmul_wide` names it."""
    patterns = wide_patterns(workload.train)
    if not patterns or kernels.product_width is None:
        return kernels
    if not is_wide(patterns, layer, name, workload.model.layers):
        return kernels
    return structs.replace(kernels, product_width=None)


def narrow_name(name: str, workload: Workload) -> str:
    """Returns the name of a tensor in few bits, which differs from that of the wide tensor if a
    layer may keep both."""
    return f"{name}{NARROW}" if wide_patterns(workload.train) else name


def _core(operation: Operation, workload: Workload, kernels: Kernels) -> Iterator[KeptTensor]:
    """Yields what attention keeps: queries, keys, values, its output and statistics.

    Only a fused kernel of this project's trainer reads its own output.
    """
    half = operation.half
    for saved in operation.saves:
        if saved.writer == "core" and kernels.trainer and not kernels.fused_attention:
            continue
        tensor = kept_tensor(half, saved, workload, kernels)
        if saved.writer == "core":
            yield tensor._replace(size=tensor.size * output_copies(workload))
            continue
        yield tensor
        if kernels.copied_heads:
            yield tensor._replace(name=f"{tensor.name}, as projected")
    if not operation.keeps_scores:
        yield from core_tensors(workload, kernels)
    if kernels.product_width:  # attention itself reads the wide output
        size = operation.outputs / workload.parallel.tp * kernels.product_width
        yield KeptTensor(half, "attn.core, narrow", "copy", size)


def _joins_documents(workload: Workload, kernels: Kernels) -> bool:
    """Reports whether attention joins the outputs of packed documents, each of which it keeps.

    It does so on a CPU, unless context parallelism joins blocks anyway.
    """
    runs = workload.isolated and kernels.trainer == "cpu" and workload.parallel.cp == 1
    return runs and kernels.fused_attention


def output_copies(workload: Workload) -> int:
    """Returns how often attention's output is kept: twice around the all-to-all of Ulysses."""
    parallel = workload.parallel
    return 2 if parallel.cp > 1 and parallel.cp_method == "ulysses" else 1


def core_tensors(workload: Workload, kernels: Kernels) -> Iterator[KeptTensor]:
    """Yields what attention keeps of its scores: statistics if its kernel is fused.

    Otherwise these are the softmax output, and the copy with dropout that multiplies the values;
    with dropout also a mask of one byte per score. This project's trainer computes the softmax in
    fp32 at least, and keeps a mask of the keys that a query sees.
    """
    model = workload.model
    heads = model.heads / workload.parallel.tp
    keys = workload.train.seq_len
    if kernels.fused_attention:
        yield KeptTensor("attention", "attn.core, statistics", "statistics", 4 * heads)
        if workload.isolated and kernels.trainer == "cuda" and workload.width >= 4:
            # No kernel knows documents; the one that runs turns their mask into numbers to add.
            yield KeptTensor("attention", "attn.core, mask", "statistics", keys * workload.width)
        return
    masked = bool(model.dropout or kernels.dropout)
    softmax = max(4, workload.width) if kernels.trainer else workload.width
    size = heads * keys * (softmax + workload.width + masked)
    if kernels.trainer and workload.isolated:
        size += keys
    elif kernels.trainer and model.causal:  # one mask for all samples
        size += keys / workload.parallel.micro_batch_size
    yield KeptTensor("attention", "attn.core, scores", "scores", size)


def kept_tensor(half: Half, saved: SavedTensor, workload: Workload, kernels: Kernels) -> KeptTensor:
    """Returns a tensor of the list as one rank keeps it, in full width."""
    shards = workload.sequence_shards
    features = saved.read_on_rank(workload.parallel.tp, shards)
    if saved.per_key:
        features *= workload.train.seq_len
    is_regathered = saved.spread == "regathered" and shards > 1 and not kernels.keep_gathered
    if is_regathered:
        features = features / shards
    is_shard = is_regathered or (saved.spread == "sequence" and shards > 1)
    name = f"{saved.tensor}, shard" if is_shard else saved.tensor
    return KeptTensor(half, name, saved.writer, features * workload.width, is_regathered)


def product_input(
    half: Half, saved: SavedTensor, workload: Workload, kernels: Kernels
) -> Iterator[KeptTensor]:
    """Yields the input of a matrix product, which may be narrower than the tensor."""
    tensor = kept_tensor(half, saved, workload, kernels)
    if saved.writer == "norm" and kernels.compiled and workload.parallel.tp == 1:
        return  # the norm is computed again
    if saved.writer == "copy" and kernels.product_width:
        return  # attention's narrow output is all that is kept of it
    if saved.writer == "copy":  # of attention's output
        tensor = tensor._replace(size=tensor.size * output_copies(workload))
    is_narrow = saved.writer in ("norm", "activation")
    if tensor.is_regathered and kernels.wide_shards:
        is_narrow = False
    if is_narrow and kernels.product_width:
        size = tensor.size / workload.width * kernels.product_width
        tensor = tensor._replace(name=narrow_name(tensor.name, workload), size=size)
    yield tensor


def activation_copies(workload: Workload, kernels: Kernels) -> int:
    """Returns how many tensors of an MLP's width are kept before its last product's input."""
    if workload.model.mlp == "plain":
        return 1 - kernels.compiled
    return (2 if kernels.fused_activation else 3) - kernels.compiled


def _router_input(operation: Operation, workload: Workload) -> Iterator[KeptTensor]:
    """Yields the input of a router, which computes in fp32: a copy if it is jittered or wider."""
    (saved,) = operation.saves
    rows = workload.sequence_shards
    moe = workload.model.moe
    is_jittered = moe is not None and moe.jitter
    is_copy = is_jittered or workload.width < 4
    shared_name = f"{saved.tensor}, shard" if rows > 1 else saved.tensor
    name = "mlp.router, input" if is_copy else shared_name
    width = max(4, workload.width)
    size = saved.features / rows * width
    yield KeptTensor(operation.half, name, saved.writer, size)


def _routed(
    operation: Operation, workload: Workload, layer: int, kernels: Kernels
) -> Iterator[KeptTensor]:
    """Yields what experts keep of the copies of tokens that are routed to a rank.

    Inputs of products are narrow if products are, with a scale per row at least.
    """
    moe = layer_moe(workload.model, layer)
    assert moe is not None, "routed operations belong to a mixture of experts"
    copies = copies_per_token(workload, moe) * fullest(workload.parallel)
    for saved in operation.saves:
        ranks = tensor_ranks(workload.parallel) if saved.spread == "columns" else 1
        features = saved.features / ranks
        size = copies * features * workload.width
        name = saved.tensor
        if operation.kind == "product" and kernels.product_width:
            size = copies * (features * kernels.product_width + _SCALE)
            name = narrow_name(name, workload)
        yield KeptTensor(operation.half, name, saved.writer, size)


def copies_per_token(workload: Workload, moe: Moe) -> float:
    """Returns the copies of a token on a rank if experts are chosen equally often."""
    parallel = workload.parallel
    choices = taken_choices(moe, workload.train.seq_len)
    return choices * tensor_ranks(parallel) / parallel.tp
