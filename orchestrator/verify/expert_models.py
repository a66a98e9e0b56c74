"""Small models with experts or latent attention, for the techniques of the matrix."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from orchestrator.plan.document import Mla, Moe

#: Latent attention of a small model.
MLA = Mla(
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
)
_PLAIN = {"bias": False, "position": "rope"}
MIXTURE = {
    **_PLAIN,
    "moe": Moe(
        experts=4,
        top_k=2,
        ffn_hidden=24,
        balance_loss=0.1,
        z_loss=0.01,
    ),
}
#: DeepSeek-V3's block: a dense layer first, shared experts, latent attention, and a choice by
#: groups and by biases, which change so much that the next step chooses other experts.
DEEPSEEK = {
    **_PLAIN,
    "moe": Moe(
        experts=8,
        top_k=3,
        ffn_hidden=16,
        shared_ffn_hidden=24,
        first_dense_layers=1,
        score="sigmoid",
        routed_scale=2.5,
        groups=4,
        top_groups=2,
        balance_loss=0.1,
        bias_update=0.05,
    ),
    "mla": MLA,
}


def with_mixture(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns the model with another mixture of experts."""
    return {**model, "moe": structs.replace(model["moe"], **changes)}


#: Experts that take less than an equal share of each sequence, so that every layout drops some
#: choices.
CAPPED = with_mixture(MIXTURE, capacity_factor=0.75)
CAPPED_DEEPSEEK = with_mixture(DEEPSEEK, capacity_factor=0.7)
#: One choice per token. In the second step the biases exceed every score, so that only experts with
#: less than the mean load of the first step are chosen: of two experts, one gets all tokens.
ONE_TAKES_ALL = with_mixture(
    MIXTURE,
    experts=2,
    top_k=1,
    score="sigmoid",
    norm_topk=False,
    bias_update=10.0,
)
IDLE = with_mixture(ONE_TAKES_ALL, experts=8)
#: More experts than tokens in a micro-batch, and experts that every token chooses.
FEW_TOKENS = with_mixture(MIXTURE, experts=64, ffn_hidden=8)
ALL_CHOSEN = with_mixture(MIXTURE, top_k=4)
