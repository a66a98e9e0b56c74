"""FLOP formulas against the papers' own closed forms and figures."""

import pytest
from msgspec.structs import replace

from orchestrator.plan import document as doc
from orchestrator.plan.flops import hardware_flops_per_token, model_flops_per_token
from tests.beds.plans import tiny_model

GPT3 = tiny_model(
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    head_dim=128,
    ffn_hidden=4 * 12288,
    vocab=51200,
    mlp="plain",
    norm="layer",
    position="learned",
    bias=True,
    causal=False,
)
LLAMA3_405B = tiny_model(
    layers=126,
    hidden=16384,
    heads=128,
    kv_heads=8,
    head_dim=128,
    ffn_hidden=53248,
    vocab=128256,
)


@pytest.mark.parametrize("seq", [2048, 8192])
def test_model_flops_are_korthikanti_equation_for_gpt(seq):
    """72 L h^2 (1 + s/6h + V/12Lh) a token, full (not causal) attention."""
    layers = GPT3.layers
    hidden = GPT3.hidden
    vocab = GPT3.vocab
    expected = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert model_flops_per_token(GPT3, seq) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seq", [2048, 8192])
def test_full_recompute_is_korthikanti_equation(seq):
    """96 L h^2 (1 + s/6h + V/16Lh): the blocks' forward once more, the head's not."""
    layers = GPT3.layers
    hidden = GPT3.hidden
    vocab = GPT3.vocab
    full = 96 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert hardware_flops_per_token(GPT3, seq, "full") == pytest.approx(full, rel=1e-12)
    for free in ("none", "selective"):
        assert hardware_flops_per_token(GPT3, seq, free) == model_flops_per_token(GPT3, seq)


def test_a_recompute_budget_counts_the_layers_that_run_again():
    full, none = (hardware_flops_per_token(GPT3, 2048, mode) for mode in ("full", "none"))
    mixed = ["full"] * 24 + ["selective"] * 48 + ["none"] * 24
    assert hardware_flops_per_token(GPT3, 2048, "budget", mixed) == pytest.approx(
        none + (full - none) / 4
    )


def test_causal_halves_the_attention_core_only():
    seq = 4096
    unmasked = model_flops_per_token(GPT3, seq)
    causal = model_flops_per_token(replace(GPT3, causal=True), seq)
    assert unmasked - causal == pytest.approx(6 * GPT3.layers * seq * GPT3.hidden, rel=1e-12)


def test_llama_405b_matches_its_paper():
    """arXiv 2407.21783, section 3.2: 3.8e25 FLOPs for 15.6 T tokens of the 405B model, mostly at 8k
    context."""
    assert model_flops_per_token(LLAMA3_405B, 8192) * 15.6e12 == pytest.approx(3.8e25, rel=0.05)


def test_deepseek_v3_counts_active_weights():
    """arXiv 2412.19437: 37 B of 671 B weights are active a token; 6 N of them and the head, at a
    short context."""
    model = tiny_model(
        layers=61,
        hidden=7168,
        heads=128,
        kv_heads=128,
        head_dim=128,
        ffn_hidden=18432,
        vocab=129280,
        moe=doc.Moe(
            experts=256, top_k=8, ffn_hidden=2048, shared_ffn_hidden=2048, first_dense_layers=3
        ),
        mla=doc.Mla(
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
    )
    assert model_flops_per_token(model, 1) == pytest.approx(6 * 37e9, rel=0.02)


@pytest.mark.parametrize(
    ("mode", "layers"), [("ful", []), ("budget", ["full"]), ("budget", ["ful"] * 96)]
)
def test_unknown_recompute_is_refused(mode, layers):
    with pytest.raises(ValueError, match="recompute"):
        hardware_flops_per_token(GPT3, 8, mode, layers)
