"""Bytes per token that this project's trainer keeps for latent attention and mixtures of experts.

They are what its storages were measured to hold for backward (docs/accuracy.md). For other
software, `activations` has a coarser estimate.
"""

from __future__ import annotations

from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Mla, Model, Moe, Parallel, Train
from orchestrator.plan.expert_capacity import taken_choices
from orchestrator.plan.expert_mesh import expert_mesh, fullest, tensor_ranks

#: Bytes of routing: per expert its score; per choice its expert and weight, the position of its
#: token, and order, position and weight of its copy on the sending rank; per copy that another rank
#: has sent, its position among the others and the way back, and the same again if it came by
#: domain.
SCORE = 4
CHOICE = 12
COPY = 24
ARRIVED = 16


def latent_attention(workload: Workload, mla: Mla) -> dict[str, float]:
    """Returns the bytes per token of latent attention, by tensor.

    These are latents as this rank makes them and as its heads read them; queries, keys, and values
    as wide as keys; the output as wide as keys, and once more if it is cut to the width of values.
    """
    model = workload.model
    parallel = workload.parallel
    heads, key = _heads(model, mla, parallel)
    read = (mla.q_lora_rank or model.hidden) + mla.kv_lora_rank + mla.qk_rope_head_dim
    features = {
        "latent inputs": model.hidden / _rows(parallel),
        "attention": _latents(mla, parallel) + read + 3 * heads * key,
        "attention output": heads * (key + mla.v_head_dim * (mla.v_head_dim != key)),
    }
    return {name: size * workload.width for name, size in features.items()}


def selective_latent_attention(workload: Workload, mla: Mla, fused: bool) -> float:
    """Returns the bytes per token that latent attention keeps with selective recomputation.

    These are results of matrix products and the output of fused attention. Products that read
    latents are left out if they are recomputed too.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    heads, key = _heads(model, mla, parallel)
    features = _latents(mla, parallel) + heads * key * fused
    if train.recompute_latents is not True:
        features += heads * (key + mla.qk_nope_head_dim + mla.v_head_dim)
    return features * workload.width


def experts(workload: Workload, moe: Moe, device: str) -> dict[str, float]:
    """Returns the bytes per token of a mixture of experts, by tensor.

    These are inputs of the router, of experts and of the last product of shared experts, and the
    numbers that routing needs. Shared experts keep the gathered sequence.

    A GPU's kernel for all experts at once has the choices' weights in the inputs of the last
    products, which are kept next to those without weights. If experts run one after another,
    unweighted results are kept if they are narrower.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    width = workload.width
    inner = 3 if model.mlp == "gated" else 2
    ffn = moe.ffn_hidden / tensor_ranks(parallel)
    copies = _copies(moe, parallel, train)
    of_copy = inner * ffn + model.hidden
    if device == "cuda" and train.precision == "bf16":
        of_copy += ffn
    elif model.hidden < ffn:
        of_copy += model.hidden
    rows = _rows(parallel)
    shared = moe.shared_ffn_hidden > 0
    # Routers compute in fp32.
    read = 4 if width < 4 else 0 if shared and rows == 1 and not moe.jitter else width
    hops = (
        0
        if expert_mesh(parallel).ep == 1
        else 2
        if parallel.expert_all_to_all == "hierarchical"
        else 1
    )
    numbers = (SCORE * moe.experts + CHOICE * moe.top_k) / rows + (COPY + ARRIVED * hops) * copies
    return {
        "router": read * model.hidden / rows + numbers,
        "shared input": model.hidden * width * shared,
        "experts": copies * fullest(parallel) * of_copy * width,
        "mlp": inner * moe.shared_ffn_hidden / parallel.tp * width,
    }


def results_of_experts(workload: Workload, moe: Moe, kept_later: float) -> float:
    """Returns the bytes per token of a recomputed layer with experts, beyond those that it keeps.

    These are results until each token sums its own, and the router's input in its own width.
    `kept_later` is the bytes per token that shared experts keep later, if no exchange lies between.

    Results that come back from other ranks are of this rank's own tokens. Without an exchange, a
    tensor-parallel rank has gathered those of all tokens, which only shared experts would keep.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    width = workload.width
    gathered = _rows(parallel) > 1 and not moe.shared_ffn_hidden
    if expert_mesh(parallel).ep > 1:
        rows_per_token = taken_choices(moe, train.seq_len) / _rows(parallel)
    else:
        rows_per_token = _copies(moe, parallel, train) * fullest(parallel) + gathered
    if width < 4 and not moe.shared_ffn_hidden:
        rows_per_token += 1 / _rows(parallel)
    later = kept_later if parallel.ep == parallel.tp == 1 else 0.0
    return max(0.0, rows_per_token * model.hidden * width - later)


def _copies(moe: Moe, parallel: Parallel, train: Train) -> float:
    """Returns the copies of a token on a rank if experts are chosen equally often."""
    return taken_choices(moe, train.seq_len) * tensor_ranks(parallel) / parallel.tp


def _heads(model: Model, mla: Mla, parallel: Parallel) -> tuple[float, int]:
    """Returns (heads of a rank, features of a key)."""
    return model.heads / parallel.tp, mla.qk_nope_head_dim + mla.qk_rope_head_dim


def _latents(mla: Mla, parallel: Parallel) -> float:
    """Returns the features of the latents that this rank makes per token."""
    return (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim) / _rows(parallel)


def _rows(parallel: Parallel) -> int:
    """Returns the number of ranks that share the sequence between tensor-parallel regions."""
    return parallel.tp if parallel.sp else 1
