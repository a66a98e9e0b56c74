"""Logits and gradients of a BERT equal those of `transformers` on the same random weights, in fp32.

Samples are one text, so all tokens have the first of BERT's token types: its row of the table is
part of every position here.
"""

from __future__ import annotations

import torch
import transformers

from tests.trainer.samples import BERT, MHA, batch, small
from trainer.model.loss import cross_entropy_sum
from trainer.model.stage import Stage

NAMES = {
    "bert.embeddings.word_embeddings": "embed",
    "bert.embeddings.position_embeddings": "embed_positions",
    "bert.embeddings.LayerNorm": "embed_norm",
    "bert.encoder.layer": "layers",
    "attention.self.query": "attn.wq",
    "attention.self.key": "attn.wk",
    "attention.self.value": "attn.wv",
    "attention.output.dense.weight": "attn.wo.weight",
    "attention.output.dense.bias": "attn.out_bias",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.up",
    "output.dense.weight": "mlp.down.weight",
    "output.dense.bias": "mlp.out_bias",
    "output.LayerNorm": "norm2",
    "cls.predictions.transform.dense": "transform",
    "cls.predictions.transform.LayerNorm": "norm",
    "cls.predictions.bias": "head.bias",
}
TOKEN_TYPES = "bert.embeddings.token_type_embeddings.weight"


def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of `transformers`, weights or gradients, by our names."""
    out = {}
    for name, tensor in tensors.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        out[name] = tensor
    return out


def test_logits_and_gradients_equal_transformers():
    torch.manual_seed(5)
    model = small(**MHA, **BERT, layers=3)
    theirs = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=model.vocab,
            hidden_size=model.hidden,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            intermediate_size=model.ffn_hidden,
            max_position_embeddings=model.max_seq_len,
        )
    ).eval()
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(torch.randn_like(param), alpha=0.2)
    names = {name for name, _ in theirs.named_parameters()}
    weights = {name: theirs.state_dict()[name].clone() for name in names}
    token_types = weights.pop(TOKEN_TYPES)
    weights = renamed(weights)
    weights["embed_positions.weight"] += token_types[0]
    ours = Stage(model, range(3), first=True, last=True)
    assert set(weights) == set(dict(ours.named_parameters()))
    ours.load_state_dict(weights, strict=False)
    data = batch(model)
    expected = theirs(input_ids=data.tokens).logits
    logits = ours(None, data)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for values in (expected, logits):
        cross_entropy_sum(values, data.targets).backward()
    grads = renamed({name: param.grad for name, param in theirs.named_parameters()})
    for name, param in ours.named_parameters():
        # The gradient of the keys' bias is zero but for rounding.
        scale = max(float(grads[name].abs().max()), 1e-2)
        torch.testing.assert_close(
            param.grad, grads[name], rtol=1e-3, atol=1e-4 * scale, msg=lambda m, n=name: n + m
        )
