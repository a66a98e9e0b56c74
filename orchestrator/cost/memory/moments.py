"""The peak of a step on a rank that holds the whole model as one stage: its highest moment.

At the loss, all activations are held with logits and their gradient, but none of the buffers of
whole layers that ZeRO holds. When backward enters the last layers, it is the other way round. At
the end of backward, all gradients are held, and few activations. On a pipeline's ranks, all
possible bytes are summed instead, except with ZeRO-3 (`sharded_pipeline.py`). Measured by `orch
twin` (docs/twin.md).
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.cost.model.layers import DTYPE_BYTES, layer_params, sample_layers
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Model, Parallel
from orchestrator.plan.expert_mesh import spread
from orchestrator.plan.offload import offload_of


class OneStage(NamedTuple):
    """Activation bytes of one micro-batch."""

    stored: float  # from the forward to the backward, without the output projection
    head: float  # norm, output projection and logits
    recomputed_layer: float  # the most bytes that a layer recomputes in backward
    layer: float  # the most bytes that one layer holds in its backward
    reserved: float = 0.0  # the part of `stored` that is a buffer for inputs, which stays

    @property
    def peak(self) -> float:
        """Activation bytes at their own peak: with the logits, or while a layer is recomputed."""
        return self.stored + max(self.head, self.recomputed_layer)


class Peak(NamedTuple):
    """Bytes at the highest moment."""

    buffers: float  # temporaries of that moment
    apart: float  # bytes of states and activations that are not held at that moment


def peak_of_one_stage(
    workload: Workload,
    stage: OneStage,
    grads: float,
    loss: float,
    backward: float,
) -> Peak:
    """Returns the highest moment of a step.

    `grads` is the bytes of gradients between steps. `loss` is the temporary bytes of the loss, and
    `backward` those of a layer's backward, with the buckets of ZeRO-2. With one micro-batch, ZeRO-3
    makes gradients as backward proceeds; otherwise those of earlier micro-batches are held.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    weight = workload.width
    gradient = DTYPE_BYTES[train.grad_dtype]
    table = model.vocab * model.hidden / parallel.tp
    always = 0.0
    first = backward
    later = backward
    # The output projection's gradient waits for that of the embedding, or for those of its unit.
    if model.tied_embeddings or parallel.zero >= 3:
        first = later = backward + table * weight
    if parallel.zero >= 3:
        always = table * (1 if model.tied_embeddings else 2) * weight
        layer = whole_layer(model, parallel)
        first += 2 * layer * weight  # weights of a layer and of the next one
        # gradients of the last layer twice: as made, as sent
        later += layer * (3 * weight + gradient)
    late = (
        grads
        if parallel.zero >= 3 and parallel.micro_batches == 1 and not offload_of(train).optimizer
        else 0.0
    )
    moments = (  # (activations, buffers, gradients that are not made yet)
        (stage.stored + stage.head, loss, late),
        (stage.stored + stage.recomputed_layer, first, late),
        # the activations of the last layer are freed
        (stage.stored + 2 * stage.recomputed_layer - stage.layer, later, late),
        (stage.reserved + stage.layer, later, 0.0),
    )
    held, buffers, missing = max(moments, key=lambda moment: moment[0] + moment[1] - moment[2])
    return Peak(always + buffers, stage.peak - held + missing)


def whole_layer(model: Model, parallel: Parallel) -> float:
    """Returns the parameters of the largest layer on a rank before data-parallel sharding."""
    kinds = [layer_params(model, layer) for layer in sample_layers(model) if layer is not None]
    tp = parallel.tp
    cut = parallel.tp * spread(parallel)
    return max(
        (params.attention + params.ffn) / tp + params.replicated + params.experts / cut
        for params in kinds
    )
