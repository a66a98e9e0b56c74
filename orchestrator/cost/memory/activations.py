"""Activation bytes of a pipeline's ranks at their peak, as the trainer's autograd keeps them.

The logits at the loss are included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from orchestrator.cost.model.layers import embedding_norm_params, layer_groups, sample_layers
from orchestrator.cost.model.stages import held_layers, rank_stages, stage_range
from orchestrator.cost.time.pipeline import in_flight
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Parallel
from orchestrator.plan.expert_capacity import mlp_width, taken_choices
from orchestrator.plan.expert_mesh import fullest
from orchestrator.plan.flops import prediction_blocks
from orchestrator.plan.layer import layer_moe
from orchestrator.plan.rounding.wide import wide_patterns
from orchestrator.plan.schedules import TABLE, Schedule, schedule_of, splits_backward

from .deferred_weight_gradients import WHOLE_AT_PEAK, DeferredGradients, Layers, bytes_of_stage
from .kernels import Kernels, trainer_kernels
from .layer_activations import (
    ActivationBytes,
    layer_activation_bytes,
    mean_activation_bytes,
)
from .moments import OneStage
from .offloaded_inputs import back_bytes, keeps_inputs_apart, reserved_bytes
from .unequal_stages import unequal_peak

#: Searched schedules use all the memory they may: this many times the memory of 1F1B's first rank,
#: on every rank (ZB-1p and ZB-2p of arXiv 2401.10241, section 5.3).
LIMITS = {"zb_h1": 1, "zb_h2": 2}
LOSS_CHUNK = 1 << 24  # the number of logits that the loss converts to fp32 at a time


def activations(workload: Workload, kernels: Kernels | None = None) -> list[float]:
    """Returns the peak activation bytes of each pipeline rank, logits included."""
    parallel = workload.parallel
    stages = PipelineActivations(workload, kernels or trainer_kernels(workload.model, parallel))
    reserved = reserved_bytes(workload)
    return [
        stages.peak(rank, rank_indices) + back_bytes(workload, rank_indices) + reserved[rank]
        for rank, rank_indices in enumerate(rank_stages(parallel))
    ]


class PipelineActivations:
    """Activation bytes of a pipeline's stages."""

    def __init__(self, workload: Workload, kernels: Kernels):
        parallel = workload.parallel
        self.workload = workload
        self.kernels = kernels
        self.layer_bytes = bytes_of_layers(workload, kernels)
        self.last = len(parallel.stage_layers) - 1
        self.head = head_bytes(workload, kernels)
        self.stage = stage_bytes(workload, kernels)
        self.ahead = ahead_bytes(workload, self.head)
        self.embedding = embedding_bytes(workload, kernels)
        split = splits_backward(parallel) and not kernels.fills_limit
        self.deferred = DeferredGradients(workload) if split else None
        self.in_flight = in_flight(parallel)
        if kernels.fills_limit and parallel.schedule in LIMITS:
            limit = min(parallel.micro_batches, LIMITS[parallel.schedule] * parallel.pp)
            self.in_flight = [limit] * parallel.pp
        messages = parallel.pp > 1 and kernels.holds_messages
        self.message = workload.boundary_bytes if messages else 0.0

    def peak(self, rank: int, stages: tuple[int, ...]) -> float:
        """Returns the peak bytes of a pipeline rank, without offloaded inputs on their way."""
        parallel = self.workload.parallel
        layers_by_stage = [
            self.layers_in([held_layers(self.workload.model, parallel, stage)]) for stage in stages
        ]
        stored = [
            self.stored_in(stage, layers)
            for stage, layers in zip(stages, layers_by_stage, strict=True)
        ]
        accounts = [
            bytes_of_stage(
                layers,
                stage_stored,
                self.head if stage == self.last else 0.0,
                self.deferred,
            )
            for stage, layers, stage_stored in zip(stages, layers_by_stage, stored, strict=True)
        ]
        # The last stage receives no gradient.
        sent = (1 if stages == (self.last,) else 2) * self.message
        if len(set(accounts)) > 1:
            return unequal_peak(_schedule(parallel), rank, stages, accounts) + sent
        layers = self.layers_in(
            [held_layers(self.workload.model, parallel, stage) for stage in stages]
        )
        mean = sum(stored) / len(stages)
        head = self.head if self.last in stages else None
        if self.deferred is None:
            return self._equal_peak(
                self.in_flight[rank],
                mean,
                layers,
                head=head,
                sent=sent,
            )
        peak = self.deferred.peak(
            rank=rank,
            in_flight_count=self.in_flight[rank],
            stored=mean,
            stages=len(stages),
            layers=layers,
            head=head,
        )
        return peak + sent

    def _equal_peak(
        self,
        in_flight_count: int,
        stored: float,
        layers: Sequence[Layers],
        *,
        head: float | None,
        sent: float,
    ) -> float:
        """Returns the peak of a rank with equal stages and whole backwards."""
        parallel = self.workload.parallel
        recomputing = [further_bytes for *_, further_bytes in layers]
        heads = 0.0
        if head is not None:
            heads = head * logits_in_flight(parallel.schedule, parallel.micro_batches)
        extra = max(0.0, *recomputing, head or 0.0) + max(0.0, heads - self.head)
        # A layer is recomputed after its output was sent: of the two messages, only the gradient is
        # held.
        if self.kernels.keep_sent:
            extra += sent
        else:
            extra = max(extra + self.message, sent)
        return stored * in_flight_count + extra

    def layers_in(self, ranges: Sequence[range]) -> list[Layers]:
        """Returns the layers in these ranges by kind, with their bytes."""
        model = self.workload.model
        ends = any(layers.stop > model.layers for layers in ranges)
        ahead = self.ahead if ends else 0.0
        groups = []
        for kind, mode, count in layer_groups(model, self.workload.train, ranges):
            if count:
                layer = self.layer_bytes(kind, mode, tuple(ranges))
                recomputing = layer.recomputing + ahead * (layer.recomputing > 0)
                groups.append((count, kind, layer.stored, recomputing))
        return groups

    def stored_in(self, stage: int, layers: Sequence[Layers]) -> float:
        """Returns the bytes of one micro-batch in a stage until backward."""
        stage_layers = stage_range(self.workload.parallel, stage)
        received = 0.0
        if stage_layers.start:
            received = received_input_bytes(self.workload, self.kernels, stage_layers)
        outside = self.stage[stage == self.last] + received
        outside += 0.0 if stage else self.embedding
        return sum(count * stored for count, _, stored, _ in layers) + outside


def _schedule(parallel: Parallel) -> Schedule | tuple[str, int, int, int]:
    """Returns the schedule of a pipeline: a table, or the arguments that name one."""
    if parallel.schedule == TABLE:
        return schedule_of(parallel)
    return parallel.schedule, parallel.pp, parallel.micro_batches, parallel.vpp


def bytes_of_layers(workload: Workload, kernels: Kernels) -> Callable[..., ActivationBytes]:
    """Returns a cached function of the bytes of a layer.

    Its arguments are the kind (0: dense, 1: with experts), the recomputation mode and the layers,
    over which the result is a mean: they differ if only some of them have wide linears.
    """
    model = workload.model
    kinds = sample_layers(model)
    patterns = wide_patterns(workload.train)

    @cache
    def of_kind(kind: int, mode: str) -> ActivationBytes:
        layer = kinds[kind]
        assert layer is not None
        return layer_activation_bytes(workload, layer, kernels, mode)

    @cache
    def of(kind: int, mode: str, ranges: tuple[range, ...]) -> ActivationBytes:
        """Returns the bytes of a layer of this kind."""
        if not patterns or kernels.product_width is None:
            return of_kind(kind, mode)
        layers = (layer for layers in ranges for layer in layers)
        equal = [layer for layer in layers if (layer_moe(model, layer) is not None) == kind]
        return mean_activation_bytes(workload, equal, kernels, mode)

    return of


def kept_of_one_stage(workload: Workload, kernels: Kernels) -> OneStage:
    """Returns the activation bytes if the whole model is one stage."""
    model = workload.model
    train = workload.train
    layer_bytes = bytes_of_layers(workload, kernels)
    blocks = model.layers + prediction_blocks(model)
    layers = (range(blocks),)
    groups = [
        (n, layer_bytes(kind, mode, layers))
        for kind, mode, n in layer_groups(model, train, layers)
        if n
    ]
    head = head_bytes(workload, kernels)
    recomputing = max(layer.recomputing for _, layer in groups)
    ahead = ahead_bytes(workload, head) if recomputing else 0.0
    outside = stage_bytes(workload, kernels)[1] + embedding_bytes(workload, kernels)
    (reserved,) = reserved_bytes(workload)
    outside += back_bytes(workload, (0,)) + reserved
    return OneStage(
        sum(n * layer.stored for n, layer in groups) + outside,
        head,
        recomputing + ahead,
        max(layer.stored + layer.recomputing for _, layer in groups) + ahead,
        reserved,
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
    sharing, offloading or copying it saves nothing.
    """
    parallel = workload.parallel
    train = workload.train
    away = keeps_inputs_apart(train)
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


def embedding_bytes(workload: Workload, kernels: Kernels) -> float:
    """Returns the bytes of what the trainer keeps of the embeddings: the mask with which it drops
    elements, and the input of their norm."""
    model = workload.model
    if not kernels.trainer:
        return 0.0
    width = bool(model.dropout) + workload.width * bool(embedding_norm_params(model))
    return width * workload.tokens * model.hidden / workload.sequence_shards


def head_bytes(workload: Workload, kernels: Kernels) -> float:
    """Returns the bytes that the last stage keeps outside its layers.

    These are the inputs of the transform and its activation, if there is one, of the final norm and
    the output projection, and the logits. Further predictions keep the same, and the inputs of
    their two norms and of their projection.
    """
    model = workload.model
    width = workload.width
    tokens = workload.tokens
    rows = workload.sequence_shards
    gathered = 1 if kernels.keep_gathered else rows
    hidden = (
        model.hidden * width * (1 / rows + 1 / gathered)
    )  # inputs of norm and output projection
    if model.head_transform:
        hidden += 2 * model.hidden * width / rows
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
    splits = splits_backward(parallel) and not workload.model.tied_embeddings
    keeps_gradient = splits and parallel.schedule not in WHOLE_AT_PEAK
    return max(0.0, peak - width * logits) if keeps_gradient else peak
