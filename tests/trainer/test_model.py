"""The model against its naive twin, its names, its parameter count, its initial weights."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from orchestrator.plan.document import Mla, Moe, Yarn
from tests.reference import transformer as twin
from tests.trainer.samples import BERT, GPT, GQA, LLAMA, MHA, MQA, batch, small
from trainer.model.attention import SDPA
from trainer.model.init import ROWS, fill, init_stage
from trainer.model.linear import Linear, LinearOp
from trainer.model.loss import cross_entropy_sum
from trainer.model.router import Router
from trainer.model.stage import Stage

WHOLE = {"first": True, "last": True}


def built(model, seed=7, dtype=torch.float64):
    stage = Stage(model, range(model.layers), **WHOLE).to(dtype)
    init_stage(stage, model, seed)
    with torch.no_grad():  # biases and norm weights away from their trivial values
        for index, (_, param) in enumerate(sorted(stage.named_parameters())):
            if param.dim() == 1:
                param += 0.1 * torch.randn(
                    param.shape, generator=torch.Generator().manual_seed(index), dtype=dtype
                )
    return stage


LATENT = Mla(q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
KINDS = {
    "llama-gqa": LLAMA | GQA,
    "llama-mha-tied": LLAMA | MHA | {"tied_embeddings": True},
    "gpt-mha-tied": GPT | MHA | {"tied_embeddings": True},
    "gpt-mqa": GPT | MQA,
    "mixed": {
        "norm": "layer",
        "position": "none",
        "mlp": "gated",
        "activation": "gelu",
        "bias": True,
    },
    "qk-norm": LLAMA | GQA | {"qk_norm": True},
    "experts": LLAMA | GQA | {"moe": Moe(experts=5, top_k=2, ffn_hidden=12)},
    "all-experts": LLAMA
    | {"moe": Moe(experts=3, top_k=3, ffn_hidden=8, norm_topk=False), "mlp": "plain"},
    "deepseek": LLAMA
    | {
        "moe": Moe(
            experts=8,
            top_k=3,
            ffn_hidden=12,
            shared_ffn_hidden=16,
            first_dense_layers=1,
            score="sigmoid",
            routed_scale=2.5,
            groups=4,
            top_groups=2,
        ),
        "mla": LATENT,
        "yarn": Yarn(factor=8.0, original_seq_len=4, beta_fast=4.0),
    },
    "capacity": LLAMA | GQA | {"moe": Moe(experts=4, top_k=2, ffn_hidden=12, capacity_factor=0.8)},
    "capacity-shared-experts": LLAMA
    | {
        "moe": Moe(
            experts=4,
            top_k=1,
            ffn_hidden=12,
            shared_ffn_hidden=8,
            score="sigmoid",
            capacity_factor=0.5,
        )
    },
    "latent-without-query-rank": LLAMA | {"mla": structs.replace(LATENT, q_lora_rank=0)},
    "bert": BERT | MHA,
    "encoder with norms before its halves": GPT | GQA | {"causal": False},
    "rms-plain-silu": {"norm": "rms", "mlp": "plain", "activation": "silu"},
}


@pytest.mark.parametrize("documents", [False, True], ids=["one-document", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_loss_and_gradients_equal_the_naive_twin(kind, documents):
    model = small(**KINDS[kind])
    stage = built(model)
    data = batch(model, documents=documents)
    weights = {
        name: param.detach().clone().requires_grad_() for name, param in stage.named_parameters()
    }
    expected = twin.logits(
        weights, model, data.tokens, data.positions, data.documents and data.documents.numbers
    )
    twin.loss_sum(expected, data.targets).backward()
    logits = stage(None, data)
    loss = cross_entropy_sum(logits, data.targets)
    loss.backward()
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(loss, twin.loss_sum(expected, data.targets), rtol=1e-12, atol=0)
    for name, param in stage.named_parameters():
        torch.testing.assert_close(
            param.grad, weights[name].grad, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_count_and_global_names(kind):
    model = small(**KINDS[kind], layers=3)
    with torch.device("meta"):
        full_stage = Stage(model, range(3), **WHOLE)
        stages = [Stage(model, range(0, 1), True, False), Stage(model, range(1, 3), False, True)]
    shapes = {name: param.shape for name, param in full_stage.named_parameters()}
    assert sum(shape.numel() for shape in shapes.values()) == model.parameters
    split = [(name, param.shape) for stage in stages for name, param in stage.named_parameters()]
    assert dict(split) == shapes
    copies = 1 if model.tied_embeddings else 0
    assert len(split) == len(shapes) + copies  # the last stage's copy of the embedding


def test_stages_chained_equal_the_whole_model():
    model = small(layers=5, **GPT, tied_embeddings=True)
    data = batch(model)
    x = None
    full_stage = Stage(model, range(5), **WHOLE).double()
    init_stage(full_stage, model, 3)
    for low, high in [(0, 2), (2, 3), (3, 5)]:
        stage = Stage(model, range(low, high), low == 0, high == 5).double()
        init_stage(stage, model, 3)
        x = stage(x, data)
    torch.testing.assert_close(x, full_stage(None, data), rtol=0, atol=0)


def test_tied_head_is_one_parameter_and_linear_op_is_replaceable():
    model = small(tied_embeddings=True)
    stage = Stage(model, range(2), **WHOLE)
    assert stage.head.weight is stage.embed.weight
    assert "head.weight" not in dict(stage.named_parameters())
    init_stage(stage, model, 0)
    seen = []

    class Seen(LinearOp):
        def forward(self, x, weight, bias):
            seen.append(weight)
            return super().forward(x, weight, bias)

    for module in stage.modules():
        if isinstance(module, Linear):
            module.op = Seen()
    stage(None, batch(model))
    assert len(seen) == 2 * 7 + 1 and seen[-1] is stage.embed.weight


def test_loss_ignores_and_counts_once():
    model = small()
    scores = torch.randn(2, 4, 257, dtype=torch.float64)
    targets = torch.tensor([[1, 2, -100, 4], [-100, -100, -100, 256]])
    torch.testing.assert_close(cross_entropy_sum(scores, targets), twin.loss_sum(scores, targets))
    none = torch.full((2, 4), -100)
    assert cross_entropy_sum(scores, none) == 0 and model.vocab == 257
    assert cross_entropy_sum(scores.bfloat16(), targets).dtype == torch.float32


def test_attention_never_crosses_a_document_border():
    model = small(**LLAMA)
    stage = built(model)
    data = batch(model, b=1, documents=True)
    before = stage(None, data)
    data.tokens = data.tokens.clone()
    data.tokens[0, 0] = (data.tokens[0, 0] + 1) % model.vocab  # a token of the first document
    after = stage(None, data)
    border = int((data.documents.numbers[0] == 0).sum())
    assert torch.equal(before[0, border:], after[0, border:])
    assert not torch.equal(before[0, :border], after[0, :border])


def test_a_model_that_is_not_causal_sees_the_future():
    q = torch.randn(1, 4, 2, 8)
    both, causal = (SDPA(causal)(q, q, q, torch.arange(4)[None], None) for causal in (False, True))
    torch.testing.assert_close(both[:, -1], causal[:, -1])
    assert not torch.allclose(both[:, 0], causal[:, 0])


@given(
    shape=st.tuples(st.integers(1, 3 * ROWS), st.integers(1, 3))
    | st.tuples(*[st.integers(1, 4)] * 3),
    data=st.data(),
    name=st.sampled_from(["embed.weight", "layers.3.attn.wo.weight", "head.weight"]),
)
def test_any_slice_of_the_initial_weights_is_a_slice_of_the_same_tensor(shape, data, name):
    model = small()
    full = torch.empty(shape)
    fill(full, name, shape, tuple(slice(0, size) for size in shape), model, seed=5)
    where = []
    for size in shape:
        low = data.draw(st.integers(0, size))
        where.append(slice(low, data.draw(st.integers(low, size))))
    block = torch.empty([cut.stop - cut.start for cut in where])
    fill(block, name, shape, tuple(where), model, seed=5)
    assert torch.equal(block, full[tuple(where)])


def test_initial_weights_depend_on_seed_and_name_and_have_the_stated_spread():
    model = small(hidden=64, ffn_hidden=256, layers=8)
    tensors = {}
    for seed in (1, 2):
        for name in (
            "layers.0.mlp.up.weight",
            "layers.1.mlp.up.weight",
            "layers.0.mlp.down.weight",
        ):
            tensors[seed, name] = torch.empty(256, 64)
            fill(tensors[seed, name], name, (256, 64), (slice(0, 256), slice(0, 64)), model, seed)
    values = list(tensors.values())
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
    assert tensors[1, "layers.0.mlp.up.weight"].std().item() == pytest.approx(
        (2 / 320) ** 0.5, rel=0.05
    )
    assert tensors[1, "layers.0.mlp.down.weight"].std().item() == pytest.approx(
        (2 / 320) ** 0.5 / 4, rel=0.05
    )


def test_experts_begin_unlike_each_other_and_equal_scores_go_to_the_first():
    full = torch.empty(3, 4, 5)
    fill(
        full,
        "layers.3.mlp.experts.up.weight",
        (3, 4, 5),
        tuple(slice(0, size) for size in (3, 4, 5)),
        small(),
        seed=5,
    )
    assert not torch.equal(full[0], full[1]) and not torch.equal(full[1], full[2])
    moe = Moe(experts=6, top_k=3, ffn_hidden=4)
    router = Router(small(), moe)
    torch.nn.init.zeros_(router.weight)
    routing = router(torch.randn(5, 32))
    assert routing.experts.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(routing.weights, torch.full((5, 3), 1 / 3))
    router.bias = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.3, 0.2])
    moved = router(torch.randn(5, 32))
    assert moved.experts.tolist() == [[4, 5, 3]] * 5, "the bias chooses"
    torch.testing.assert_close(moved.weights, routing.weights, msg="and does not weigh")
