"""What this trainer runs, and one clear line for what it does not. Pure; called before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.plan import Plan
from orchestrator.plan.batch import computed
from orchestrator.plan.legal import sharding, unequal
from orchestrator.plan.schedules import copies_of
from trainer.errors import LayoutError
from trainer.parallel.context.order import BALANCED


def check(plan: Plan) -> None:
    """Raise LayoutError naming the first rule that the plan breaks, with the legal values where there are any."""
    for problem in problems(plan):
        raise LayoutError(problem)


def problems(plan: Plan) -> Iterator[str]:
    """Every reason to refuse, in the order in which a reader would fix them."""
    yield from _unproven(plan)
    yield from _tensor(plan)
    yield from _sequence(plan)
    yield from _context(plan)
    yield from _recompute(plan)
    yield from _sharding(plan)
    yield from _ramp(plan)
    yield from _unequal(plan)


def _unproven(plan: Plan) -> Iterator[str]:
    """Techniques that have not been shown equal to one process yet. A technique that lands leaves this list."""
    model, par = plan.model, plan.parallel
    if model.moe is not None:
        yield f"model {model.name} is a mixture of experts, which the trainer does not run yet (plan it with --dry-run)"
    if model.mla is not None:
        yield f"model {model.name} uses multi-head latent attention, which the trainer does not run yet"
    if not model.causal:
        yield f"model {model.name} is not causal: the trainer only predicts the next token"
    if par.ep > 1:
        yield f"ep={par.ep} needs a mixture of experts; use ep1"


def _tensor(plan: Plan) -> Iterator[str]:
    model, tp = plan.model, plan.parallel.tp
    if model.heads % model.kv_heads:
        yield f"model.kv_heads={model.kv_heads} must divide model.heads={model.heads}"
    legal = [degree for degree in range(1, model.heads + 1) if _divides(degree, model)]
    if tp not in legal:
        yield (
            f"tp={tp} does not fit model {model.name}: it must divide heads={model.heads} and"
            f" ffn_hidden={model.ffn_hidden}, and divide or be a multiple of kv_heads={model.kv_heads};"
            f" legal tp: {', '.join(map(str, legal))}"
        )
    if model.position == "rope" and model.head_dim % 2:
        yield f"model.head_dim={model.head_dim} must be even for rotary positions"


def _divides(tp: int, model: object) -> bool:
    fits_kv = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return model.heads % tp == 0 and model.ffn_hidden % tp == 0 and fits_kv


def _sequence(plan: Plan) -> Iterator[str]:
    model, par, length = plan.model, plan.parallel, plan.job.train.seq_len
    local = length // par.cp
    if par.sp and local % par.tp:
        yield f"sequence parallelism needs tp={par.tp} to divide seq_len / cp = {local}; use sp0 or another seq_len"
    if model.position == "learned" and length > model.max_seq_len:
        yield f"train.seq_len={length} is longer than the {model.max_seq_len} learned positions of {model.name}"


def _context(plan: Plan) -> Iterator[str]:
    model, par, length = plan.model, plan.parallel, plan.job.train.seq_len
    if par.cp == 1:
        return
    pieces = par.cp * (2 if par.cp_method in BALANCED else 1)
    if length % pieces:
        yield (
            f"cp={par.cp} with parallel.cp_method={par.cp_method} cuts a sequence into {pieces} parts, which do not"
            f" divide train.seq_len={length}"
        )
    heads = model.heads // par.tp
    if par.cp_method == "ulysses" and heads % par.cp:
        yield (
            f"parallel.cp_method=ulysses needs cp={par.cp} to divide the {heads} heads of a tensor-parallel rank;"
            " legal: zigzag, ring, allgather"
        )


def _recompute(plan: Plan) -> Iterator[str]:
    train, layers = plan.job.train, plan.model.layers
    if train.recompute == "budget" and len(train.recompute_layers) != layers:
        yield f"train.recompute=budget has {len(train.recompute_layers)} recompute_layers for {layers} layers"


def _sharding(plan: Plan) -> Iterator[str]:
    par = plan.parallel
    replicas = par.dp * par.cp * par.ep
    problem = sharding(par.zero, par.zero_group, par.pp, par.schedule, replicas, copies_of(par))
    if problem:
        yield problem


def _ramp(plan: Plan) -> Iterator[str]:
    par, ramp = plan.parallel, plan.job.train.batch_ramp
    if ramp is None:
        return
    unit = par.micro_batch_size * par.dp * par.ep
    if not unit <= ramp.start_samples <= par.global_batch_samples:
        yield (
            f"train.batch_ramp starts at {ramp.start_samples} samples; legal: from {unit} (a micro-batch a replica) to"
            f" the full batch of {par.global_batch_samples}"
        )
    if par.schedule in ("table", "dualpipe"):
        yield f"train.batch_ramp changes the number of micro-batches, which schedule {par.schedule} fixes"


def _unequal(plan: Plan) -> Iterator[str]:
    par = plan.parallel
    if not par.replica_micro_batches:
        return
    counts = {computed(par, replica) for replica in range(par.dp * par.ep)}
    ramp = plan.job.train.batch_ramp is not None
    problem = unequal(counts, par.ep, par.pp, par.vpp, par.schedule, ramp)
    if problem:
        yield f"replicas take {par.replica_micro_batches} micro-batches: {problem}"
