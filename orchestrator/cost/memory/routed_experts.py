"""What this project's trainer keeps of a mixture of experts in addition to its operations' inputs.

It is what its storages were measured to hold for backward (docs/accuracy.md).
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Moe
from orchestrator.plan.expert_capacity import taken_choices
from orchestrator.plan.expert_mesh import expert_mesh, fullest, tensor_ranks

from .kept_tensors import KeptTensor, copies_per_token
from .kernels import Kernels

#: Bytes of routing: per expert its score; per choice its expert and weight, the position of its
#: token, and order, position and weight of its copy on the sending rank; per copy that another rank
#: has sent, its position among the others and the way back, and the same again if it came by
#: domain.
SCORE = 4
CHOICE = 12
COPY = 24
ARRIVED = 16


def routing(workload: Workload, moe: Moe, kernels: Kernels) -> Iterator[KeptTensor]:
    """Yields the numbers that routing needs, and weighted tensors of experts.

    A GPU's kernel for all experts at once has the choices' weights in the inputs of the last
    products, which are kept next to those without weights, and so have products in 8 bits. If
    experts run one after another, unweighted results are kept if they are narrower.
    """
    model = workload.model
    parallel = workload.parallel
    copies = copies_per_token(workload, moe)
    hops = 0
    if expert_mesh(parallel).ep > 1:
        hops = 2 if parallel.expert_all_to_all == "hierarchical" else 1
    choices = (SCORE * moe.experts + CHOICE * moe.top_k) / workload.sequence_shards
    numbers = choices + (COPY + ARRIVED * hops) * copies
    yield KeptTensor("mlp", "routing", "routing", numbers)
    if workload.width < 4:
        # The router's weights are widened once per micro-batch, and the copy is kept.
        size = 4 * moe.experts * model.hidden / workload.tokens
        yield KeptTensor("mlp", "mlp.router, weights", "routing", size)
    ffn = moe.ffn_hidden / tensor_ranks(parallel)
    features = 0.0
    in_one_kernel = kernels.trainer == "cuda" and workload.train.precision == "bf16"
    if in_one_kernel or kernels.product_width:
        features = ffn
    elif model.hidden < ffn:
        features = model.hidden
    size = copies * fullest(parallel) * features * workload.width
    yield KeptTensor("mlp", "weighted tokens", "routing", size)


def results_of_experts(workload: Workload, moe: Moe, kept_later: float, kernels: Kernels) -> float:
    """Returns the bytes per token of a recomputed layer with experts, beyond those that it keeps.

    These are results until each token sums its own, and the router's input in its own width.
    `kept_later` is the bytes per token that shared experts keep later, if no exchange lies between.

    Results that come back from other ranks are of this rank's own tokens. Without an exchange, a
    tensor-parallel rank has gathered those of all tokens, which only shared experts would keep, and
    products in 8 bits have their inputs in full width, too.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    width = workload.width
    rows = workload.sequence_shards
    gathered = rows > 1 and not moe.shared_ffn_hidden
    inputs = 0.0
    if expert_mesh(parallel).ep > 1:
        rows_per_token = taken_choices(moe, train.seq_len) / rows
    else:
        copies = copies_per_token(workload, moe) * fullest(parallel)
        rows_per_token = copies + gathered
        if kernels.product_width:
            inputs = copies * moe.ffn_hidden / tensor_ranks(parallel)
            inputs += model.hidden * bool(moe.shared_ffn_hidden)
    if width < 4 and not moe.shared_ffn_hidden:
        rows_per_token += 1 / rows
    later = kept_later if parallel.ep == parallel.tp == 1 else 0.0
    return max(0.0, (rows_per_token * model.hidden + inputs) * width - later)
