"""Logits and gradients of mixtures of experts equal those of `transformers` on the same random
weights, in fp32.

Hugging Face fuses gate and up of all experts, and DeepSeek's weights interleave the rotary
dimensions.
"""

from __future__ import annotations

import pytest
import torch
import transformers

from orchestrator.plan.document import Mla, Moe, Yarn
from tests.trainer.samples import LLAMA, batch, small
from trainer.model.loss import cross_entropy_sum
from trainer.model.stage import Stage

SHAPE = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "use_cache": False,
}
EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 12}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
ROPE |= {"beta_fast": 2.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
NOPE = 6
TURNED = 8


def mixtral():
    config = transformers.MixtralConfig(
        **SHAPE,
        num_key_value_heads=2,
        intermediate_size=12,
        num_local_experts=6,
        num_experts_per_tok=2,
        rope_theta=1e4,
    )
    ours = {"moe": Moe(experts=6, top_k=2, ffn_hidden=12)}
    return transformers.MixtralForCausalLM(config), ours


def qwen3():
    config = transformers.Qwen3MoeConfig(
        **SHAPE,
        **EXPERTS,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=6,
        norm_topk_prob=True,
        rope_theta=1e4,
    )
    ours = {
        "moe": Moe(experts=6, top_k=3, ffn_hidden=12),
        "qk_norm": True,
        "norm_eps": config.rms_norm_eps,
    }
    return transformers.Qwen3MoeForCausalLM(config), ours


def deepseek():
    config = transformers.DeepseekV3Config(
        **(SHAPE | EXPERTS),
        num_key_value_heads=4,
        intermediate_size=48,
        n_shared_experts=2,
        n_routed_experts=8,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_rope_head_dim=TURNED,
        qk_nope_head_dim=NOPE,
        v_head_dim=5,
        norm_topk_prob=True,
        rope_parameters=dict(ROPE),
        max_position_embeddings=64,
    )
    moe = Moe(
        experts=8,
        top_k=3,
        ffn_hidden=12,
        shared_ffn_hidden=24,
        first_dense_layers=1,
        score="sigmoid",
        routed_scale=2.5,
        groups=4,
        top_groups=2,
    )
    mla = Mla(
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=TURNED,
        v_head_dim=5,
    )
    yarn = Yarn(factor=8.0, original_seq_len=8, beta_fast=2.0, beta_slow=0.5)
    ours = {"moe": moe, "mla": mla, "yarn": yarn, "norm_eps": config.rms_norm_eps}
    return transformers.DeepseekV3ForCausalLM(config), ours


ATTENTION = {
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
}
ATTENTION |= {
    "q_a_proj": "q_down",
    "q_a_layernorm": "q_norm",
    "q_b_proj": "wq",
    "kv_a_proj_with_mqa": "kv_down",
}
ATTENTION |= {"kv_a_layernorm": "kv_norm", "kv_b_proj": "wkv"}
NAMES = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "model.layers": "layers",
}
NAMES |= {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn": "attn",
    "shared_experts": "shared",
}
NAMES |= {".mlp.gate.weight": ".mlp.router.weight", "_proj.weight": ".weight"}


def halves(weight, heads):
    """Rows of the rotary part of each head, from interleaved pairs to two halves."""
    rows = weight.unflatten(0, (heads, -1))
    turned = rows[:, -TURNED:]
    return torch.cat((rows[:, :-TURNED], turned[:, 0::2], turned[:, 1::2]), dim=1).flatten(0, 1)


def renamed(tensors):
    """Tensors of `transformers`, weights or gradients, by our names."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            continue
        for theirs, ours in ATTENTION.items():
            name = name.replace(f"self_attn.{theirs}.", f"self_attn.{ours}.")
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            out[f"{base}gate.weight"], out[f"{base}up.weight"] = tensor.chunk(2, dim=1)
        elif name.endswith("experts.down_proj"):
            out[name.replace("down_proj", "down.weight")] = tensor
        else:
            out[name] = tensor
    for name in list(out):
        if name.endswith("kv_down.weight"):
            out[name] = halves(out[name], 1)
            query = name.replace("kv_down", "wq")
            out[query] = halves(out[query], 4)
    return out


@pytest.mark.parametrize("make", [mixtral, qwen3, deepseek])
def test_logits_and_gradients_equal_transformers(make):
    torch.manual_seed(5)
    theirs, changes = make()
    theirs.train()
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(torch.randn_like(param), alpha=0.2)
    model = small(
        **LLAMA, layers=3, vocab=257, **{"max_seq_len": 64, "kv_heads": 2, "head_dim": 8} | changes
    )
    ours = Stage(model, range(3), first=True, last=True)
    weights = renamed(theirs.state_dict())
    assert set(weights) == set(dict(ours.named_parameters()))
    ours.load_state_dict(
        {name: weights.get(name, value) for name, value in ours.state_dict().items()}
    )
    data = batch(model)
    expected = theirs(input_ids=data.tokens).logits
    own_logits = ours(None, data)
    torch.testing.assert_close(own_logits, expected, rtol=1e-4, atol=1e-4)
    for logits in (expected, own_logits):
        cross_entropy_sum(logits, data.targets).backward()
    grads = renamed({name: param.grad for name, param in theirs.named_parameters()})
    for name, param in ours.named_parameters():
        scale = float(grads[name].abs().max())
        torch.testing.assert_close(
            param.grad, grads[name], rtol=1e-3, atol=1e-4 * scale, msg=lambda m, n=name: n + m
        )
