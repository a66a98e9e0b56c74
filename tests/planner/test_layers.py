"""Formulas against the closed variants in the papers."""

from __future__ import annotations

import pytest

from orchestrator.cost.model.layers import head_flops, layer_flops, layer_params, parameter_count
from orchestrator.plan.flops import hardware_flops_per_token, model_flops_per_token

from . import shapes


@pytest.mark.parametrize(
    ("name", "billions", "off"), [("mixtral_8x7b", 12.9 - 0.13, 0.05), ("deepseek_v3", 37, 0.5)]
)
def test_products_are_with_the_activated_weights_of_published_mixtures(name, billions, off):
    """The papers' figures, without the input table: that is a lookup."""
    m = getattr(shapes, name)()
    layers = [layer_flops(m, layer, 4096) for layer in range(m.layers)]
    products = sum(layer.total - layer.attention_core for layer in layers) + head_flops(m)
    assert products / 2 / 1e9 == pytest.approx(billions, abs=off)


@pytest.mark.parametrize("name", ["gpt2", "gpt3_175b"])
def test_gpt_style_count_is_the_closed_form(name):
    m = getattr(shapes, name)()
    h = m.hidden
    closed = (
        h * m.vocab + m.layers * (12 * h * h + 13 * h) + 2 * h + m.max_seq_len * h
    )  # planning.md C1
    assert parameter_count(m) == closed


def test_dense_layers_come_first_in_a_mixture():
    m = shapes.deepseek_v3()
    assert layer_params(m, 2).experts == 0
    assert layer_params(m, 3).experts == 256 * 3 * 7168 * 2048


@pytest.mark.parametrize(("recompute", "factor"), [("none", 72), ("full", 96)])
def test_gpt_flops_are_narayanan_2021_equation_3(recompute, factor):
    """Full attention (the paper does not halve it): make the model non-causal."""
    s = 2048
    m = shapes.model("gpt", 96, 12288, 96, 96, 49152, 51200, style="gpt", causal=False)
    h = m.hidden
    tail = (
        m.vocab / (12 * m.layers * m.hidden)
        if factor == 72
        else m.vocab / (16 * m.layers * m.hidden)
    )
    closed = factor * m.layers * h * h * (1 + s / (6 * h) + tail)
    assert hardware_flops_per_token(m, s, recompute) == pytest.approx(closed, rel=1e-12)


def test_selective_recompute_repeats_no_matrix_product():
    """Ours keeps the results of products and of fused attention (trainer/parallel/recompute.py);
    arXiv 2205.05198 repeated the attention core, which was not fused yet."""
    m = shapes.model("gpt", 96, 12288, 96, 96, 49152, 0, style="gpt", causal=False)
    assert hardware_flops_per_token(m, 2048, "selective") == model_flops_per_token(m, 2048)


def test_causal_attention_halves_only_the_core():
    causal = shapes.llama3_8b()
    full = shapes.model("full", 32, 4096, 32, 8, 14336, 128256, causal=False)
    s = 8192
    difference = model_flops_per_token(full, s) - model_flops_per_token(causal, s)
    assert difference == pytest.approx(6 * 32 * 4096 * s)


@pytest.mark.parametrize("name", ["llama3_8b", "deepseek_v3", "bert_large"])
def test_parts_add_up_to_the_whole(name):
    m = getattr(shapes, name)()
    s = 4096
    forward_flops = sum(layer_flops(m, layer, s).total for layer in range(m.layers)) + head_flops(m)
    assert 3 * forward_flops == pytest.approx(model_flops_per_token(m, s), rel=1e-12)
