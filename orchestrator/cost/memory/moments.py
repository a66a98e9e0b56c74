"""The peak of a step where a rank holds the whole model as one stage: the highest of its moments.

At the loss all activations are there with logits and their gradient, but nothing of what ZeRO holds
of whole layers; when backward enters the last layers, the other way round; at its end all gradients
are there, and few activations. Of a pipeline's ranks all that may come is added up instead, but
with ZeRO-3 (`sharded_pipeline.py`). Measured by `orch twin` (docs/twin.md).
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
    head: float  # of norm, output projection and logits
    again: float  # the most that a layer makes again in backward
    layer: float  # the most that one layer holds in its backward

    @property
    def most(self) -> float:
        """At their own peak: with the logits, or while a layer is recomputed."""
        return self.stored + max(self.head, self.again)


class Peak(NamedTuple):
    """Bytes at the highest moment."""

    buffers: float  # temporaries of that moment
    apart: float  # of states and activations, what is not there at that moment


def peak_of_one_stage(
    workload: Workload,
    stage: OneStage,
    grads: float,
    loss: float,
    backward: float,
) -> Peak:
    """`grads`: bytes of gradients between steps. `loss`: temporaries of the loss. `backward`: of a
    layer's backward, with the buckets of ZeRO-2.

    With one micro-batch ZeRO-3 makes gradients as backward goes; otherwise those of earlier
    micro-batches are there.
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
    if (
        model.tied_embeddings or parallel.zero >= 3
    ):  # the output projection's gradient waits: for the embedding's, or
        first = later = backward + table * weight  # for those of its unit
    if parallel.zero >= 3:
        always = table * (1 if model.tied_embeddings else 2) * weight
        layer = whole_layer(model, parallel)
        first += 2 * layer * weight  # a layer's weights, and those of the next one
        later += layer * (3 * weight + gradient)  # the last one's gradients twice: as made, as sent
    late = (
        grads
        if parallel.zero >= 3 and parallel.micro_batches == 1 and not offload_of(train).optimizer
        else 0.0
    )
    moments = (  # (activations, buffers, gradients that are not there yet)
        (stage.stored + stage.head, loss, late),
        (stage.stored + stage.again, first, late),
        (stage.stored + 2 * stage.again - stage.layer, later, late),  # the last layer's are gone
        (stage.layer, later, 0.0),
    )
    held, buffers, missing = max(moments, key=lambda moment: moment[0] + moment[1] - moment[2])
    return Peak(always + buffers, stage.most - held + missing)


def whole_layer(model: Model, parallel: Parallel) -> float:
    """Parameters of the largest layer on a rank before data-parallel sharding."""
    kinds = [layer_params(model, layer) for layer in sample_layers(model) if layer is not None]
    tp = parallel.tp
    cut = parallel.tp * spread(parallel)
    return max(
        (params.attention + params.ffn) / tp + params.replicated + params.experts / cut
        for params in kinds
    )
