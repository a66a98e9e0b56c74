"""Activation bytes, tensor by tensor, as the trainer's autograd keeps them for backward.

The logits at the loss are included. With the paper's `Kernels`, a layer's sum is that of
Korthikanti et al. (arXiv 2205.05198, equations 1 to 4), which tests check. With the trainer's
kernels, it is what its storages were measured to hold (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from msgspec import Struct

from orchestrator.cost.model.layers import layer_groups, sample_layers
from orchestrator.cost.model.stages import held_layers, rank_stages, splits_backward, stage_range
from orchestrator.cost.time.pipeline import in_flight
from orchestrator.cost.workload import Workload
from orchestrator.plan.expert_capacity import mlp_width, taken_choices
from orchestrator.plan.expert_mesh import fullest
from orchestrator.plan.flops import prediction_blocks
from orchestrator.plan.layer import Half, layer_moe, layer_operations
from orchestrator.plan.offload import offload_of
from orchestrator.plan.schedules import TABLE, schedule_of

from . import other_software, routed_experts
from .deferred_weight_gradients import WHOLE_AT_PEAK, DeferredGradients, Layers, bytes_of_stage
from .kept_tensors import KeptTensor, listed_tensors
from .kernels import Kernels, trainer_kernels
from .moments import OneStage
from .offloaded_inputs import back_bytes, input_bytes, inputs_of
from .unequal_stages import unequal_peak

#: Searched schedules use all the memory they may: this many times the memory of 1F1B's first rank,
#: on every rank (ZB-1p and ZB-2p of arXiv 2401.10241, section 5.3).
LIMITS = {"zb_h1": 1, "zb_h2": 2}
LOSS_CHUNK = 1 << 24  # the number of logits that the loss converts to fp32 at a time


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
        tensors += routed_experts.routing(workload, moe, kernels.trainer)
    elif moe is not None:
        tensors += other_software.experts(workload, moe, kernels)
    if model.dropout or kernels.dropout:
        # A byte per element of the outputs of both halves.
        mask = 2 * model.hidden / workload.sequence_shards
        tensors.append(KeptTensor("mlp", "dropout masks", "mask", mask))
    return tensors


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
    """Returns the bytes of a layer with a recomputation mode, without offloaded inputs.

    `back_bytes` counts those that are on the device.
    """
    model = workload.model
    train = workload.train
    with_inputs = _with_inputs(workload, layer, kernels, mode)
    away = inputs_of(model, layer, train, mode)
    return ActivationBytes(
        with_inputs.stored - away * input_bytes(workload), with_inputs.recomputing
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
        kept = sum(tensor.size for tensor in tensors if tensor.writer in ("core", "statistics"))
        stored = boundary + other_software.every_second_product(workload, layer) + kept * tokens
        stored = min(everything, stored)
        return ActivationBytes(stored, everything - stored)
    return _selective(workload, layer, kernels, tensors, everything)


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
            or (tensor.name == "norm2" and moe.shared_ffn_hidden)
        )
        results = routed_experts.results_of_experts(workload, moe, kept_later)
        everything += workload.tokens * results
    is_shared = kernels.shared_inputs and not parallel.sp
    stored = boundary / parallel.tp if is_shared else boundary
    return ActivationBytes(stored, everything - stored)


def _selective(
    workload: Workload,
    layer: int,
    kernels: Kernels,
    tensors: Sequence[KeptTensor],
    everything: float,
) -> ActivationBytes:
    """Returns the bytes of a layer with the trainer's selective recomputation.

    A recomputed half keeps its input, the outputs of all its matrix products but the last, and
    those of fused attention. Halves with experts are not recomputed.
    """
    parallel = workload.parallel
    has_experts = bool(kernels.trainer) and layer_moe(workload.model, layer) is not None
    halves: set[Half] = {"attention"} if has_experts else {"attention", "mlp"}
    kept_writers = {"residual", "mask"}
    if parallel.cp == 1 and kernels.fused_attention:
        kept_writers |= {"core", "statistics"}
    kept = sum(
        tensor.size
        for tensor in tensors
        if tensor.half not in halves or tensor.writer in kept_writers
    )
    outputs = product_outputs(workload, layer, halves)
    stored = workload.tokens * (kept + outputs * workload.width)
    recomputing = everything - stored
    if workload.shares_inputs:  # a gathered input counts among the buffers
        stored -= len(halves) * workload.boundary_bytes * (1 - 1 / parallel.tp)
    return ActivationBytes(stored, recomputing)


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
        elif not (without_latents and operation.keeps[0].spread == "whole"):
            features += operation.outputs_on_rank(tp)
    return features


def activations(workload: Workload, kernels: Kernels | None = None) -> list[float]:
    """Returns the peak activation bytes of each pipeline rank, logits included."""
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    kernels = kernels or trainer_kernels(model, parallel)
    layer_bytes = bytes_of_layers(workload, kernels)
    last = len(parallel.stage_layers) - 1
    head = head_bytes(workload, kernels)
    stage = stage_bytes(workload, kernels)
    peaks = []
    split = splits_backward(parallel) and not kernels.fills_limit
    deferred = DeferredGradients(workload) if split else None
    held = in_flight(parallel)
    messages = parallel.pp > 1 and kernels.holds_messages
    boundary = workload.boundary_bytes if messages else 0.0
    ahead = ahead_bytes(workload, head)
    if kernels.fills_limit and parallel.schedule in LIMITS:
        held = [min(parallel.micro_batches, LIMITS[parallel.schedule] * parallel.pp)] * parallel.pp

    schedule = (
        schedule_of(parallel)
        if parallel.schedule == TABLE
        else (parallel.schedule, parallel.pp, parallel.micro_batches, parallel.vpp)
    )

    def layers_in(ranges: Sequence[range]) -> list[Layers]:
        """Returns the layers in these ranges by kind, with their bytes."""
        groups = [
            (n, kind, layer_bytes(kind, mode))
            for kind, mode, n in layer_groups(model, train, ranges)
            if n
        ]
        further_bytes = (
            ahead if any(layer_range.stop > model.layers for layer_range in ranges) else 0.0
        )
        return [
            (
                n,
                kind,
                kept_bytes.stored,
                kept_bytes.recomputing + further_bytes * (kept_bytes.recomputing > 0),
            )
            for n, kind, kept_bytes in groups
        ]

    def stored_in(index: int, layers: Sequence[Layers]) -> float:
        """Returns the bytes of one micro-batch in a stage until backward."""
        layer_range = stage_range(parallel, index)
        received = (
            received_input_bytes(workload, kernels, layer_range) if layer_range.start else 0.0
        )
        return sum(n * per_layer for n, _, per_layer, _ in layers) + stage[index == last] + received

    for rank, (stages, in_flight_count) in enumerate(zip(rank_stages(parallel), held, strict=True)):
        layers_by_stage = [layers_in([held_layers(model, parallel, index)]) for index in stages]
        stored = [
            stored_in(index, layers) for index, layers in zip(stages, layers_by_stage, strict=True)
        ]
        stage_accounts = [
            bytes_of_stage(layers, kept_bytes, head if index == last else 0.0, deferred)
            for index, layers, kept_bytes in zip(stages, layers_by_stage, stored, strict=True)
        ]
        sent = (1 if stages == (last,) else 2) * boundary  # the last stage receives no gradient
        if len(set(stage_accounts)) > 1:
            peaks.append(unequal_peak(schedule, rank, stages, stage_accounts) + sent)
            continue
        layers = layers_in([held_layers(model, parallel, index) for index in stages])
        ends = last in stages
        if deferred:
            count = len(stages)
            mean = sum(stored) / len(stages)
            peaks.append(
                deferred.peak(rank, in_flight_count, mean, count, layers, head if ends else None)
                + sent
            )
            continue
        recomputing = [further_bytes for *_, further_bytes in layers]
        heads = head * logits_in_flight(parallel.schedule, parallel.micro_batches) if ends else 0.0
        extra = max(0.0, *recomputing, head * ends) + max(0.0, heads - head)
        # A layer is recomputed after its output was sent: of the two messages, only the gradient is
        # held.
        extra = extra + sent if kernels.keep_sent else max(extra + boundary, sent)
        peaks.append(sum(stored) / len(stages) * in_flight_count + extra)
    back = (back_bytes(workload, stages) for stages in rank_stages(parallel))
    return [
        kept_bytes + further_bytes for kept_bytes, further_bytes in zip(peaks, back, strict=True)
    ]


def bytes_of_layers(workload: Workload, kernels: Kernels) -> Callable[..., ActivationBytes]:
    """Returns a cached function of the bytes of a layer.

    Its arguments are the kind (0: dense, 1: with experts) and the recomputation mode.
    """
    kinds = sample_layers(workload.model)

    @cache
    def of(kind: int, mode: str) -> ActivationBytes:
        """Returns the bytes of a layer of this kind."""
        layer = kinds[kind]
        assert layer is not None
        return layer_activation_bytes(workload, layer, kernels, mode)

    return of


def kept_of_one_stage(workload: Workload, kernels: Kernels) -> OneStage:
    """Returns the activation bytes if the whole model is one stage."""
    model = workload.model
    train = workload.train
    layer_bytes = bytes_of_layers(workload, kernels)
    blocks = model.layers + prediction_blocks(model)
    groups = [
        (n, layer_bytes(kind, mode))
        for kind, mode, n in layer_groups(model, train, [range(blocks)])
        if n
    ]
    head = head_bytes(workload, kernels)
    recomputing = max(layer.recomputing for _, layer in groups)
    ahead = ahead_bytes(workload, head) if recomputing else 0.0
    back = back_bytes(workload, (0,))
    return OneStage(
        sum(n * layer.stored for n, layer in groups) + stage_bytes(workload, kernels)[1] + back,
        head,
        recomputing + ahead,
        max(layer.stored + layer.recomputing for _, layer in groups) + ahead,
    )


def logits_in_flight(schedule: str, micro_batches: int) -> int:
    """Returns the number of micro-batches whose logits the last stage holds.

    These are all of them if all forwards precede all backwards.
    """
    return micro_batches if schedule == "afab" else 1


def backward_bytes(workload: Workload, kernels: Kernels) -> float:
    """Returns the temporary bytes of a layer's backward.

    These are gradients inside its MLP, beyond the bytes that backward frees. If one kernel runs all
    experts, the fp32 weights of the choices widen the gradient of their factor and a product with
    it.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    if not kernels.inside_backward:
        return 0.0
    moe = model.moe
    tokens = workload.tokens
    ffn = mlp_width(model, moe, train.seq_len, fullest(parallel))
    if sample_layers(model)[0] is not None:
        ffn = max(ffn, model.ffn_hidden)
    gradient_features = (2 if model.mlp == "gated" else 1) * ffn
    if moe is not None and kernels.trainer == "cuda" and train.precision == "bf16":
        gradient_features = max(
            gradient_features,
            5 * taken_choices(moe, train.seq_len) * moe.ffn_hidden * fullest(parallel),
        )
    return gradient_features * tokens / parallel.tp * workload.width


def received_input_bytes(workload: Workload, kernels: Kernels, layers: range) -> float:
    """Returns the bytes of a stage's received input, beyond what its first layer keeps.

    A stage that begins inside the model holds this input until its gradient is sent back, so
    sharing or offloading it saves nothing.
    """
    parallel = workload.parallel
    train = workload.train
    away = bool(offload_of(train).activations)
    if not layers or not (away or workload.shares_inputs):
        return 0.0
    mode = train.recompute_layers[layers[0]] if train.recompute == "budget" else train.recompute
    keeps_input = mode == "full" or (mode == "selective" and kernels.selective == "orch")
    share = 0.0 if away else 1 / parallel.tp
    return workload.boundary_bytes * (1 - share) if keeps_input else 0.0


def stage_bytes(workload: Workload, kernels: Kernels) -> tuple[float, float]:
    """Returns the bytes of one micro-batch outside its layers, in (an inner stage, the last stage).

    These are rotary tables and the sent output.
    """
    model = workload.model
    tokens = workload.tokens
    tables = 4 * model.head_dim * tokens if model.position == "rope" else 0.0
    return tables + workload.boundary_bytes * kernels.keep_sent, tables


def head_bytes(workload: Workload, kernels: Kernels) -> float:
    """Returns the bytes that the last stage keeps outside its layers.

    These are the inputs of the final norm and the output projection, and the logits. Further
    predictions keep the same, and the inputs of their two norms and of their projection.
    """
    model = workload.model
    width = workload.width
    tokens = workload.tokens
    rows = workload.sequence_shards
    gathered = 1 if kernels.keep_gathered else rows
    hidden = (
        model.hidden * width * (1 / rows + 1 / gathered)
    )  # inputs of norm and output projection
    per_loss = hidden + width * workload.vocabulary_rows
    ahead = prediction_blocks(model)
    return tokens * (per_loss + ahead * (per_loss + 3 * model.hidden * width / rows))


def ahead_bytes(workload: Workload, head: float) -> float:
    """Returns further bytes while the last block that predicts further tokens is recomputed.

    These are states outside the block, its token and both together, and the part of `head`
    (`head_bytes`) that the preceding blocks keep.
    """
    model = workload.model
    if not (ahead := prediction_blocks(model)):
        return 0.0
    return (5 + ahead) * workload.boundary_bytes + head * (ahead - 1) / (ahead + 1)


def loss_bytes(workload: Workload, kernels: Kernels) -> float:
    """Returns the temporary bytes of the loss.

    These are fp32 logits of a chunk and, in backward, the gradient of the logits.
    """
    parallel = workload.parallel
    logits = workload.tokens * workload.vocabulary_rows
    if kernels.loss_width is not None:
        return logits * (kernels.loss_width - workload.width)
    width = workload.width
    chunk = 4 * min(LOSS_CHUNK, logits)
    peak = width * logits + 2 * chunk if width < 4 else max(chunk, width * logits)
    # A split backward keeps the gradient, which `DeferredGradients` counts.
    keeps_gradient = splits_backward(parallel) and parallel.schedule not in WHOLE_AT_PEAK
    return max(0.0, peak - width * logits) if keeps_gradient else peak
