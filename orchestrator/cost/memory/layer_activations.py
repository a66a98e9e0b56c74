"""Activation bytes of one layer with each recomputation mode.

With the paper's `Kernels`, a layer's sum is that of Korthikanti et al. (arXiv 2205.05198, equations
1 to 4), which tests check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import Struct

from orchestrator.cost.workload import Workload
from orchestrator.plan.layer import Half, layer_moe, layer_operations
from orchestrator.plan.rounding.wide import block_linears, is_wide, wide_patterns

from . import other_software, routed_experts
from .kept_tensors import NARROW, KeptTensor, kernels_of_product, listed_tensors, narrow_name
from .kernels import Kernels
from .offloaded_inputs import input_bytes, inputs_of


def layer_tensors(workload: Workload, layer: int, kernels: Kernels) -> list[KeptTensor]:
    """Returns the tensors that one layer keeps for backward without recomputation."""
    model = workload.model
    moe = layer_moe(model, layer)
    listed: set[Half] = {"attention", "mlp"}
    if model.mla is not None and not kernels.trainer:
        listed.remove("attention")
    if moe is not None and not kernels.trainer:
        listed.remove("mlp")
    tensors = listed_tensors(workload, layer, kernels, listed)
    if model.mla is not None and not kernels.trainer:
        tensors += other_software.latent_attention(workload, model.mla, kernels)
    if moe is not None and kernels.trainer:
        of_experts = kernels_of_experts(workload, layer, kernels)
        tensors += routed_experts.routing(workload, moe, of_experts)
    elif moe is not None:
        tensors += other_software.experts(workload, moe, kernels)
    if model.dropout or kernels.dropout:
        # A byte per element of the outputs of both halves.
        mask = 2 * model.hidden / workload.sequence_shards
        tensors.append(KeptTensor("mlp", "dropout masks", "mask", mask))
    return tensors


def kernels_of_experts(workload: Workload, layer: int, kernels: Kernels) -> Kernels:
    """Returns what the experts of a layer keep together: as without products in few bits, if all of
    their products stay wide."""
    routed = [
        kernels_of_product(workload, layer, kernels, operation.name)
        for operation in layer_operations(workload.model, layer)
        if operation.routed and operation.kind == "product"
    ]
    return next((of_product for of_product in routed if of_product.product_width), routed[0])


class ActivationBytes(Struct, frozen=True):
    """Activation bytes of one layer and micro-batch."""

    stored: float  # from its forward to its backward
    recomputing: float  # further bytes while the layer is recomputed


def layer_activation_bytes(
    workload: Workload,
    layer: int,
    kernels: Kernels,
    mode: str,
) -> ActivationBytes:
    """Returns the bytes of a layer with a recomputation mode, without inputs that are kept apart.

    `back_bytes` and `reserved_bytes` count those that are on the device.
    """
    model = workload.model
    train = workload.train
    with_inputs = _with_inputs(workload, layer, kernels, mode)
    away = inputs_of(model, layer, train, mode)
    return ActivationBytes(
        with_inputs.stored - away * input_bytes(workload), with_inputs.recomputing
    )


def mean_activation_bytes(
    workload: Workload,
    layers: Iterable[int],
    kernels: Kernels,
    mode: str,
) -> ActivationBytes:
    """Returns the bytes of a layer, on average over `layers` of one kind, which differ in the
    linears that stay wide, and the most that one of them recomputes."""
    model = workload.model
    patterns = wide_patterns(workload.train)
    counts = Counter[tuple[str, ...]]()
    samples: dict[tuple[str, ...], int] = {}
    for layer in layers:
        names = block_linears(model, layer)
        wide = tuple(name for name in names if is_wide(patterns, layer, name, model.layers))
        counts[wide] += 1
        samples[wide] = layer
    sizes = {
        wide: layer_activation_bytes(workload, layer, kernels, mode)
        for wide, layer in samples.items()
    }
    stored = sum(counts[wide] * size.stored for wide, size in sizes.items())
    return ActivationBytes(
        stored / counts.total(), max(size.recomputing for size in sizes.values())
    )


def _with_inputs(
    workload: Workload,
    layer: int,
    kernels: Kernels,
    mode: str,
) -> ActivationBytes:
    """Returns the bytes of a layer with a recomputation mode, wherever its input is."""
    model = workload.model
    tensors = layer_tensors(workload, layer, kernels)
    per_token = sum(tensor.size for tensor in tensors)
    tokens = workload.tokens
    moe = layer_moe(model, layer)
    if mode == "none":
        return ActivationBytes(per_token * tokens, 0.0)
    if mode == "selective" and kernels.selective == "core":
        scores = sum(tensor.size for tensor in tensors if tensor.writer == "scores")
        repeated = 0.0
        if model.mla is not None or moe is not None:
            repeated = other_software.repeated_modules(tensors, moe is not None) * tokens
        return ActivationBytes((per_token - scores) * tokens - repeated, repeated)
    # A layer that is being recomputed holds the gathered sequence.
    gathered = sum(tensor.size for tensor in tensors if tensor.is_regathered)
    everything = tokens * (per_token + gathered * (workload.sequence_shards - 1))
    boundary = workload.boundary_bytes
    if mode == "full":
        return _full(workload, layer, kernels, tensors, everything)
    if kernels.selective == "alternate":
        return ActivationBytes((everything + boundary) / 2, everything - boundary)
    if kernels.selective == "ops":
        core = sum(tensor.size for tensor in tensors if tensor.writer in ("core", "statistics"))
        stored = boundary + other_software.every_second_product(workload, layer) + core * tokens
        stored = min(everything, stored)
        return ActivationBytes(stored, everything - stored)
    return _selective(workload, layer, kernels, tensors)


def _full(
    workload: Workload,
    layer: int,
    kernels: Kernels,
    tensors: Sequence[KeptTensor],
    everything: float,
) -> ActivationBytes:
    """Returns the bytes of a layer that keeps its input alone."""
    parallel = workload.parallel
    boundary = workload.boundary_bytes
    if workload.shares_inputs:  # a gathered input counts among the buffers
        return ActivationBytes(boundary / parallel.tp, everything - boundary)
    moe = layer_moe(workload.model, layer)
    if moe is not None and kernels.trainer:
        kept_later = sum(
            tensor.size
            for tensor in tensors
            if tensor.name.startswith("mlp.shared")
            or (tensor.name.removesuffix(NARROW) == "norm2" and moe.shared_ffn_hidden)
        )
        of_experts = kernels_of_experts(workload, layer, kernels)
        results = routed_experts.results_of_experts(workload, moe, kept_later, of_experts)
        everything += workload.tokens * results
    elif kernels.trainer and kernels.product_width:
        everything += workload.tokens * _wide_inputs(workload, tensors, kernels.product_width)
    is_shared = kernels.shared_inputs and not parallel.sp
    stored = boundary / parallel.tp if is_shared else boundary
    return ActivationBytes(stored, everything - stored)


def _wide_inputs(workload: Workload, tensors: Sequence[KeptTensor], narrow: float) -> float:
    """Returns the bytes per token of a recomputed MLP's inputs of products, beyond what it keeps.

    Products in 8 bits keep them narrow, but the MLP is computed from wide ones.
    """
    wide = workload.width / narrow
    sizes = {tensor.name: tensor.size for tensor in tensors}
    # A product that stays wide keeps what the MLP is computed from.
    narrow_norm = narrow_name("norm2", workload)
    is_kept_wide = narrow_norm != "norm2" and "norm2" in sizes
    norm = 0.0 if is_kept_wide else sizes.get(narrow_norm, 0.0) * wide
    last = sizes.get(narrow_name("mlp.activation", workload), 0.0)
    return norm + last * (wide - 1)


def _selective(
    workload: Workload,
    layer: int,
    kernels: Kernels,
    tensors: Sequence[KeptTensor],
) -> ActivationBytes:
    """Returns the bytes of a layer with the trainer's selective recomputation.

    A recomputed half keeps its input, the outputs of all its matrix products but the last, and
    those of fused attention. Halves with experts are not recomputed. The attention half is
    recomputed when nothing is left of the other one.
    """
    parallel = workload.parallel
    has_experts = bool(kernels.trainer) and layer_moe(workload.model, layer) is not None
    halves: set[Half] = {"attention"} if has_experts else {"attention", "mlp"}
    kept_writers = {"residual", "output", "mask"}
    if parallel.cp == 1 and kernels.fused_attention:
        kept_writers |= {"core", "statistics"}
    stored: dict[Half, float] = {"attention": 0.0, "mlp": 0.0}
    recomputed: dict[Half, float] = {"attention": 0.0, "mlp": 0.0}
    for tensor in tensors:
        if tensor.half not in halves or tensor.writer in kept_writers:
            stored[tensor.half] += workload.tokens * tensor.size
        else:
            recomputed[tensor.half] += workload.tokens * tensor.size
        if tensor.is_regathered:
            gathered = tensor.size * (workload.sequence_shards - 1)
            recomputed[tensor.half] += workload.tokens * gathered
    for half in halves:
        outputs = product_outputs(workload, layer, {half}) * workload.width * workload.tokens
        stored[half] += outputs
        recomputed[half] -= outputs
        if workload.shares_inputs:  # a gathered input counts among the buffers
            stored[half] -= workload.boundary_bytes * (1 - 1 / parallel.tp)
    recomputing = max(recomputed["mlp"], recomputed["attention"] - stored["mlp"])
    return ActivationBytes(sum(stored.values()), recomputing)


def product_outputs(workload: Workload, layer: int, halves: set[Half]) -> float:
    """Returns the features per token on a rank that the matrix products of these halves write.

    The last product of each half is left out, and what is made of latents if it is recomputed.
    """
    tp = workload.parallel.tp
    without_latents = workload.train.recompute_latents is True
    features = 0.0
    for operation in layer_operations(workload.model, layer):
        if operation.kind != "product" or operation.half not in halves or operation.cut == "row":
            continue
        if operation.cut == "whole":
            features += operation.outputs / workload.sequence_shards
        elif not (without_latents and operation.saves[0].spread == "whole"):
            features += operation.outputs_on_rank(tp)
    return features
