"""Bytes a token that this project's trainer keeps for backward of latent attention and of a mixture
of experts.

They are what its storages were measured to hold (docs/accuracy.md). Of other software `activations`
knows less.
"""

from __future__ import annotations

from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Mla, Model, Moe, Parallel, Train
from orchestrator.plan.expert_capacity import taken_choices
from orchestrator.plan.expert_mesh import expert_mesh, fullest, tensor_ranks

#: Of an expert its score; of a choice its expert and weight, where its token is, and order, place
#: and weight of its copy, from where that is sent; of a copy that another rank has sent, its place
#: among the others and the way back, and the same again where it has come by domain.
SCORE = 4
CHOICE = 12
COPY = 24
ARRIVED = 16


def latent_attention(workload: Workload, mla: Mla) -> dict[str, float]:
    """Latents as this rank makes them, and as its heads read them; queries, keys, and values as
    wide as keys; the output as wide as keys, and again where it is cut to the width of values."""
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
    """The same with selective recomputation: results of matrix products, but of those that read
    latents where these run again too; and the output of fused attention."""
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    heads, key = _heads(model, mla, parallel)
    features = _latents(mla, parallel) + heads * key * fused
    if train.recompute_latents is not True:
        features += heads * (key + mla.qk_nope_head_dim + mla.v_head_dim)
    return features * workload.width


def experts(workload: Workload, moe: Moe, device: str) -> dict[str, float]:
    """Inputs of the router, of experts and of what shared experts multiply last; numbers that
    routing needs. Shared experts keep the gathered sequence.

    A GPU's kernel for all experts at once has the choices' weights in the last products' inputs,
    which are kept beside those without. Of experts one after another unweighted results are kept,
    where they are narrower.
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
    read = (
        4 if width < 4 else 0 if shared and rows == 1 and not moe.jitter else width
    )  # routers compute in fp32
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
    """What a layer with experts has, beyond what it keeps, when it is recomputed: results, until
    each token sums its own, and what routers have read, in its own width. kept_later: bytes per
    token that shared experts keep later, if no exchange lies between.

    Results that come back from other ranks are of this rank's own tokens. Without an exchange a
    tensor-parallel rank has gathered those of all, which only shared experts would keep.
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
    """Copies of a token on a rank, where experts are chosen equally often."""
    return taken_choices(moe, train.seq_len) * tensor_ranks(parallel) / parallel.tp


def _heads(model: Model, mla: Mla, parallel: Parallel) -> tuple[float, int]:
    """(heads of a rank, features of a key)."""
    return model.heads / parallel.tp, mla.qk_nope_head_dim + mla.qk_rope_head_dim


def _latents(mla: Mla, parallel: Parallel) -> float:
    return (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim) / _rows(parallel)


def _rows(parallel: Parallel) -> int:
    """Ranks that share the sequence between the regions of tensor parallelism."""
    return parallel.tp if parallel.sp else 1
