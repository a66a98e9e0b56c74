"""The oracle's networks with experts are those of `transformers`, whole and unchanged, and its
judge of choices takes what routers of `transformers` choose and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from tests.independent.oracle.choices import Choices, needed_rounding
from tests.independent.oracle.data import Batch
from tests.independent.oracle.modules import taken_choices
from tests.independent.oracle.names import theirs
from tests.independent.oracle.network import Counts, Network, ahead
from tests.independent.oracle.shapes import shapes

_BASE = {
    "name": "m",
    "layers": 3,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "ffn_hidden": 48,
}
_BASE |= {
    "vocab": 65,
    "max_seq_len": 64,
    "norm": "rms",
    "norm_eps": 1e-6,
    "position": "rope",
    "rope_theta": 1e4,
}
_BASE |= {
    "mlp": "gated",
    "activation": "silu",
    "bias": False,
    "tied_embeddings": False,
    "causal": True,
}
MIXTRAL = _BASE | {"moe": {"experts": 6, "top_k": 2, "ffn_hidden": 12}}
QWEN3 = _BASE | {"qk_norm": True, "moe": {"experts": 6, "top_k": 3, "ffn_hidden": 12}}
_SPARSE = {
    "experts": 8,
    "top_k": 3,
    "ffn_hidden": 12,
    "shared_ffn_hidden": 24,
    "first_dense_layers": 1,
}
_SPARSE |= {
    "score": "sigmoid",
    "routed_scale": 2.5,
    "groups": 4,
    "top_groups": 2,
    "bias_update": 0.1,
}
_YARN = {
    "factor": 8.0,
    "original_seq_len": 8,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale_all_dim": 1.0,
}
_MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
}
DEEPSEEK = _BASE | {"moe": _SPARSE, "mla": _MLA, "yarn": _YARN, "kv_heads": 4}

_WORDS = {
    "vocab_size": 65,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "use_cache": False,
}
_WORDS |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 64}
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 8,
}
_ROPE |= {"beta_fast": 2.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}


def mixtral():
    sizes = {
        "num_key_value_heads": 2,
        "intermediate_size": 12,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
    }
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**_WORDS, **sizes, rope_theta=1e4)
    )


def qwen3():
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3}
    sizes |= {"moe_intermediate_size": 12, "norm_topk_prob": True, "rope_theta": 1e4}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_WORDS, **sizes))


def deepseek():
    sizes = {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "n_shared_experts": 2,
        "n_routed_experts": 8,
    }
    sizes |= {
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
    }
    sizes |= {
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "rope_interleave": False,
    }
    return transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**_WORDS, **sizes, **_MLA, rope_parameters=_ROPE)
    )


def whole_names(ours):
    """Names in a whole network of `transformers` of what `Network` builds around its parts."""
    out = {}
    for name, tensor in ours.items():
        name = name.removeprefix("body.").replace("mlp.shared.", "mlp.shared_experts.")
        name = name.replace("router.weight", "gate.weight").replace(
            "router.bias", "gate.e_score_correction_bias"
        )
        out[name] = tensor
    return out


@pytest.mark.parametrize(
    ("make", "model"), [(mixtral, MIXTRAL), (qwen3, QWEN3), (deepseek, DEEPSEEK)]
)
def test_logits_gradients_and_choices_are_those_of_the_whole_network(make, model):
    torch.manual_seed(3)
    network = Network(model, torch.float32)
    reference_model = make().eval()
    weights = {
        name: torch.randn(shape) * 0.3 + (len(shape) == 1) for name, shape in shapes(model).items()
    }
    biases = torch.randn(model["moe"]["experts"]) * 0.2 if "bias_update" in model["moe"] else None
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    tensors = whole_names(theirs(model, leaves))
    chosen = {}
    values = {}
    for layer in network.mixtures:
        gate = reference_model.model.layers[layer].mlp.gate
        if biases is not None:
            tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = biases
        gate.register_forward_hook(
            lambda gate, inputs, out, layer=layer: chosen.__setitem__(layer, out[2])
        )
    tokens = torch.randint(65, (2, 16))
    targets = torch.randint(65, (2, 16))
    positions = torch.arange(16).expand(2, 16)
    logits = torch.func.functional_call(
        reference_model, tensors, kwargs={"input_ids": tokens, "position_ids": positions}
    ).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()

    batch = Batch(tokens, targets, positions, torch.zeros(2, 16, dtype=torch.int64))
    choices = Choices({layer: experts.view(2, 16, -1) for layer, experts in chosen.items()}, {}, {})
    outcome = network.run(weights, batch, Counts(32, 2, 32), scale=1.0, choices=choices, loads={})
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none"
    )
    torch.testing.assert_close(outcome.losses.flatten(), expected, rtol=1e-4, atol=1e-4)
    for name, leaf in leaves.items():
        scale = float(leaf.grad.abs().max())
        torch.testing.assert_close(
            outcome.grads[name], leaf.grad, rtol=1e-3, atol=1e-4 * scale, msg=name
        )
    for layer, experts in chosen.items():
        values = outcome.scores[layer].flatten(0, 1).double() + (
            0.0 if biases is None else biases.double()
        )
        assert float(needed_rounding(values, experts, model["moe"]).max()) < 1e-6
        least = values.argmin(-1, keepdim=True)
        other_choices = torch.cat([experts[:, :-1], least], 1)
        assert float(needed_rounding(values, other_choices, model["moe"]).min()) > 1e-4


def by_hand(values, chosen, moe):
    """The least rounding of one token, by trying every choice of groups and comparing every pair of
    experts."""
    import itertools

    groups = moe["groups"]
    size = moe["experts"] // moe["groups"]
    count = min(2, size) if moe["score"] == "sigmoid" else 1
    worth = [sum(sorted(values[g * size : (g + 1) * size])[-count:]) for g in range(groups)]
    best = math.inf
    for picks in itertools.combinations(range(groups), moe["top_groups"]):
        legal = [e for e in range(moe["experts"]) if e // size in picks]
        if not set(chosen) <= set(legal):
            continue
        need = max(
            [(values[e] - values[c]) / 2 for e in legal if e not in chosen for c in chosen] + [0.0]
        )
        apart = [worth[out] - worth[g] for out in range(groups) if out not in picks for g in picks]
        best = min(best, max([need] + [gap / (2 * count) for gap in apart]))
    return best


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (2, 1)])
def test_the_rounding_behind_a_choice(score, groups, top_groups):
    generator = torch.Generator().manual_seed(1)
    moe = {"experts": 8, "score": score, "groups": groups, "top_groups": top_groups}
    values = torch.rand(40, 8, generator=generator, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in values])
    roundings = needed_rounding(values, chosen, moe)
    for at, rounding in enumerate(roundings):
        expected = by_hand(values[at].tolist(), chosen[at].tolist(), moe)
        assert float(rounding) == pytest.approx(expected) or float(rounding) == expected == math.inf


def test_equal_scores_go_to_the_lower_expert_and_no_expert_is_chosen_twice():
    moe = {"experts": 4}
    values = torch.tensor([[0.5, 0.1, 0.5, 0.9]] * 3)
    roundings = needed_rounding(values, torch.tensor([[3, 0], [3, 2], [3, 3]]), moe)
    assert roundings.tolist() == [0.0, math.inf, math.inf]


def test_an_expert_takes_the_first_tokens_of_a_sequence():
    chosen = torch.tensor([[[0, 1], [0, 2], [1, 0], [0, 1]], [[3, 2]] * 4])
    fits = taken_choices(chosen, {"experts": 4, "capacity_factor": 0.9})  # 0.9 * 8 / 4, rounded up
    first = [[True, True], [True, True], [True, False], [False, False]]
    second = [[True] * 2] * 2 + [[False] * 2] * 2
    assert fits.tolist() == [first, second]
    assert taken_choices(chosen, {"experts": 4}).all()


def test_what_is_ahead_lies_in_the_sample_and_the_document():
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    targets = torch.tensor([[6, -100, 8, 9, 1]])
    batch = Batch(tokens, targets, torch.zeros(1, 5, dtype=torch.int64), documents)
    later, labels = ahead(batch, 1)
    assert later.tolist() == [[6, 7, 8, 9, 0]] and labels.tolist() == [[-100, -100, 9, 1, -100]]
    later, labels = ahead(batch, 2)
    assert later.tolist() == [[7, 8, 9, 0, 0]] and labels.tolist() == [[-100, -100, 1, -100, -100]]
