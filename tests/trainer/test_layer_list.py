"""The planner's list of a layer's operations beside the trainer's modules: nothing else may say
what a layer consists of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.groups import shipped
from orchestrator.cost.memory.kernels import trainer_kernels
from orchestrator.cost.memory.layer_activations import layer_tensors
from orchestrator.cost.model.layers import dense_on_rank, layer_params, vectors_on_rank
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Mla, Model, Moe
from orchestrator.plan.flops import attention_weights, mlp_weights
from orchestrator.plan.layer import layer_operations
from tests.beds.plans import make_plan, tiny_model
from tests.planner.shapes import published
from trainer.compat import fake_tensors
from trainer.model.block import Block, make_block
from trainer.model.experts import Experts
from trainer.model.rope import rope_tables
from trainer.twin.choices import choose_evenly
from trainer.twin.numbers import Numbers
from trainer.verify.ranks import run_ranks

MODELS = sorted(path.stem for path in (shipped() / "model").glob("*.yaml"))


def block_on_meta(model: Model, layer: int) -> Block:
    with torch.device("meta"):
        return make_block(model, layer)


def check_list(model: Model, layer: int) -> None:
    """The list has the block's parameters by name and shape, and the sums are those over them."""
    block = block_on_meta(model, layer)
    shapes = {name: tuple(weight.shape) for name, weight in block.named_parameters()}
    listed = {
        name: shape
        for operation in layer_operations(model, layer)
        for name, shape in operation.shapes.items()
    }
    assert listed == shapes
    elements = sum(weight.numel() for weight in block.parameters())
    assert layer_params(model, layer).total == elements
    experts = sum(w.numel() for name, w in block.named_parameters() if ".experts." in name)
    assert dense_on_rank(model, layer, tp=1) == elements - experts
    vectors = sum(w.numel() for w in block.parameters() if w.dim() == 1)
    assert vectors_on_rank(model, layer, tp=1) == vectors
    matrices = {name: w for name, w in block.named_parameters() if w.dim() > 1}
    attention = sum(w.numel() for name, w in matrices.items() if name.startswith("attn."))
    assert attention_weights(model) == attention
    passed = 0
    for name, weight in matrices.items():
        if name.startswith("mlp."):
            share = model.moe.top_k if ".experts." in name else 1
            passed += share * weight[0].numel() if weight.dim() == 3 else weight.numel()
    assert mlp_weights(model, layer) == passed


@pytest.mark.parametrize("name", MODELS)
def test_list_of_every_shipped_model_is_that_of_its_blocks(name):
    model = published(name)
    for layer in {0, model.layers - 1}:
        check_list(model, layer)


@st.composite
def random_models(draw) -> Model:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    changes: dict = {
        "hidden": 8 * draw(st.integers(1, 6)),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 8)),
        "ffn_hidden": draw(st.integers(1, 90)),
        "norm": draw(st.sampled_from(["rms", "layer"])),
        "mlp": draw(st.sampled_from(["gated", "plain"])),
        "qk_norm": draw(st.booleans()),
    }
    kind = draw(st.sampled_from(["dense", "experts", "latents", "both"]))
    if kind == "dense":
        changes["bias"] = draw(st.booleans())
    if kind in ("experts", "both"):
        changes["moe"] = Moe(
            experts=draw(st.integers(2, 9)),
            top_k=draw(st.integers(1, 2)),
            ffn_hidden=draw(st.integers(1, 40)),
            shared_ffn_hidden=draw(st.sampled_from([0, 24])),
            first_dense_layers=draw(st.integers(0, 2)),
        )
    if kind in ("latents", "both"):
        changes["qk_norm"] = False
        changes["mla"] = Mla(
            q_lora_rank=draw(st.sampled_from([0, 12])),
            kv_lora_rank=draw(st.integers(2, 20)),
            qk_nope_head_dim=draw(st.integers(2, 10)),
            qk_rope_head_dim=2 * draw(st.integers(1, 5)),
            v_head_dim=draw(st.integers(2, 12)),
        )
    return tiny_model(**changes)


@given(random_models())
def test_list_of_random_shapes_is_that_of_their_blocks(model):
    for layer in (0, model.layers - 1):
        check_list(model, layer)


@given(random_models(), st.sampled_from([2, 4]))
def test_ranks_together_hold_each_cut_operation_once(model, tp):
    """Key-value heads that several ranks hold, and what is not cut, are there more than once."""
    for operation in layer_operations(model, 0):
        if operation.routed or operation.cut == "whole" or not operation.has_parameters:
            continue
        held = tp * operation.on_rank(tp)
        cut = operation.outputs if operation.cut == "column" else operation.inputs
        if cut % tp == 0 and cut // tp >= operation.shared_outputs:
            assert held == operation.parameters
        elif operation.shared_outputs > 1:
            assert held >= operation.parameters


TOKENS = 128
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def saved_bytes(model: Model, layer: int, precision: str) -> int:
    """Bytes of the storages that autograd saves in a block's forward, without its parameters.

    They are counted in a process of their own: after fake tensors, torch's first backward starts
    threads, which do not survive the forks of later tests.
    """
    (saved,) = run_ranks(lambda rank: fake_saved_bytes(model, layer, precision), 1)
    return saved


def fake_saved_bytes(model: Model, layer: int, precision: str) -> int:
    """Bytes of the storages that autograd saves, in tensors without memory."""
    with fake_tensors(), Numbers():
        torch.set_default_dtype(PRECISIONS[precision])
        try:
            block = make_block(model, layer)
        finally:
            torch.set_default_dtype(torch.float32)
        choose_evenly(block)
        for module in block.modules():
            if isinstance(module, Experts):
                module.in_one_kernel = True  # as on a GPU
        hidden = torch.zeros(1, TOKENS, model.hidden, dtype=PRECISIONS[precision])
        positions = torch.arange(TOKENS)[None]
        rope = None
        if model.position == "rope":
            rope = rope_tables(positions, model, hidden.dtype)
        lasting = {
            tensor.untyped_storage()._cdata
            for tensor in (*block.parameters(), *block.buffers(), *(rope or ()))
        }
        saved: dict[int, torch.Tensor] = {}

        def record(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            block(hidden.requires_grad_(), positions, None, rope, positions)
        return sum(
            tensor.untyped_storage().nbytes()
            for storage, tensor in saved.items()
            if storage not in lasting
        )


def check_saved(model: Model, layer: int, precision: str) -> None:
    """The list names every tensor that autograd saves, but the statistics of norms, at most two
    fp32 numbers per normalized vector, and a few bytes per token of routing."""
    plan = make_plan(model=model, seq_len=TOKENS, precision=precision)
    workload = Workload(model, plan.parallel, plan.job.train)
    tensors = layer_tensors(workload, layer, trainer_kernels(model, plan.parallel))
    listed = sum(tensor.size for tensor in tensors)
    saved = saved_bytes(model, layer, precision) / TOKENS
    norms = 4 + (model.heads + model.kv_heads if model.qk_norm else 0)
    assert listed - 8 <= saved <= listed + 8 * norms + 40


@pytest.mark.process
@pytest.mark.parametrize("name", MODELS)
def test_list_names_what_autograd_saves_of_every_shipped_model(name):
    model = published(name)
    if model.moe:
        check_saved(model, model.layers - 1, "bf16")
    if not model.moe or model.moe.first_dense_layers:
        check_saved(model, 0, "fp32")


@pytest.mark.process
@settings(max_examples=15)
@given(random_models())
def test_list_names_what_autograd_saves_of_random_shapes(model):
    """Random shapes tell apart sizes that are equal in a published model. A kernel for all experts
    needs rounder ones than these, so they are in fp32."""
    check_saved(model, model.layers - 1, "fp32")
