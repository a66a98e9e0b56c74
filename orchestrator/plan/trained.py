"""The rules for legal layouts that the bundled trainer runs. `supported` defines rules and
cases."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import UnsetType

from . import hierarchy
from .document import GradWire, Plan
from .domains import cut
from .expert_mesh import expert_mesh, spread
from .layer import KINDS, POST_NORM, PRE_NORM, layer_kind
from .offload import comm_buffer_of, offload_of
from .schedules import TABLE, WHOLE_BACKWARD, copies, read_rows, schedule_of
from .supported import FIXED_BATCH, LAYOUT, Case, Rule, broken

NOT_RUN = "the bundled trainer does not run this plan"  # the beginning of every such refusal


def _expert_parallel(case: Case) -> str | None:
    """The ranks that hold the same experts shard them among themselves, so each group of ZeRO has
    whole sets of experts."""
    return expert_sharding(case.zero, spread(case), case.zero_group)


def expert_sharding(zero: int, ep: int, group: int) -> str | None:
    """The ranks that hold the same experts shard them, or those in each zero_group do."""
    if ep > 1 and zero and group % ep:
        return f"ep={ep} does not divide zero_group={group}, whose ranks then hold unlike experts"
    return None


def _biases(case: Case) -> str | None:
    """Experts and latent attention have no biases in the models that the trainer implements."""
    if not case.model.bias:
        return None
    if case.model.moe:
        return f"model {case.model.name}: the trainer's experts do not have biases"
    if case.model.mla:
        return f"model {case.model.name}: the trainer's latent attention does not have biases"
    return None


#: Recipes of scaling that the trainer runs.
FP8 = ("fp8_tensor", "fp8_delayed", "fp8_block")


def _matmul(case: Case) -> str | None:
    """Products in 8 bits have a kernel on GPUs with one scale per tensor, and not for experts; with
    fp16's loss scaling they have not been compared with one process."""
    name = f"train.matmul={case.matmul}"
    if not case.matmul:
        return None
    if case.matmul not in FP8:
        return f"{name}: the trainer does not run it yet; legal: {', '.join(FP8)}"
    if case.cluster.device == "cuda" and case.matmul == "fp8_block":
        return (
            f"{name}: the trainer has blocks on CPUs only, as an emulation; legal: fp8_tensor,"
            " fp8_delayed"
        )
    if case.cluster.device == "cuda" and case.model.moe:
        return f"{name}: the trainer's experts have 8 bits on CPUs only, as an emulation"
    if case.precision == "fp16":
        return f"{name} with train.precision=fp16: bf16, fp32 or fp64"
    return None


MIB = 1 << 20
WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
#: Elements of a row that share one scale, for optimizer state in 8 bits.
STATE_BLOCK = 64


def _optim_state(case: Case) -> str | None:
    """A block of 64 elements in 8 bits has one scale, so no rank may hold a part of it."""
    if case.optim_state != "8bit":
        return None
    model = case.model
    tp = case.tp
    latent = case.model.mla
    head = latent.v_head_dim if latent else model.head_dim
    sizes = {
        "model.hidden": (model.hidden, 1),
        "heads * head_dim of model": (model.heads * head, tp),
    }
    sizes["model.ffn_hidden"] = model.ffn_hidden, tp
    if latent:
        ranks = {"q_lora_rank": latent.q_lora_rank, "kv_lora_rank": latent.kv_lora_rank}
        sizes |= {f"model.mla.{name}": (size, 1) for name, size in ranks.items()}
    if model.moe:
        sizes["model.moe.ffn_hidden"] = model.moe.ffn_hidden, expert_mesh(case).etp
        sizes["model.moe.shared_ffn_hidden"] = model.moe.shared_ffn_hidden, tp
    for name, (size, degree) in sizes.items():
        if size % (degree * STATE_BLOCK):
            return (
                f"optim.state=8bit: {name}={size} must be a multiple of {degree * STATE_BLOCK}, or"
                f" blocks of {STATE_BLOCK} are cut; optim.state=bf16 has none"
            )
    return None


#: Elements to which the trainer pads the shard of a bucket, and the bucket.
SHARD_ALIGN = 16
BUCKET_ALIGN = 64


def _comm_buffer(case: Case) -> str | None:
    """ZeRO-3 gathers whole layers or stages, which no bound on buckets limits, and a bucket holds
    at least one aligned shard for every replica."""
    if not case.comm_buffer_bytes:
        return None
    key = f"train.comm_buffer_mib={case.comm_buffer_bytes / MIB:g}"
    replicas = case.cp * case.ep * case.dp
    if case.zero == 3 and replicas > 1:
        return f"{key} with zero=3, which gathers whole layers; legal: zero=0 to 2"
    align = STATE_BLOCK if case.optim_state == "8bit" else SHARD_ALIGN
    width = max(WIDTHS[case.precision], WIDTHS[case.grad_dtype])
    least = math.lcm(BUCKET_ALIGN, replicas * align) * width
    if case.comm_buffer_bytes < least:
        return (
            f"{key} is too small for shards of {replicas} replicas; legal: from"
            f" {math.ceil(least / MIB * 1e4) / 1e4:g}"
        )
    return None


def _offload_weights(case: Case) -> str | None:
    """ZeRO-3 gathers weights from the host, so its shards may be there. Other stages compute with
    weights where they are, which on CPUs may be mapped pages of a disk. A GPU cannot copy from
    mapped pages."""
    if not case.offload_weights:
        return None
    key = f"train.offload_weights=true with train.offload={case.offload}"
    replicas = case.cp * case.ep * case.dp
    shards = case.zero_group or replicas
    gathers = case.zero == 3 and shards > 1
    if case.offload == "host" and not gathers:
        return (
            f"{key}: only ZeRO-3 over several ranks brings weights from the host; legal: zero=3"
            " with dp, cp or ep above 1, and no zero_group of 1"
        )
    if case.offload == "disk" and case.cluster.device == "cuda":
        return (
            f"{key} on GPUs, which cannot copy from mapped pages, since these are not page-locked;"
            " legal: train.offload=host with zero=3"
        )
    if gathers and _splits_backward(case):
        return (
            f"{key} and schedule {case.schedule_name}, for which ZeRO-3 gathers from the device;"
            f" legal schedules: {', '.join(WHOLE_BACKWARD)}"
        )
    if gathers and shards == spread(case) > 1:
        return (
            f"{key}: each expert is on one rank alone, which gathers nothing; legal: a larger dp"
            " (and zero_group), or zero=2 on a disk of CPUs"
        )
    return None


def _splits_backward(case: Case) -> bool:
    """Whether the schedule computes gradients of inputs before those of weights."""
    if case.schedule_name == TABLE and case.schedule_rows:
        return read_rows(case.schedule_rows).splits_backward
    return case.schedule_name not in WHOLE_BACKWARD


def _grad_dtype(case: Case) -> str | None:
    """Gradients narrower than fp32 weights lose digits and save nothing, and fp16 overflows in
    sums; fp64 is for weights and gradients together."""
    wide = case.precision in ("fp32", "fp64")
    legal = (case.precision,) if wide else ("fp32", "bf16")
    if case.grad_dtype in legal:
        return None
    name = f"train.grad_dtype={case.grad_dtype} with {case.precision}"
    return f"{name}: legal is {' or '.join(legal)}"


def _grad_wire(case: Case) -> str | None:
    """Narrow gradients travel to the rank that sums them, in the format of the weights if that is
    narrow too: fp16 needs its loss scale."""
    wire = case.grad_wire
    key = f"train.grad_wire={wire}"
    if not wire:
        return None
    legal = "fp16" if case.precision == "fp16" else "bf16"
    if case.precision == "fp64" or wire != legal:
        lasting = "bf16, fp32 or fp16" if case.precision == "fp64" else case.precision
        return f"{key} with train.precision={case.precision}: legal is {legal} with {lasting}"
    if case.grad_dtype != "fp32":
        return f"{key} with train.grad_dtype={case.grad_dtype}: legal is fp32, in which ranks sum"
    shards = case.cp * case.ep * case.dp * copies(case.schedule_name, case.pp, case.vpp)
    return wire_sharding(wire, case.zero, shards)


def wire_sharding(wire: GradWire | UnsetType, zero: int, shards: int) -> str | None:
    """One of `shards` ranks makes each sum of gradients that travel narrow and keeps it, as ZeRO-1
    and -2 do. With ZeRO-0 every rank needs all sums, and torch's fully_shard sums in the format
    that travels."""
    if not wire or zero in (1, 2) or shards == 1:
        return None
    return f"train.grad_wire={wire} with zero={zero}: legal is zero=1 or 2, whose ranks keep sums"


def _objective(case: Case) -> str | None:
    """The next token is predicted from tokens before it, masked tokens from both sides; modules
    that predict further tokens follow the next one."""
    model = case.model
    if not model.causal and not case.objective:
        return (
            f"model {model.name} is not causal: tokens would see the next one, which they predict;"
            " legal: train.objective=masked"
        )
    if model.causal and case.objective:
        return (
            f"train.objective={case.objective} with the causal model {model.name}: masked tokens"
            " are predicted from both sides; legal: next_token"
        )
    if model.mtp and (case.objective or model.head_transform):
        return (
            f"model {model.name} has model.mtp, whose modules predict further tokens than the next"
            " one, without a transform; legal: model.mtp.depth=0"
        )
    return None


def _layer_kind(case: Case) -> str | None:
    """The trainer implements the kinds of layers that `plan.layer.KINDS` lists; only those with the
    norm before each half have every technique."""
    kind = layer_kind(case.model)
    name = f"model.block={kind}"
    if kind == PRE_NORM:
        return None
    if kind not in KINDS:
        return f"{name} is not a kind of layer that this version knows; legal: {', '.join(KINDS)}"
    if kind == POST_NORM and (case.model.moe or case.model.mla):
        return f"{name} with experts or latent attention: legal in {PRE_NORM} layers only"
    if kind != POST_NORM and case.cp > 1:
        return f"{name} with cp={case.cp}: the ranks attend as in {PRE_NORM} layers; legal: cp=1"
    if case.model.mtp:
        return f"{name} with model.mtp: modules that predict further tokens are {PRE_NORM} layers"
    if case.matmul:
        return f"{name} with train.matmul={case.matmul}: legal in {PRE_NORM} layers only"
    return None


def _kv_groups(case: Case) -> str | None:
    """Queries share key-value heads in groups of equal size."""
    heads = case.model.heads
    kv = case.model.kv_heads
    return f"model.kv_heads={kv} must divide model.heads={heads}" if heads % kv else None


def _rotary(case: Case) -> str | None:
    """Latent attention has rotary positions, which turn pairs of features; YaRN's factor of
    attention scores is known for latent attention alone."""
    model = case.model
    if model.mla is not None and model.position != "rope":
        return (
            f"model {model.name} has latent attention with position={model.position}: its positions"
            " are rotary"
        )
    if model.mla is None and model.yarn and model.yarn.factor > 1 and model.yarn.mscale_all_dim:
        return (
            f"model {model.name} has yarn without latent attention, which alone makes attention"
            " scores grow; legal: yarn.mscale_all_dim=0, stretched positions without it"
        )
    name = "head_dim"
    width = model.head_dim
    if model.mla:
        name = "mla.qk_rope_head_dim"
        width = model.mla.qk_rope_head_dim
    if model.position == "rope" and width % 2:
        return f"model.{name}={width} must be even for rotary positions"
    return None


def _predictions(case: Case) -> str | None:
    """A module that predicts so many tokens further needs targets within the sequence."""
    mtp = case.model.mtp
    if not mtp or mtp.depth < case.seq_len:
        return None
    return (
        f"model.mtp.depth={mtp.depth}: a sequence of {case.seq_len} tokens has no target so far"
        " ahead; legal: below it"
    )


def _batch_ramp(case: Case) -> str | None:
    """A growing batch changes the number of micro-batches, from at least one per replica on."""
    ramp = case.batch_ramp
    unit = case.samples_at_once
    if ramp is None:
        return None
    if not unit <= ramp.start_samples <= case.global_batch_samples:
        return (
            f"train.batch_ramp starts at {ramp.start_samples} samples; legal: from {unit} (a"
            f" micro-batch a replica) to the full batch of {case.global_batch_samples}"
        )
    if case.schedule_name in FIXED_BATCH:
        return (
            "train.batch_ramp changes the number of micro-batches, which schedule"
            f" {case.schedule_name} fixes"
        )
    return None


#: Models that the bundled trainer does not run in any layout, although another program might.
MODELS: dict[str, Rule] = {
    "biases": _biases,
    "objective": _objective,
    "layer_kind": _layer_kind,
    "kv_groups": _kv_groups,
    "rotary": _rotary,
}
#: The rules of the bundled trainer.
TRAINER: dict[str, Rule] = MODELS | {
    "expert_parallel": _expert_parallel,
    "batch_ramp": _batch_ramp,
    "matmul": _matmul,
    "optim_state": _optim_state,
    "comm_buffer": _comm_buffer,
    "offload_weights": _offload_weights,
    "grad_dtype": _grad_dtype,
    "grad_wire": _grad_wire,
    "predictions": _predictions,
}


def case_of(plan: Plan) -> Case:
    """The choice of degrees of a plan."""
    par = plan.parallel
    train = plan.job.train
    nodes = math.ceil(par.world_size / plan.cluster.gpus_per_node)  # without spares
    return Case(
        tp=par.tp,
        cp=par.cp,
        ep=par.ep,
        pp=par.pp,
        dp=par.dp,
        vpp=par.vpp,
        zero=par.zero,
        sp=par.sp,
        schedule=par.schedule,
        schedule_rows=par.schedule_rows,
        cp_method=par.cp_method,
        zero_group=par.zero_group,
        etp=par.etp,
        fold_cp=par.fold_cp,
        expert_all_to_all=par.expert_all_to_all,
        allow_tp_across_nvlink=True,  # the planner has decided that already
        micro_batch_size=par.micro_batch_size,
        global_batch_samples=par.global_batch_samples,
        uneven=bool(par.replica_micro_batches),
        replica_micro_batches=par.replica_micro_batches,
        batch_ramp=train.batch_ramp,
        seq_len=train.seq_len,
        objective=train.objective,
        matmul=plan.job.matmul,
        optim_state=plan.job.optim.state or "",
        comm_buffer_bytes=comm_buffer_of(train) or 0,
        offload=offload_of(train).optimizer,
        offload_weights=offload_of(train).weights,
        precision=train.precision,
        grad_dtype=train.grad_dtype,
        grad_wire=train.grad_wire,
        model=plan.model,
        cluster=cut(plan.cluster, range(nodes)),
    )


def problems(plan: Plan) -> Iterator[str]:
    """Yields every reason why the bundled trainer does not run a plan, in the order in which a
    reader would fix them."""
    if plan.program:
        yield "it is the plan of a user's program: it has no model"
        return
    case = case_of(plan)
    train = plan.job.train
    layers = plan.model.layers
    yield from filter(None, (rule(case) for rule in (*TRAINER.values(), *LAYOUT.values())))
    yield from filter(None, [hierarchy.problem(plan)])
    if train.recompute == "budget" and len(train.recompute_layers) != layers:
        yield (
            f"train.recompute=budget has {len(train.recompute_layers)} recompute_layers for"
            f" {layers} layers"
        )


def refusal(plan: Plan) -> str | None:
    """Explains in one line why the bundled trainer does not run a plan that the planner accepted;
    None if it runs it."""
    if plan.program:
        return f"{NOT_RUN}: it is the plan of a user's program, without a model"
    violation = broken(case_of(plan), TRAINER)
    if violation is None:
        return None
    _, problem = violation
    return f"{NOT_RUN}: {problem}; a program of your own may (orch submit ... -- python train.py)"


def tensor_pieces(plan: Plan) -> int:
    """Returns the most pieces of a micro-batch in which the trainer's tensor-parallel layers
    communicate; 1: whole.

    Products in 8 bits stay whole, since they take one scale from all tokens; so do those whose
    weight gradients are deferred, which need the whole input.
    """
    par = plan.parallel
    if par.tp == 1 or plan.job.matmul or schedule_of(par).splits_backward:
        return 1
    return par.tp_pieces if isinstance(par.tp_pieces, int) else 1
