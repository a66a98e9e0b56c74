"""Naive twin of the mixture of experts and of latent attention: token by token, expert by expert,
head by head.

Written from the papers (DeepSeek-V3, arXiv 2412.19437, sections 2.1.1 and 2.1.2), not from the code
under test. Tensors are taken apart by `unbind`, once: the backward of every `x[i]` would fill a
tensor as large as x with zeros.
"""

import cmath
import math

import torch

from . import transformer as dense


def choose(scores, bias, moe):
    """The experts of one token, best first: `scores` a list of floats."""
    value = [score + (bias[e] if bias is not None else 0.0) for e, score in enumerate(scores)]
    size = moe.experts // moe.groups
    groups = []
    for g in range(moe.groups):
        group_scores = sorted(value[g * size : (g + 1) * size], reverse=True)
        groups.append((-sum(group_scores[: 2 if moe.score == "sigmoid" else 1]), g))
    open_groups = {g for _, g in sorted(groups)[: moe.top_groups]}
    legal = [(-value[e], e) for e in range(moe.experts) if e // size in open_groups]
    return [e for _, e in sorted(legal)[: moe.top_k]]


def mixture(x, w, name, model, terms, bias=None):
    """x [b, s, hidden] -> the same: the sum over each token's experts of weight * expert(token),
    and shared experts.

    Adds the layer's balance of each sequence and its z-loss to `terms`, as means over sequences and
    over tokens.
    """
    rows = []
    for sequence in x:
        rows.append(_of_sequence(sequence, w, name, model, terms, bias, len(x)))
    routed = torch.stack(rows)
    return (
        routed + dense.mlp(x, w, f"{name}.shared", model) if model.moe.shared_ffn_hidden else routed
    )


def _of_sequence(x, w, name, model, terms, bias, sequences):
    moe = model.moe
    rows = []
    length = len(x)
    ups = w[f"{name}.experts.up.weight"].unbind()
    downs = w[f"{name}.experts.down.weight"].unbind()
    gates = w[f"{name}.experts.gate.weight"].unbind() if model.mlp == "gated" else ()
    chosen_often = [0] * moe.experts
    mean_score = 0.0
    factor = moe.capacity_factor or math.inf
    capacity = (
        math.ceil(round(factor * moe.top_k * length / moe.experts, 9))
        if factor < math.inf
        else length
    )
    for token in x:
        logits = w[f"{name}.router.weight"] @ token
        raw = (
            logits.exp() / logits.exp().sum()
            if moe.score == "softmax"
            else 1 / (1 + (-logits).exp())
        )
        chosen = choose(raw.tolist(), bias, moe)
        total = sum(raw[e] for e in chosen) if moe.norm_topk else 1.0
        out = torch.zeros_like(token)
        for e in chosen:
            chosen_often[e] += 1
            if chosen_often[e] > capacity:  # the expert takes no more of this sequence
                continue
            up = ups[e] @ token
            inner = dense.act(gates[e] @ token, model) * up if gates else dense.act(up, model)
            out = out + moe.routed_scale * raw[e] / total * (downs[e] @ inner)
        rows.append(out)
        mean_score = mean_score + raw / raw.sum() / length
        z = moe.z_loss * logits.exp().sum().log() ** 2 / (sequences * length)
        terms["router_z"] = terms.get("router_z", 0.0) + z
    share = torch.tensor(chosen_often, dtype=x.dtype) * moe.experts / (moe.top_k * length)
    terms["expert_balance"] = (
        terms.get("expert_balance", 0.0) + moe.balance_loss * share @ mean_score / sequences
    )
    return torch.stack(rows)


def turn(x, position, model):
    """A head's rotary part [d]: dimension i with i + d/2, as YaRN stretches the angles (arXiv
    2309.00071)."""
    d = x.shape[-1]
    theta = model.rope_theta
    yarn = model.yarn
    components = x.unbind()
    out = [None] * d
    for i in range(d // 2):
        speed = theta ** (-2 * i / d)
        if yarn:

            def edge(turns):
                return (
                    d
                    * math.log(yarn.original_seq_len / (turns * 2 * math.pi))
                    / (2 * math.log(theta))
                )

            low = max(0, math.floor(edge(yarn.beta_fast)))
            high = min(d - 1, math.ceil(edge(yarn.beta_slow)))
            slow = min(1.0, max(0.0, (i - low) / max(high - low, 0.001)))
            speed = slow * speed / yarn.factor + (1 - slow) * speed
        z = cmath.exp(1j * position * speed)
        out[i] = components[i] * z.real - components[i + d // 2] * z.imag
        out[i + d // 2] = components[i + d // 2] * z.real + components[i] * z.imag
    return torch.stack(out)


def latent_attention(x, w, name, model, positions, documents):
    mla = model.mla
    nope = mla.qk_nope_head_dim
    rope = mla.qk_rope_head_dim
    wide = mla.v_head_dim

    def rms(y, which):
        return (
            y
            / (y.square().mean(-1, keepdim=True) + model.norm_eps).sqrt()
            * w[f"{name}.{which}.weight"]
        )

    down = rms(dense.project(x, w, f"{name}.q_down"), "q_norm") if mla.q_lora_rank else x
    queries = dense.project(down, w, f"{name}.wq")
    both = dense.project(x, w, f"{name}.kv_down")
    values = dense.project(rms(both[..., : mla.kv_lora_rank], "kv_norm"), w, f"{name}.wkv")
    scale = (nope + rope) ** -0.5
    if model.yarn:
        scale *= (0.1 * model.yarn.mscale_all_dim * math.log(model.yarn.factor) + 1) ** 2
    rows = []
    for b in range(x.shape[0]):
        row_positions = positions[b].tolist()
        shared = [
            turn(row[mla.kv_lora_rank :], position, model)
            for row, position in zip(both[b], row_positions, strict=True)
        ]
        heads_of_queries = [
            row.unbind() for row in queries[b].view(len(row_positions), model.heads, nope + rope)
        ]
        keys = []
        contents = []  # by token, then by head
        for row, rotary in zip(
            values[b].view(len(row_positions), model.heads, nope + wide), shared, strict=True
        ):
            keys.append([torch.cat((head[:nope], rotary)) for head in row])
            contents.append([head[nope:] for head in row])
        for i, position in enumerate(row_positions):
            seen = [
                j for j in range(i + 1) if documents is None or documents[b, j] == documents[b, i]
            ]
            heads = []
            for h, query in enumerate(heads_of_queries[i]):
                q = torch.cat((query[:nope], turn(query[nope:], position, model)))
                score = torch.stack([keys[j][h] for j in seen]) @ q * scale
                share = score.exp() / score.exp().sum()
                heads.append(share @ torch.stack([contents[j][h] for j in seen]))
            rows.append(torch.cat(heads))
    return dense.output(torch.stack(rows).view(*x.shape[:2], -1), w, name, "wo")
