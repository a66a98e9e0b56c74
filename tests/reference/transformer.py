"""Naive twin of trainer.model: the decoder as plain functions over a dict of full weights.

Written from the papers, not from the code under test: heads one by one, complex numbers for rotary
positions, softmax spelled out. Slow on purpose.
"""

import math

import torch

from . import dropout, experts


def numbers_of(batch):
    """[b, s], of the packed document that each token belongs to; None where samples are one
    text."""
    return None if batch.documents is None else batch.documents.numbers


def norm(x, w, name, model):
    if model.norm == "rms":
        return (
            x * (x.square().mean(-1, keepdim=True) + model.norm_eps) ** -0.5 * w[f"{name}.weight"]
        )
    x = x - x.mean(-1, keepdim=True)
    return (
        x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * w[f"{name}.weight"]
        + w[f"{name}.bias"]
    )


def project(x, w, name):
    y = torch.einsum("bsi,oi->bso", x, w[f"{name}.weight"])
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rope(x, positions, theta):
    """x [b, s, d]: pairs (i, i + d/2) as complex numbers, turned by position * theta^(-2i/d)."""
    d = x.shape[-1]
    frequency = torch.tensor([theta ** (-2 * i / d) for i in range(d // 2)], dtype=x.dtype)
    turn = torch.polar(torch.ones((), dtype=x.dtype), positions[..., None].to(x.dtype) * frequency)
    z = torch.complex(x[..., : d // 2].contiguous(), x[..., d // 2 :].contiguous()) * turn
    return torch.cat((z.real, z.imag), dim=-1)


def attention(x, w, name, model, positions, documents, drop, cap=None):
    """`cap`: the bound of the scores, which a tanh keeps (Gemma 2, arXiv 2408.00118)."""
    b, s, _ = x.shape
    d = model.head_dim
    if model.mla is not None:
        return experts.latent_attention(x, w, name, model, positions, documents)
    q, k, v = (project(x, w, f"{name}.{matrix}") for matrix in ("wq", "wk", "wv"))
    if model.qk_norm:
        q = head_norm(q, w[f"{name}.q_norm.weight"], model)
        k = head_norm(k, w[f"{name}.k_norm.weight"], model)
    allowed = torch.ones(b, s, s, dtype=torch.bool)
    for i in range(s):
        for j in range(s):
            if j > i and model.causal:
                allowed[:, i, j] = False
            elif documents is not None:
                allowed[:, i, j] = documents[:, i] == documents[:, j]
    heads = []
    for h in range(model.heads):
        g = h // (model.heads // model.kv_heads)
        qh = q[..., h * d : (h + 1) * d]
        kh = k[..., g * d : (g + 1) * d]
        vh = v[..., g * d : (g + 1) * d]
        if model.position == "rope":
            qh = rope(qh, positions, model.rope_theta)
            kh = rope(kh, positions, model.rope_theta)
        scores = qh @ kh.transpose(1, 2) / math.sqrt(d)
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~allowed, -math.inf).exp()
        weights = scores / scores.sum(-1, keepdim=True)
        if model.dropout:
            weights = dropout.probabilities(
                weights, drop[0], h, drop[1], f"{name}.drop", model.dropout
            )
        heads.append(weights @ vh)
    return output(torch.cat(heads, dim=-1), w, name, "wo")


def head_norm(x, weight, model):
    y = x.unflatten(-1, (-1, model.head_dim))
    return (y / (y.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * weight).flatten(-2)


def output(x, w, name, matrix):
    y = project(x, w, f"{name}.{matrix}")
    return y + w[f"{name}.out_bias"] if f"{name}.out_bias" in w else y


def act(x, model):
    if model.activation == "silu":
        return x / (1 + torch.exp(-x))
    if model.activation == "gelu_erf":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x, w, name, model):
    up = project(x, w, f"{name}.up")
    inner = (
        act(project(x, w, f"{name}.gate"), model) * up if model.mlp == "gated" else act(up, model)
    )
    return output(inner, w, name, "down")


def dropped(x, name, model, drop):
    return dropout.hidden(x, drop[0], drop[1], name, model.dropout) if model.dropout else x


def block(x, w, name, layer, model, positions, documents, drop, terms):
    """The block `name`, of the kind of the layer number `layer`."""
    half = norm(x, w, f"{name}.norm1", model)
    half = attention(half, w, f"{name}.attn", model, positions, documents, drop)
    x = x + dropped(half, f"{name}.drop_attn", model, drop)
    half = norm(x, w, f"{name}.norm2", model)
    is_moe = model.moe is not None and layer >= model.moe.first_dense_layers
    half = (
        experts.mixture(half, w, f"{name}.mlp", model, terms)
        if is_moe
        else mlp(half, w, f"{name}.mlp", model)
    )
    return x + dropped(half, f"{name}.drop_mlp", model, drop)


def post_norm(x, w, name, layer, model, positions, documents, drop, terms):
    """BERT's block: each sum is normed (arXiv 1810.04805; Vaswani et al. 2017, section 3.1)."""
    half = attention(x, w, f"{name}.attn", model, positions, documents, drop)
    x = norm(x + dropped(half, f"{name}.drop_attn", model, drop), w, f"{name}.norm1", model)
    half = mlp(x, w, f"{name}.mlp", model)
    return norm(x + dropped(half, f"{name}.drop_mlp", model, drop), w, f"{name}.norm2", model)


#: The kinds of layers, as in `trainer.model.block.BLOCKS`.
KINDS = {"pre_norm": block, "post_norm": post_norm}


def scores(state, w, model):
    logits = state @ w["embed.weight" if model.tied_embeddings else "head.weight"].T
    return logits + w["head.bias"] if "head.bias" in w else logits


def logits(w, model, tokens, positions, documents=None, drop=None, terms=None):
    """Full weights by name, int64 [b, s] -> [b, s, vocab]."""
    return scores(states(w, model, tokens, positions, documents, drop, terms), w, model)


def states(w, model, tokens, positions, documents=None, drop=None, terms=None):
    """What the output projection reads, [b, s, hidden]. `drop`: (the tokens' serials, the run's
    seed). What experts add to the loss goes into the dict `terms`."""
    terms = {} if terms is None else terms
    x = w["embed.weight"][tokens]
    if model.position == "learned":
        x = x + w["embed_positions.weight"][positions]
    if "embed_norm.weight" in w:
        x = norm(x, w, "embed_norm", model)
    x = dropped(x, "drop_embed", model, drop)
    for i in range(model.layers):
        layer = KINDS[model.block or "pre_norm"]
        x = layer(x, w, f"layers.{i}", i, model, positions, documents, drop, terms)
    if "transform.weight" in w:
        x = act(project(x, w, "transform"), model)
    return norm(x, w, "norm", model)


def loss_sum(scores, targets):
    """Sum of -log softmax(scores)[target] over targets that are not -100."""
    total = scores.new_zeros(())
    for row, target in zip(scores.flatten(0, 1), targets.flatten().tolist(), strict=True):
        if target != -100:
            total = total + row.exp().sum().log() - row[target]
    return total
