"""Computes model and hardware FLOPs per trained token, for the planner's prediction and the
trainer's MFU and HFU.

Conventions (planning.md C1; PaLM, arXiv 2204.02311, appendix B; Korthikanti et al., arXiv
2205.05198, section 6):

* A matrix product of a token with an [in, out] weight costs `2 * in * out` forward and twice that
  backward, so `6 * N` per token. N is the number of weights that a token is multiplied with
  (embedding look-up: none; the head: always `vocab * hidden`, tied or not; a mixture of experts:
  the chosen experts, the shared ones and the router).
* The attention core (scores and their product with the values) costs `4 * span * heads * head_dim`
  forward, and three times that in total. `span` is the mean number of keys per query: `seq_len / 2`
  under a causal mask, else `seq_len`.
* *Model* FLOPs count the necessary mathematics, whatever is run. *Hardware* FLOPs add recomputed
  work: the whole forward of a block for "full"; nothing for "selective", which keeps the results of
  all matrix products and of the attention kernel and repeats only the operations between them (in
  Korthikanti et al. the core was not fused yet and was repeated). Neither counts the scores that a
  fused attention kernel recomputes in its own backward.

MFU = tokens/s * model FLOPs per token / (GPUs * peak FLOP/s); HFU the same with hardware FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .layer import Half, LayerShape, layer_operations, layer_shape, operations_of

if TYPE_CHECKING:
    from .document import Model


def attention_weights(model: Model) -> int:
    """The number of weights of one layer's attention projections without biases (MHA, GQA or
    MLA)."""
    return _passed_weights(layer_shape(model, model.layers - 1), "attention")


def up_weights(model: Model) -> int:
    """The number of attention weights that make queries, keys and values from latents. Queries come
    from the input if they have no latent."""
    return sum(
        operation.passed_weights
        for operation in layer_operations(model, model.layers - 1)
        if operation.name in ("attn.wq", "attn.wkv")
    )


def mlp_weights(model: Model, layer: int) -> int:
    """The number of weights that multiply one token in layer `layer`'s MLP. In a mixture of experts
    only the active ones count."""
    return _passed_weights(layer_shape(model, layer), "mlp")


@lru_cache(maxsize=256)
def _passed_weights(shape: LayerShape, half: Half) -> int:
    operations = operations_of(shape)
    return sum(operation.passed_weights for operation in operations if operation.half == half)


def block_weights(model: Model) -> int:
    """The number of weights that multiply one token in all decoder layers."""
    mlps = sum(mlp_weights(model, layer) for layer in range(model.layers))
    return model.layers * attention_weights(model) + mlps


def head_weights(model: Model) -> int:
    """The number of weights that multiply one token behind the last layer."""
    transform = model.hidden**2 if model.head_transform else 0
    return model.vocab * model.hidden + transform


def attention_core_flops(model: Model, seq_len: int) -> float:
    """Forward FLOPs per token of all layers' attention cores, in sequences of `seq_len`."""
    # Scores multiply the features of keys, and weights those of values.
    features = sum(
        operation.inputs + operation.outputs
        for operation in layer_operations(model, model.layers - 1)
        if operation.kind == "core"
    )
    span = seq_len / 2 if model.causal else seq_len
    return model.layers * 2 * span * features


def prediction_blocks(model: Model) -> int:
    """The number of blocks that predict further tokens (`model.mtp`). Each has the shape of the
    model's last layer."""
    return model.mtp.depth if model.mtp else 0


def prediction_weights(model: Model) -> int:
    """The number of weights that multiply one token outside the block of one further prediction:
    both projections."""
    return 2 * model.hidden**2 + model.vocab * model.hidden


def model_flops_per_token(model: Model, seq_len: int) -> float:
    """Forward and backward FLOPs that one trained token needs: `6 * N + 3 * attention core`."""
    weights = block_weights(model) + head_weights(model)
    ahead = prediction_blocks(model)
    weights += ahead * (
        attention_weights(model) + mlp_weights(model, model.layers - 1) + prediction_weights(model)
    )
    return 6 * weights + 3 * attention_core_flops(model, seq_len) * (1 + ahead / model.layers)


def hardware_flops_per_token(
    model: Model,
    seq_len: int,
    recompute: str,
    recompute_layers: Sequence[str] = (),
    latents: bool = False,
) -> float:
    """FLOPs that are run for one trained token, including recomputed ones.

    `recompute` is the plan's: "none", "selective", "full", or "budget" with one of these for each
    layer in `recompute_layers`. `latents`: selective layers recompute queries, keys and values from
    latents. Raises ValueError for any other word.
    """
    layers = recompute_layers if recompute == "budget" else [recompute] * model.layers
    unknown = set(layers) - {"none", "selective", "full"}
    if unknown or len(layers) != model.layers:
        raise ValueError(
            f"recompute {recompute!r} with {len(layers)} layers {sorted(unknown)} for"
            f" {model.layers} layers"
        )
    core = attention_core_flops(model, seq_len) / model.layers
    block_modes = [*enumerate(layers), *[(model.layers - 1, layers[-1])] * prediction_blocks(model)]
    recomputed = sum(
        2 * (attention_weights(model) + mlp_weights(model, layer)) + core
        for layer, mode in block_modes
        if mode == "full"
    )
    if model.mla is not None and latents:
        recomputed += 2 * up_weights(model) * sum(mode == "selective" for _, mode in block_modes)
    return model_flops_per_token(model, seq_len) + recomputed
