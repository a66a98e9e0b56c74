"""Bytes on the fullest GPU by category: model states, activations, buffers.

States follow ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3) with the recipes of planning.md C2.
"""

from __future__ import annotations

from msgspec import Struct

from orchestrator.plan.document import Cluster, Memory, Model, Parallel, Train
from orchestrator.planner.cost.traffic import rank_parameters
from orchestrator.planner.model.layers import DTYPE_BYTES, layer_params, parameter_count, sample_layers
from orchestrator.planner.model.stages import rank_stages

from .activations import activations, kernels_of, loss_bytes


class StateBytes(Struct, frozen=True):
    """Bytes of weights, gradients and optimizer state."""

    params: float
    grads: float
    optimizer: float


def rank_state_bytes(dense: int, experts: int, parallel: Parallel, train: Train) -> StateBytes:
    """States of a rank that holds `dense` and `experts` parameters before data-parallel sharding.

    Weights in the training precision; gradients in `grad_dtype`, unsharded with ZeRO-0 and 1; AdamW's two moments in
    fp32, and an fp32 master copy where weights are narrower. Experts shard over cp * dp, all other weights over
    cp * ep * dp.
    """
    params = grads = optimizer = 0.0
    for count, replicas in ((dense, parallel.cp * parallel.ep * parallel.dp), (experts, parallel.cp * parallel.dp)):
        each = param_state_bytes(replicas, parallel, train)
        params += count * each.params
        grads += count * each.grads
        optimizer += count * each.optimizer
    return StateBytes(params, grads, optimizer)


def param_state_bytes(replicas: int, parallel: Parallel, train: Train) -> StateBytes:
    """States of one parameter that `replicas` ranks hold, on each of them."""
    weight: float = DTYPE_BYTES[train.precision]
    gradient = DTYPE_BYTES[train.grad_dtype]
    shards, master = min(replicas, parallel.zero_group or replicas), 0 if weight == 4 else 4
    if parallel.zero >= 3 and shards > 1:  # the shard is the master copy; gathered weights are narrow
        weight, master = (4 if master else weight) / shards, 0
    return StateBytes(
        params=weight,
        grads=gradient / (shards if parallel.zero >= 2 else 1),
        optimizer=(8 + master) / (shards if parallel.zero >= 1 else 1),
    )


#: Device context, communicators and workspaces of a GPU process; a CPU rank's share of memory does not include them.
CONTEXT_BYTES = {"cuda": 2 << 30, "cpu": 0}


def buffers(model: Model, parallel: Parallel, train: Train, device: str) -> float:
    """Bytes outside the model: device context and communicators, gathered sequences, temporary buffers of ZeRO."""
    width = DTYPE_BYTES[train.precision]
    hidden = parallel.micro_batch_size * train.seq_len / parallel.cp * model.hidden * width
    result = float(CONTEXT_BYTES[device])
    if parallel.tp > 1:
        result += 2 * hidden  # one gathered input and one partial sum
    return result + zero_buffers(model, parallel, train)


def zero_buffers(model: Model, parallel: Parallel, train: Train) -> float:
    """Bytes of unsharded weights and gradients that ZeRO holds temporarily.

    ZeRO-2: gradients of the bucket being filled and of two being reduced. ZeRO-3: weights of a layer and of the next,
    which is being gathered, of embedding and head, or of all layers in a pipeline; gradients of a layer and their copy
    that is being reduced.
    """
    if parallel.zero < 2:
        return 0.0
    weight, gradient = DTYPE_BYTES[train.precision], DTYPE_BYTES[train.grad_dtype]
    if parallel.zero == 2:
        return min(3 * parallel.bucket_bytes, 2 * _unsharded_params(model, parallel) * gradient)
    kinds = [layer_params(model, layer) for layer in sample_layers(model) if layer is not None]
    tp, ep = parallel.tp, parallel.ep
    block = max((one.attention + one.ffn) / tp + one.replicated + one.experts / (tp * ep) for one in kinds)
    tables = model.vocab * model.hidden / tp * (1 if model.tied_embeddings else 2)
    gathered = _unsharded_params(model, parallel) if parallel.pp > 1 else 2 * block + tables
    return gathered * weight + 2 * block * gradient


def _unsharded_params(model: Model, parallel: Parallel) -> float:
    """Parameters of an average rank before data-parallel sharding."""
    return (model.parameters or parameter_count(model)) / (parallel.tp * parallel.pp)


def memory_by_pp_rank(cluster: Cluster, model: Model, parallel: Parallel, train: Train) -> list[Memory]:
    """Memory of a GPU of each pipeline rank, whose number is in `worst_rank` (the caller maps it to a rank)."""
    buffer_bytes = buffers(model, parallel, train, cluster.device)
    loss, last, result = loss_bytes(model, parallel, train), len(parallel.stage_layers) - 1, []
    held = activations(model, parallel, train, kernels_of(cluster, model, parallel))
    ranks = zip(rank_parameters(model, parallel), held, rank_stages(parallel), strict=True)
    for pp_rank, (parameters, kept, stages) in enumerate(ranks):
        states = rank_state_bytes(*parameters, parallel, train)
        sizes = {"params": states.params, "grads": states.grads, "optimizer": states.optimizer, "activations": kept}
        sizes["buffers"] = buffer_bytes + (loss if last in stages else 0.0)
        parts = {name: round(size) for name, size in sizes.items()}
        total, capacity = sum(parts.values()), cluster.gpu.memory_bytes
        result.append(Memory(**parts, total=total, capacity=capacity, worst_rank=pp_rank))
    return result
