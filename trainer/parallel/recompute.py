"""Activation recomputation: backward computes activations a second time (Chen et al. 2016, arXiv
1604.06174).

full       A block keeps only its input; its forward runs a second time, including communication.
selective  By operator: results of matrix products and of attention are kept, everything between
           them (norms, rotary positions, activations; with sequence parallelism the gathered
           sequence) is recomputed. This costs few FLOPs, and with a fused attention it drops more
           than recomputing the attention core would (Korthikanti et al. 2022, arXiv 2205.05198,
           section 5, where the core was not fused yet). `train.recompute_latents`: latent attention
           keeps only the products that make latents; queries, keys and values are recomputed from
           these (DeepSeek-V3, arXiv 2412.19437, section 3.2.3).
budget     One of these per layer, as the planner chose to fit `train.recompute_budget_gib`.

Recomputation wraps methods of a block instance, so parameter names do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from orchestrator.plan.document import Train
from trainer.model.block import Block
from trainer.model.linear import Linear
from trainer.model.mla import LatentAttention
from trainer.model.mlp import MLP
from trainer.model.stage import Stage

from .kept_inputs import KeptInputs

Function = Callable[..., Any]

aten = torch.ops.aten
#: The last computes products in 8 bits on a GPU.
PRODUCTS = {aten.mm.default, aten.addmm.default, aten._scaled_mm_v2.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._flash_attention_forward.default,
}


def recompute_mode(train: Train, layer: int) -> str:
    """Returns the mode of a layer. Blocks that predict further tokens have that of the last
    layer."""
    if train.recompute != "budget":
        return train.recompute
    modes = train.recompute_layers
    return modes[min(layer, len(modes) - 1)]


def apply_recompute(
    stage: Stage,
    train: Train,
    inputs: KeptInputs | None = None,
    *,
    whole_sequences: bool = True,
) -> None:
    """Applies the plan's mode to every block of a stage. Gradients stay bitwise equal.

    `whole_sequences`: whether attention is one operator, over sequences that this rank has whole.
    `inputs`: hooks that keep the inputs of recomputed parts; None: they are kept whole. The hooks
    are not used for the first part of a stage that received its input and holds it anyway.
    """

    def kept(function: Function, received: bool) -> Function:
        return function if inputs is None or received else inputs.around(function)

    first = next(iter(stage.blocks), None)
    for layer, block in stage.blocks.items():
        mode = recompute_mode(train, layer)
        received = layer == first and not stage.first
        if mode == "full":
            forward = _checkpointed(block.forward)
            block.forward = kept(forward, received)  # type: ignore[method-assign]
        elif mode == "selective":
            latents = train.recompute_latents is True
            contexts = _attention_contexts(block, latents, whole_sequences)
            attend = _checkpointed(block.attend, contexts)
            block.attend = kept(attend, received)  # type: ignore[method-assign]
            # Experts keep all: little is computed between their products.
            if isinstance(block.mlp, MLP):
                products = 1 if block.mlp.gate is None else 2
                contexts = partial(_contexts, products=products, keep=set())
                feed_forward = _checkpointed(block.feed_forward, contexts)
                block.feed_forward = kept(feed_forward, False)  # type: ignore[method-assign]
        elif mode != "none":
            raise ValueError(f"recompute={mode!r} of layer {layer}; legal: none, selective, full")


def _attention_contexts(
    block: Block,
    latents: bool,
    whole_sequences: bool,
) -> Callable[[], Any]:
    """Returns the contexts of selective recomputation of attention. `latents`: keeps no product
    that is made from latents."""
    # Over a sequence shard, attention goes block by block: keeping each partial result would cost
    # more than it saves.
    keep = ATTENTION if whole_sequences else set()
    linears = sum(isinstance(module, Linear) for module in block.attn.children())
    from_latents = 0
    if latents and isinstance(block.attn, LatentAttention):
        from_latents = LatentAttention.MADE_OF_LATENTS
    return partial(_contexts, products=linears - 1 - from_latents, keep=keep)


def _checkpointed(
    function: Callable[..., Any], contexts: Callable[[], Any] | None = None
) -> Callable[..., Any]:
    """Wraps `function` with recomputation: its inputs and what `contexts` selects are kept. It does
    not draw stateful random numbers, so no random state is kept."""
    extra: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            **extra,
            **kwargs,
        )

    return run


def _contexts(products: int, keep: set) -> Any:
    """Returns contexts that keep the first `products` matrix products and all results of `keep`.

    The last product of each half is not kept: backward never reads it, and tensor parallelism sums
    into it in place.
    """
    seen = {False: 0, True: 0}  # products by pass: False forward, True recomputation

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in keep:
            return CheckpointPolicy.MUST_SAVE
        if op in PRODUCTS:
            seen[ctx.is_recompute] += 1
            if seen[ctx.is_recompute] <= products:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
