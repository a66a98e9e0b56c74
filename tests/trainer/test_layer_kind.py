"""A new kind of layer is one function of the plan, one module of the trainer and its naive twin.

The kind of this test is that of Gemma 2 (arXiv 2408.00118): a norm before and behind attention and
MLP, and attention whose scores a tanh keeps below a bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from orchestrator.config.compose import load
from orchestrator.errors import OrchError
from orchestrator.plan import layer as layers
from orchestrator.plan.document import Model, Mtp
from orchestrator.plan.layer import LayerShape, Operation, SavedTensor, hidden_norm, pre_norm
from orchestrator.plan.trained import problems
from tests.beds.plans import make_plan, tiny_model
from tests.reference import transformer
from tests.trainer.test_layer_list import check_list, check_saved
from tests.trainer.test_parity import assert_equal_to_one_process
from tests.trainer.test_planned_memory import LLAMA, assert_planned_is_measured
from trainer.model import block as blocks
from trainer.model.attention import Attention, grouped_product
from trainer.model.block import Block
from trainer.model.documents import Documents
from trainer.model.norm import make_norm

KIND = "gemma2"
CAP = 5.0  # Gemma 2 has 50; small models have small scores


# The function of the plan.


def gemma2_layer(shape: LayerShape) -> Iterator[Operation]:
    for operation in pre_norm(shape):
        if operation.name == "norm2":
            yield hidden_norm(shape, "attention_norm", "attention", normed="output")
        yield capped(operation, shape) if operation.kind == "core" else operation
    yield hidden_norm(shape, "mlp_norm", "mlp", normed="output")


def capped(core: Operation, shape: LayerShape) -> Operation:
    """Attention of which backward reads queries, keys, values and the results of tanh and softmax,
    but not the output."""
    scores = [
        SavedTensor(name, shape.heads, "columns", "scores", per_key=True)
        for name in ("attn.core, capped", "attn.core, weights")
    ]
    heads = [tensor for tensor in core.saves if tensor.writer != "core"]
    return core._replace(saves=(*heads, *scores))


# The module of the trainer.


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_index: Tensor | None,
    documents: Documents | None,
) -> Tensor:
    """Causal attention whose scores a tanh keeps between -CAP and CAP."""
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    scores = grouped_product(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = CAP * torch.tanh(scores / CAP)
    # Backward of a sum reads neither term: the mask is not kept.
    mask = torch.full(scores.shape[-2:], -math.inf, dtype=q.dtype, device=q.device).triu(1)
    if documents is not None:
        numbers = documents.numbers[:, None]
        is_other = numbers[..., :, None] != numbers[..., None, :]
        mask = mask.masked_fill(is_other, -math.inf)
    return grouped_product((scores + mask).softmax(-1), v).transpose(1, 2)


class Gemma2Block(Block):
    def __init__(self, model: Model, layer: int):
        super().__init__(model, layer)
        assert isinstance(self.attn, Attention)
        self.attn.core = capped_attention
        self.attention_norm = make_norm(model)
        self.mlp_norm = make_norm(model)

    def attention_output(self, partial: Tensor) -> Tensor:
        return self.attention_norm(super().attention_output(partial))

    def mlp_output(self, partial: Tensor) -> Tensor:
        return self.mlp_norm(super().mlp_output(partial))


# Its naive twin.


def gemma2_twin(x, w, name, layer, model, positions, documents, drop, terms):
    half = transformer.norm(x, w, f"{name}.norm1", model)
    half = transformer.attention(half, w, f"{name}.attn", model, positions, documents, drop, CAP)
    x = x + transformer.norm(half, w, f"{name}.attention_norm", model)
    half = transformer.norm(x, w, f"{name}.norm2", model)
    half = transformer.mlp(half, w, f"{name}.mlp", model)
    return x + transformer.norm(half, w, f"{name}.mlp_norm", model)


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    monkeypatch.setitem(layers.KINDS, KIND, gemma2_layer)
    monkeypatch.setitem(blocks.BLOCKS, KIND, Gemma2Block)
    monkeypatch.setitem(transformer.KINDS, KIND, gemma2_twin)


def gemma2(**changes: object) -> Model:
    return tiny_model(block=KIND, **changes)


@pytest.mark.process
@pytest.mark.parametrize("changes", [{}, {"norm": "layer", "mlp": "plain"}], ids=str)
def test_list_of_the_kind_is_that_of_its_module(changes):
    model = gemma2(**changes)
    check_list(model, 0)
    check_saved(model, 0, "fp32")


LAYOUTS = {
    "tp2 dp2 zero1": dict(tp=2, dp=2, zero=1),
    "tp2 pp2 without sp": dict(tp=2, pp=2, sp=False),
    "pp2 dp2 zero3, full": dict(pp=2, dp=2, zero=3, recompute="full"),
    "tp4, selective": dict(tp=4, recompute="selective"),
    "pp4 zb_h1, packed": dict(pp=4, schedule="zb_h1", micro_batches=4, packed=True),
}


@pytest.mark.process
def test_layouts_equal_one_process():
    cases = {name: {"model": gemma2(), **layout} for name, layout in LAYOUTS.items()}
    assert_equal_to_one_process(cases, torch.float64)


MEASURED = {
    "tp2": dict(tp=2),
    "tp2 without sp": dict(tp=2, sp=False),
    "dp2 zero3, full": dict(dp=2, zero=3, recompute="full"),
    "pp2": dict(pp=2, micro_batches=4),
}


@pytest.mark.process
def test_planned_memory_is_measured():
    model = LLAMA | {"block": KIND}
    assert_planned_is_measured(
        {name: {"model": model, **layout} for name, layout in MEASURED.items()}
    )


def test_layouts_that_know_another_kind_only_are_refused():
    plan = make_plan(model=gemma2(), cp=2)
    assert list(problems(plan)) == [
        "model.block=gemma2 with cp=2: the ranks attend as in pre_norm layers; legal: cp=1"
    ]
    ahead = make_plan(model=gemma2(mtp=Mtp(depth=1)))
    assert any("model.mtp" in problem for problem in problems(ahead))
    assert list(problems(make_plan(model=gemma2(), tp=2))) == []


def test_unknown_kind_of_a_configuration_is_named_with_its_neighbour():
    line = ["+cluster=h100x8", "model=tiny", "+model.block=gema2"]
    with pytest.raises(OrchError, match=r"model.block=gema2': 'gema2' .* did you mean 'gemma2'"):
        load(line)
