"""Bytes on the fullest GPU by category: model states, activations, buffers.

States follow ZeRO (Rajbhandari et al., arXiv 1910.02054, section 3) with the recipes of planning.md
C2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct, structs

from orchestrator.cost.buckets import unsharded_params
from orchestrator.cost.model.layers import DTYPE_BYTES
from orchestrator.cost.model.stages import (
    rank_matrices,
    rank_parameters,
    rank_stages,
    rank_vectors,
)
from orchestrator.cost.time.traffic import shard_ranks
from orchestrator.cost.workload import Workload
from orchestrator.plan.document import Cluster, Memory, Parallel, Train
from orchestrator.plan.expert_mesh import expert_mesh, spread
from orchestrator.plan.offload import (
    STATE_KINDS,
    buffer_size,
    comm_buffer_of,
    keeps_shards_away,
    offload_of,
    state_width,
)
from orchestrator.plan.schedules import copies_of, splits_backward

from .activations import activations, kept_of_one_stage
from .communicators import communicator_bytes
from .moments import Peak, peak_of_one_stage, whole_layer
from .offloaded_inputs import offloaded_inputs
from .recipe import CONTEXT_BYTES, GIB, ORCH, Kind, Recipe, kernels_of
from .sharded_pipeline import Temporaries, peak_of_sharded_rank

#: Buffers of `train.comm_buffer_mib` that ZeRO-2 keeps: two on their way, one for weights and one
#: for vectors, which have no weight decay.
CONSTANT_BUFFERS = 4


class StateBytes(Struct, frozen=True):
    """Bytes of weights, gradients and optimizer state."""

    params: float
    grads: float
    optimizer: float
    host: float = 0.0  # bytes offloaded to the host's memory
    disk: float = 0.0  # bytes offloaded to the host's disk

    @property
    def on_device(self) -> float:
        """Bytes of all states on the device."""
        return self.params + self.grads + self.optimizer


def rank_state_bytes(
    dense: float,
    experts: float,
    parallel: Parallel,
    train: Train,
    recipe: Recipe = ORCH,
    vectors: float = 0.0,
    matrices: float = 0.0,
) -> StateBytes:
    """Returns the states of a rank with `dense` and `experts` parameters before sharding.

    `vectors` of the dense parameters are in norms and biases, `matrices` are in matrices of blocks.
    Weights have the training precision. Gradients have `grad_dtype` or the recipe's width, and are
    unsharded with ZeRO-0 and 1. Moments are in fp32 (fp64 with fp64 weights), with an fp32 master
    copy if weights are narrower. Experts shard over cp * dp, all other weights over cp * ep * dp;
    if a pipeline holds the model twice, over both copies.
    """
    params = 0.0
    grads = 0.0
    optimizer = 0.0
    host = 0.0
    disk = 0.0
    copies = copies_of(parallel)
    dense_replicas = copies * parallel.cp * parallel.ep * parallel.dp
    expert_replicas = copies * expert_mesh(parallel).edp
    # A group of shards holds an expert on fewer ranks than other weights.
    expert_group = parallel.zero_group // spread(parallel)
    for count, replicas, group in (
        (dense, dense_replicas, parallel.zero_group),
        (experts, expert_replicas, expert_group),
    ):
        per_parameter = param_state_bytes(replicas, parallel, train, recipe, group=group)
        params += count * per_parameter.params
        grads += count * per_parameter.grads
        optimizer += count * per_parameter.optimizer
        host += count * per_parameter.host
        disk += count * per_parameter.disk
    if recipe.wide_vectors:
        wide = structs.replace(recipe, moment=None)
        narrow_state = param_state_bytes(dense_replicas, parallel, train, recipe)
        wide_state = param_state_bytes(dense_replicas, parallel, train, wide)
        optimizer += vectors * (wide_state.optimizer - narrow_state.optimizer)
        host += vectors * (wide_state.host - narrow_state.host)
    if recipe.whole_matrices:  # have one moment fewer; on the device that is an upper limit
        fewer = structs.replace(recipe, moments=recipe.moments - 1)
        of_others = param_state_bytes(dense_replicas, parallel, train, recipe).host
        of_matrix = param_state_bytes(dense_replicas, parallel, train, fewer).host
        host -= matrices * (of_others - of_matrix)
    return StateBytes(params, grads, optimizer, host, disk)


def param_state_bytes(
    replicas: int,
    parallel: Parallel,
    train: Train,
    recipe: Recipe = ORCH,
    *,
    group: int | None = None,
) -> StateBytes:
    """Returns the states of one parameter that `replicas` ranks hold, on each of them. `group` of
    these share them, 0: all (None: `parallel.zero_group`)."""
    size = parallel.zero_group if group is None else group
    shards = min(replicas, size or replicas)
    optimizer_shards = shards if parallel.zero >= 1 else 1
    gradient_shards = shards if parallel.zero >= 2 else 1
    offload = offload_of(train)
    moment = recipe.moment or max(DTYPE_BYTES[train.precision], 4)
    weight, master = _weight_bytes(shards, parallel, train, recipe)
    if not recipe.trained:
        return StateBytes(weight, 0.0, 0.0)
    gradient = gradient_bytes(train, recipe)
    # with a single micro-batch, autograd makes gradients only as activations are freed
    if parallel.micro_batches > 1:
        gradient += recipe.more_gradient
    if offload.optimizer:
        # Master weights are a separate copy, even of weights that are as wide.
        master = state_width(train.precision)
    state = (recipe.moments * moment + master + recipe.more_optimizer) / optimizer_shards
    gradient_share = gradient / gradient_shards
    if offload.optimizer == "host":
        host_gradient = gradient / optimizer_shards * (1 + offload.delayed)
        if keeps_shards_away(offload, parallel):
            return StateBytes(0.0, 0.0, 0.0, host=state + host_gradient + weight)
        by_bucket = parallel.zero == 2 or gathers_by_step(parallel, recipe)
        passes_through = by_bucket and shards > 1
        device_gradient = 0.0 if passes_through else gradient_share
        return StateBytes(weight, device_gradient, 0.0, host=state + host_gradient)
    if offload.optimizer and offload.weights:
        return StateBytes(0.0, 0.0, 0.0, disk=state + weight + gradient_share)
    if offload.optimizer:  # gradients stay on the device
        return StateBytes(weight, gradient_share, 0.0, disk=state)
    more_bf16 = recipe.more_bf16 if train.precision == "bf16" else 0.0
    return StateBytes(weight + more_bf16, gradient_share, state)


def _weight_bytes(
    shards: int,
    parallel: Parallel,
    train: Train,
    recipe: Recipe,
) -> tuple[float, int]:
    """Returns the bytes of a weight in which ranks compute, and of its separate master copy before
    sharding."""
    weight: float = DTYPE_BYTES[train.precision]
    master = 0 if weight >= 4 else 4
    if parallel.zero < 3 or shard_ranks(parallel) == 1:
        return weight, master
    # The shard is the master copy, unless that is elsewhere or weights are gathered by step: also
    # of an expert with one holder, whose shard is all of it.
    by_step = gathers_by_step(parallel, recipe)
    if recipe.own_master or offload_of(train).optimizer or by_step:
        return weight / shards, master
    return (master or weight) / shards, 0


def gradient_bytes(train: Train, recipe: Recipe) -> float:
    """Returns the bytes of an accumulated gradient."""
    return DTYPE_BYTES[train.grad_dtype] if recipe.gradient is None else recipe.gradient


def buffers(
    workload: Workload,
    cluster: Cluster,
    recipe: Recipe = ORCH,
) -> float:
    """Returns the bytes outside the model: lasting buffers, and temporary buffers of ZeRO."""
    return lasting_buffers(workload, cluster, recipe) + zero_buffers(workload, recipe)


def lasting_buffers(
    workload: Workload,
    cluster: Cluster,
    recipe: Recipe = ORCH,
) -> float:
    """Returns the bytes of device context and communicators, of gathered sequences, and of constant
    buffers."""
    constant = constant_buffers(workload)
    return _gathered_bytes(workload) + constant + own_context(workload, cluster, recipe)


def least_lasting_buffers(
    workload: Workload,
    cluster: Cluster,
    recipe: Recipe = ORCH,
) -> float:
    """Returns a lower bound of `lasting_buffers`, whatever the schedule, the method of context
    parallelism and the exchange of expert tokens: without communicators, which depend on them."""
    context = 0.0 if recipe.context is not None else CONTEXT_BYTES[cluster.device]
    return _gathered_bytes(workload) + context


def constant_buffers(workload: Workload) -> float:
    """Returns the bytes of the buffers that ZeRO-2 keeps for its messages, whatever the model."""
    bound = comm_buffer_of(workload.train)
    shards = workload.parallel.zero == 2 and shard_ranks(workload.parallel) > 1
    return float(CONSTANT_BUFFERS * bound) if bound is not None and shards else 0.0


def _gathered_bytes(workload: Workload) -> float:
    """Returns the bytes of one gathered input and one partial sum of tensor parallelism."""
    return 2 * workload.hidden_bytes if workload.parallel.tp > 1 else 0.0


def own_context(
    workload: Workload,
    cluster: Cluster,
    recipe: Recipe = ORCH,
) -> float:
    """Returns the bytes of device context and communicators that are among the buffers.

    A recipe of other software adds its own to the bytes of tensors.
    """
    if recipe.context is not None:
        return 0.0
    return CONTEXT_BYTES[cluster.device] + communicator_bytes(workload, cluster)


def is_one_stage(parallel: Parallel, recipe: Recipe) -> bool:
    """Reports whether the peak is the highest of a step's moments (`moments.py`).

    Otherwise it is the sum of all bytes that may occur.
    """
    return recipe.name == ORCH.name and parallel.pp == 1 and parallel.schedule == "1f1b"


def is_sharded_pipeline(parallel: Parallel, recipe: Recipe) -> bool:
    """Reports whether a pipeline rank's peak is its highest moment (`sharded_pipeline.py`)."""
    sharded = parallel.zero >= 3 and parallel.pp > 1 and not splits_backward(parallel)
    return recipe.name == ORCH.name and sharded


def gathers_by_step(parallel: Parallel, recipe: Recipe) -> bool:
    """Reports whether ZeRO-3 gathers the buckets of ZeRO-2 when a step starts, and frees them when
    it ends: what this project's trainer does if backward is split."""
    sharded = parallel.zero >= 3 and shard_ranks(parallel) > 1
    return recipe.name == ORCH.name and sharded and splits_backward(parallel)


def step_weights(
    workload: Workload,
    parameters: tuple[float, float],
    recipe: Recipe = ORCH,
) -> float:
    """Returns the bytes of weights that are gathered by step, of a rank with these (dense, expert)
    parameters. An expert that only one rank holds is not gathered."""
    parallel = workload.parallel
    if not gathers_by_step(parallel, recipe):
        return 0.0
    dense, experts = parameters
    if expert_mesh(parallel).edp == 1 or parallel.zero_group == spread(parallel):
        experts = 0
    return (dense + experts) * workload.width


def zero_buffers(workload: Workload, recipe: Recipe = ORCH) -> float:
    """Returns the bytes of unsharded weights and gradients that ZeRO holds temporarily.

    ZeRO-2: gradients of the bucket that is being filled and of two that are being reduced, unless
    it keeps constant buffers for them; the same for ZeRO-3 that gathers by step, beside
    `step_weights`. ZeRO-3: weights of a layer and of the next one, which is being gathered, and of
    embedding and head, or of all layers in a pipeline; gradients of a layer and their copy that is
    being reduced. A narrow wire has buffers of its own.
    """
    model = workload.model
    parallel = workload.parallel
    train = workload.train
    weight = workload.width
    gradient = gradient_bytes(train, recipe)
    wire = wire_buffers(workload)
    if parallel.zero < 2 and not (parallel.zero and recipe.buckets):
        return wire
    if constant_buffers(workload):
        return wire
    filled: float = parallel.bucket_bytes
    if gathers_by_step(parallel, recipe):  # a token table has a bucket of its own
        filled = max(filled, model.vocab * model.hidden / parallel.tp * gradient)
    buckets = min(
        recipe.buckets or filled + 2 * parallel.bucket_bytes,
        2 * unsharded_params(model, parallel) * gradient,
    )
    if parallel.zero < 3 or gathers_by_step(parallel, recipe):
        return buckets + wire
    block = whole_layer(model, parallel)
    tables = model.vocab * model.hidden / parallel.tp * (1 if model.tied_embeddings else 2)
    if recipe.by_matrix:
        block = max(model.hidden * model.ffn_hidden, model.vocab * model.hidden) / parallel.tp
        tables = 0.0
    gathered = unsharded_params(model, parallel) if parallel.pp > 1 else 2 * block + tables
    summed = gathered if parallel.pp > 1 and recipe.whole_gradients else 2 * block
    return gathered * weight + summed * gradient + (buckets if recipe.buckets else 0.0)


def wire_buffers(workload: Workload) -> float:
    """Returns the bytes of gradients that are sent and received in `train.grad_wire`: those of two
    buckets with ZeRO-1, of three with ZeRO-2."""
    parallel = workload.parallel
    shards = shard_ranks(parallel) * copies_of(parallel)
    if not workload.train.grad_wire or shards == 1:
        return 0.0
    numbers = unsharded_params(workload.model, parallel)
    of_bucket = parallel.bucket_bytes / workload.gradient_width
    in_flight = min(numbers, (2 if parallel.zero == 1 else 3) * of_bucket)
    return 2 * in_flight * workload.wire_width


def memory_by_pp_rank(
    workload: Workload,
    cluster: Cluster,
    recipe: Recipe = ORCH,
    matmul: str = "",
) -> list[Memory]:
    """Returns the memory of one GPU of each pipeline rank.

    `worst_rank` holds the pipeline rank, which the caller maps to a rank. `matmul` is the same as
    `Job.matmul`. `total` is the bytes that the process takes of the card; for this project's
    trainer, without holes between tensors. `capacity` is the bytes that it can take.
    """
    parallel = workload.parallel
    kernels = kernels_of(recipe, cluster, workload.model, parallel, matmul)
    temporaries = Temporaries.of(workload, kernels)
    one_stage = kept_of_one_stage(workload, kernels) if is_one_stage(parallel, recipe) else None
    peak_activations = activations(workload, kernels) if one_stage is None else [one_stage.peak]
    lasting = lasting_buffers(workload, cluster, recipe)
    zero = zero_buffers(workload, recipe)
    of_all_ranks = _account_of_all_ranks(workload, cluster, recipe)
    accounts = []
    for pp_rank, (parameters, activation_bytes, stages, offloaded) in enumerate(
        zip(
            rank_parameters(workload.model, parallel),
            peak_activations,
            rank_stages(parallel),
            offloaded_inputs(workload),
            strict=True,
        )
    ):
        states = _states_of_rank(workload, recipe, parameters, stages)
        whole_step_buffers = lasting
        if one_stage is not None:
            backward = temporaries.layer + (zero if parallel.zero < 3 else 0.0)
            peak = peak_of_one_stage(
                workload,
                one_stage,
                states.grads,
                temporaries.loss,
                backward,
            )
        elif is_sharded_pipeline(parallel, recipe):
            whole_step_buffers += sum(parameters) * workload.width  # gathered weights
            peak = peak_of_sharded_rank(
                workload,
                kernels,
                pp_rank,
                activation_bytes,
                temporaries,
                grads=states.grads,
            )
        else:
            whole_step_buffers += zero + step_weights(workload, parameters, recipe)
            peak = _peak_of_sums(parallel, stages, temporaries)
        peak = peak._replace(buffers=whole_step_buffers + peak.buffers)
        accounts.append(
            Memory(
                **_device_account(states, activation_bytes, peak, recipe),
                **_outside_account(workload.train, states, offloaded),
                **of_all_ranks,
                worst_rank=pp_rank,
            )
        )
    return accounts


def _peak_of_sums(
    parallel: Parallel,
    stages: Sequence[int],
    temporaries: Temporaries,
) -> Peak:
    """Returns the peak of a rank with `stages` whose bytes of all moments are added."""
    has_loss = len(parallel.stage_layers) - 1 in stages
    loss = temporaries.loss if has_loss else 0.0
    return Peak(buffers=max(loss, temporaries.layer), apart=0.0)


def _states_of_rank(
    workload: Workload,
    recipe: Recipe,
    parameters: tuple[int, int],
    stages: Sequence[int],
) -> StateBytes:
    """Returns the states of a pipeline rank with these (dense, expert) parameters and stages."""
    parallel = workload.parallel
    model = workload.model
    vectors = rank_vectors(model, parallel, stages) if recipe.wide_vectors else 0
    matrices = rank_matrices(model, parallel, stages) if recipe.whole_matrices else 0
    return rank_state_bytes(
        *parameters,
        parallel=parallel,
        train=workload.train,
        recipe=recipe,
        vectors=vectors,
        matrices=matrices,
    )


def _device_account(
    states: StateBytes,
    activation_bytes: float,
    peak: Peak,
    recipe: Recipe,
) -> dict[str, int]:
    """Returns the categories of a rank's `Memory` on the device with their total, in whole bytes.

    The buffers contain what the process takes of the card beyond its tensors.
    """
    sizes = {
        "params": states.params,
        "grads": states.grads,
        "optimizer": states.optimizer,
        "activations": activation_bytes,
        "buffers": peak.buffers,
    }
    tensors = sum(sizes.values())
    sizes["buffers"] += recipe.process_bytes(tensors) - tensors
    account = {name: round(size) for name, size in sizes.items()}
    apart = round(peak.apart)
    return account | {"apart": apart, "total": sum(account.values()) - apart}


def _outside_account(
    train: Train,
    states: StateBytes,
    offloaded: tuple[float, float],
) -> dict[str, int]:
    """Returns the bytes in the host's memory and on its disk.

    `offloaded` is the rank's result of `offloaded_inputs`.
    """
    inputs_host, inputs_disk = offloaded
    host = states.host
    if states.disk:
        buffer_bytes = offload_of(train).buffer_bytes
        host = buffer_size(buffer_bytes, STATE_KINDS, state_width(train.precision))
    return {"host": round(host + inputs_host), "disk": round(states.disk + inputs_disk)}


def _account_of_all_ranks(workload: Workload, cluster: Cluster, recipe: Recipe) -> dict[str, Any]:
    """Returns what the `Memory` of every rank says of the device."""
    return {
        "capacity": recipe.capacity(cluster),
        "sd": recipe.account_sd(cluster),
        "context": round(recipe.context or own_context(workload, cluster, recipe)),
    }


def context_bytes(memory: Memory, device: str) -> int:
    """Returns the bytes of the device's own software in an account of this project's trainer.

    They are among the buffers and belong to no tensor. Plans of before 0.2 do not name them.
    """
    if device == "cpu":
        return 0
    return memory.context or min(2 * GIB, memory.buffers)


def as_measured(memory: Memory, kind: Kind, recipe: Recipe) -> float:
    """Returns the bytes that a measurement of this kind shows of an account."""
    if recipe.context is None:  # This is this project's trainer.
        return float(
            memory.total if kind == "process" else memory.total - context_bytes(memory, "cuda")
        )
    tensors = recipe.tensor_bytes(memory.total)
    allocated = tensors + recipe.workspace
    return {
        "model": tensors,
        "allocated": allocated,
        "reserved": allocated * recipe.fragmentation,
        "process": float(memory.total),
    }[kind]
