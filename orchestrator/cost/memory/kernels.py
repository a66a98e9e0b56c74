"""The tensors that an implementation keeps for backward: this project's trainer, and others."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from orchestrator.plan.document import Model, Parallel
from orchestrator.plan.layer import layer_operations
from orchestrator.plan.schedules import splits_backward

#: The tensors that selective recomputation drops. orch: norms, activations and the last product of
#: each half of a layer, as this project's trainer does; core: attention scores (Korthikanti et al.,
#: section 5), and with experts or latent attention what Megatron-Core's modules of those models
#: repeat; ops: all but fused attention and every second matrix product (torchtitan's selective
#: checkpointing by operation); alternate: every second layer.
Selective = Literal["orch", "core", "ops", "alternate"]


class Kernels(Struct, frozen=True, kw_only=True):
    """The tensors that an implementation keeps for backward."""

    fused_attention: bool = True  # keep softmax statistics instead of scores
    fused_activation: bool = False  # keep only the two inputs of the gated activation
    #: A compiler recomputes outputs of norms and activations, unless a gather precedes.
    compiled: bool = False
    keep_gathered: bool = False  # with SP, keep gathered matmul inputs instead of gathering again
    keep_sent: bool = True  # keep a stage's output until its gradient arrives, and queued inputs
    in_transfer: bool = False  # keep only messages that are being sent or received
    inside_backward: bool = False  # count gradients inside a layer while its backward runs
    selective: Selective = "orch"
    #: Use dropout even if the model does not ask for it, as the software's default.
    dropout: bool = False
    #: Split backwards are placed by a search, up to a limit of whole micro-batches.
    fills_limit: bool = False
    #: Keep queries, keys and values both as projected and as attention reads them.
    copied_heads: bool = False
    #: Keep outputs of experts, to be weighted; otherwise the weights are applied before them.
    expert_outputs: bool = True
    #: Keep the inputs of experts' activations as narrow as those of products.
    narrow_activation: bool = False
    #: Tensor-parallel ranks share the inputs of recomputed layers (ZeRO-R's Pa).
    shared_inputs: bool = False
    #: Keep shards of what is gathered again at full width, not as narrow as products.
    wide_shards: bool = False
    #: "cpu" or "cuda": latent attention and experts are those of this project's trainer on that
    #: device.
    trainer: str = ""
    #: Bytes of an element of a matrix product's input, if narrower than the tensor.
    product_width: float | None = None
    #: Bytes of a logit at the peak of the loss; None: the trainer's loss by chunks.
    loss_width: float | None = None

    @property
    def holds_messages(self) -> bool:
        """Whether a pipeline rank holds a message that is in transfer or has not been used yet.

        A message is a hidden state or a gradient.
        """
        return self.keep_sent or self.in_transfer


#: Bytes of an element that the trainer keeps for a matrix product in 8 bits, with scales of 128
#: elements.
_NARROW = {"fp8_tensor": 1.0, "fp8_delayed": 1.0, "fp8_block": 1 + 4 / 128}


def trainer_kernels(
    model: Model, parallel: Parallel, device: str = "cuda", matmul: str = ""
) -> Kernels:
    """Returns the tensors that this project's trainer keeps.

    Over gloo, on CPUs, stages receive early, so sent outputs are held longer.
    """
    # A deferred weight gradient needs the whole input.
    return Kernels(
        fused_attention=fuses_attention(model, parallel),
        fused_activation=True,
        keep_gathered=parallel.sp and splits_backward(parallel),
        keep_sent=device == "cpu",
        in_transfer=True,
        inside_backward=True,
        product_width=_NARROW.get(matmul),
        wide_shards=True,
        trainer=device,
    )


def fuses_attention(model: Model, parallel: Parallel) -> bool:
    """Reports whether the trainer's attention is fused.

    It is not with dropout, except that context parallelism recomputes blocks, nor where a layer's
    attention keeps its scores.
    """
    if any(operation.keeps_scores for operation in layer_operations(model, model.layers - 1)):
        return False
    return not model.dropout or parallel.cp > 1
