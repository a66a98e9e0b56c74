"""The warnings of a plan, each in one line with its price and a remedy."""

from __future__ import annotations

from msgspec import UNSET

from orchestrator.cluster.gpu_models import gpu_model
from orchestrator.cost.software import SOFTWARE
from orchestrator.cost.time.offload import host_of
from orchestrator.cost.time.recomputed import shares_inputs
from orchestrator.cost.time.traffic import reductions
from orchestrator.plan import Plan
from orchestrator.plan.domains import domains_of
from orchestrator.plan.offload import offload_of
from orchestrator.plan.trained import refusal

GIB = 1 << 30
OFFLOADED = 0.5  # share of the step above which an offloaded update is reported
BUBBLE = 0.20  # share of the step above which the pipeline bubble is reported

#: GPU -> (highest MFU ever measured of a dense model trained in 16 bits, counted as a plan does;
#: source of the measurement)
BEST_MEASURED = {
    "V100": (0.423, "GPT 1.16B on one V100 of a DGX-2H: Megatron-LM images/tables.tex of 2020"),
    "A100": (0.627, "MPT 3B on 8 A100 80GB: llm-foundry scripts/train/benchmarking/README.md"),
    "H100": (0.556, "Llama 3.1 8B on 8 H100 80GB: NVIDIA dgxc-benchmarking llama3.1/README.md"),
    "B200": (0.381, "12 layers of Llama 3 70B on 8 B200: SimuMax docs/b200, its measured side"),
    "cpu": (1.0, ""),
}
#: GPUs of the same chip, or of a successor for which nothing is published.
SAME_CHIP = {"A800": "A100", "A30": "A100", "H800": "H100", "H200": "H100", "GH200": "H100"}
SAME_CHIP |= dict.fromkeys(("GB200", "B300", "GB300", "B100"), "B200")


def warnings(
    plan: Plan,
    inside_nvlink: tuple[str, float] | None = None,
    any_layout: bool = False,
) -> list[str]:
    """Returns all warnings of a plan, each in one line.

    `inside_nvlink` is (parallelism spec, step seconds) of the nearest degrees that keep tensor
    parallelism inside NVLink. `any_layout` marks the plan of a user's own program: then the limits
    of the bundled trainer cause no warning.
    """
    warning_lines = [
        None if any_layout else refusal(plan),
        _memory(plan),
        _faster_than_measured(plan),
        _left_out(plan),
        _idle(plan),
        _tp_outside(plan, inside_nvlink),
        _bubble(plan),
        _sequence_length(plan),
        _replicated_state(plan),
        _sharded_gradients(plan),
        _nothing_to_share(plan),
        _no_latents(plan),
        _offload(plan),
        _nothing_to_put_away(plan),
        _demo(plan),
    ]
    return [line for line in warning_lines if line]


def _memory(plan: Plan) -> str | None:
    """Warns of a plan that does not fit, and names the largest category."""
    memory = plan.memory
    if memory.total <= memory.capacity:
        return None
    bytes_by_category = {
        name: getattr(memory, name)
        for name in ("params", "grads", "optimizer", "activations", "buffers")
    }
    largest = max(bytes_by_category, key=lambda name: bytes_by_category[name])
    change = {
        "params": "raise tp or pp, or shard them (zero3)",
        "grads": "raise tp or pp, or shard them (zero2)",
        "optimizer": "shard it (zero1)" if plan.parallel.zero == 0 else "raise tp, pp or dp",
        "activations": "train.recompute=full, a smaller parallel.micro_batch_size, or a higher tp",
        "buffers": "a smaller parallel.micro_batch_size",
    }[largest]
    return (
        f"does not fit: rank {memory.worst_rank} needs {memory.total / GIB:.1f} GiB of"
        f" {memory.capacity / GIB:.1f} GiB; the largest part is {largest} with"
        f" {bytes_by_category[largest] / GIB:.1f} GiB: {change}"
    )


def _faster_than_measured(plan: Plan) -> str | None:
    """Warns of a predicted MFU above the best measured one."""
    gpu = gpu_model(plan.cluster.gpu.name).upper() or plan.cluster.gpu.name
    # The highest MFU on any GPU is the default.
    best, source = BEST_MEASURED.get(SAME_CHIP.get(gpu, gpu), BEST_MEASURED["A100"])
    if (
        plan.model.moe
        or plan.job.matmul
        or plan.job.train.precision not in ("bf16", "fp16")
        or plan.mfu <= best
    ):
        return None
    return (
        f"predicted MFU {plan.mfu:.1%} is above {best:.1%}, the best ever measured in 16 bits on"
        f" this GPU ({source}): count on a slower step"
    )


def _left_out(plan: Plan) -> str | None:
    """Reports nodes of another kind, which the job cannot use."""
    kinds = {
        kind: count for kind, count in plan.cluster.left_out.items() if kind != "out of service"
    }
    if not kinds:
        return None
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    have = f"{plan.cluster.gpus_per_node} {plan.cluster.gpu.name}"
    return (
        f"a job runs on nodes of one kind, here {len(plan.cluster.node_names)} with {have}; left"
        f" out: {counts}"
    )


def _idle(plan: Plan) -> str | None:
    """Reports GPUs that stay idle because groups do not divide their NVLink domains."""
    par = plan.parallel
    domains = domains_of(plan.cluster)
    group_of_usable = domains.parts(par.tp, par.cp, par.ep, par.pp, par.dp)
    group_of_usable = (
        domains.parts(par.tp, par.cp, par.ep, par.pp)
        if par.world_size not in group_of_usable
        else group_of_usable
    )
    usable_gpus = min(
        (gpus for gpus in group_of_usable if par.world_size <= gpus < domains.gpus),
        default=0,
    )
    if not usable_gpus or par.world_size == domains.gpus:
        return None
    idle_gpus = domains.gpus - par.world_size
    idle = f"{idle_gpus} GPU{'s' * (idle_gpus > 1)} idle as spares"
    sizes = [str(nodes * domains.gpus_per_node) for nodes, _ in domains.sizes]
    reason = f"groups of {group_of_usable[usable_gpus]} do not divide {' or '.join(sizes)}"
    busy = range(par.world_size // domains.gpus_per_node)  # Ranks fill the first nodes.
    busy_per_domain = {
        sum(node in busy for node in nodes) * domains.gpus_per_node
        for nodes in plan.cluster.nvlink_domains
    }
    if len(sizes) == len(busy_per_domain) == 1:
        return (
            f"{busy_per_domain.pop()} of each NVLink domain's {sizes[0]} GPUs are used:"
            f" {reason}; {idle}"
        )
    used = (
        f"{par.world_size} of {domains.gpus} GPUs are used: {reason}, the GPUs of an NVLink domain"
    )
    copies = (
        f", and dp={par.dp} copies of the model take no more of the {usable_gpus} left"
        if par.world_size < usable_gpus
        else ""
    )
    return f"{used}{copies}; {idle}"


def _tp_outside(plan: Plan, inside: tuple[str, float] | None) -> str | None:
    """Warns of tensor-parallel groups that leave NVLink, with the predicted cost."""
    level = plan.placement["tp"].worst_level
    if level in ("self", "nvlink"):
        return None
    line = f"tensor-parallel groups of {plan.parallel.tp} leave NVLink and cross {level}"
    exposed = plan.time.exposed_comm_s["tp"]
    line += (
        f": {exposed:.3g} s of tensor-parallel communication a step,"
        f" {exposed / plan.time.step_s:.0%} of it"
    )
    if inside is None:
        return line
    spec, seconds = inside
    cost = plan.time.step_s - seconds
    return f"{line}; predicted cost against {spec}: {cost:+.3g} s per step ({cost / seconds:+.0%})"


def _bubble(plan: Plan) -> str | None:
    """Warns of a large pipeline bubble."""
    if plan.time.bubble_ratio <= BUBBLE:
        return None
    par = plan.parallel
    return (
        f"pipeline bubble {plan.time.bubble_ratio:.0%} of the step: {par.micro_batches}"
        f" micro-batches for {par.pp} stages; raise the global batch, lower pp, or use virtual"
        " stages (vppN)"
    )


def _sequence_length(plan: Plan) -> str | None:
    """Warns of sequences longer than those that the model was made for."""
    if plan.job.train.seq_len <= plan.model.max_seq_len:
        return None
    return (
        f"train.seq_len={plan.job.train.seq_len} is longer than the {plan.model.max_seq_len} tokens"
        f" that {plan.model.name} was made for"
    )


def _replicated_state(plan: Plan) -> str | None:
    """Reports a large unsharded optimizer state, because ZeRO-1 costs no communication."""
    par = plan.parallel
    replicas = par.dp * par.cp * par.ep
    saved = plan.memory.optimizer * (1 - 1 / replicas)
    if par.zero or replicas == 1 or saved < 0.05 * plan.memory.capacity:
        return None
    held = f"the optimizer's {plan.memory.optimizer / GIB:.1f} GiB are held {replicas} times"
    return f"{held}: zero1 frees {saved / GIB:.1f} GiB per rank at no cost"


def _sharded_gradients(plan: Plan) -> str | None:
    """Reports communication that ZeRO-2 and -3 repeat per micro-batch, and ZeRO-1 per step."""
    par = plan.parallel
    software = SOFTWARE.get(plan.time.software, SOFTWARE["orch"])
    replicas = par.dp * par.cp * par.ep
    rounds = reductions(par, software.reduces_by_round)
    if par.zero < 2 or replicas == 1 or rounds == 1:
        return None
    if par.zero == 2:
        traffic = (
            f"zero2 reduce-scatters every gradient for each of {rounds} micro-batches:"
            f" {rounds + 1} Psi a step"
        )
    elif par.pp > 1:
        traffic = (
            f"zero3 with pp={par.pp} holds every weight gathered during a step, and reduce-scatters"
            f" each gradient for each of {rounds} micro-batches: {rounds + 1} Psi a step"
        )
    else:
        traffic = (
            f"zero3 gathers weights twice and reduce-scatters gradients for each of {rounds}"
            " micro-batches:"
        )
        traffic += f" {3 * rounds} Psi a step"
    return f"{traffic} (zero1: 2 Psi); a larger parallel.micro_batch_size or zero1 sends less"


def _nothing_to_share(plan: Plan) -> str | None:
    """Warns of partitioned activations that leave nothing to partition."""
    par = plan.parallel
    train = plan.job.train
    if train.partition_activations is not True or (
        shares_inputs(par, train) and train.recompute != "none"
    ):
        return None
    reason = (
        "with tp=1 no rank holds the same activations" if par.tp == 1 else "nothing is recomputed"
    )
    if par.tp > 1 and par.sp:
        reason = "sequence parallelism (sp) shards the inputs of recomputed layers already"
    return f"train.partition_activations changes nothing: {reason}"


def _nothing_to_put_away(plan: Plan) -> str | None:
    """Warns of offloaded inputs in a job that recomputes no layer."""
    if not offload_of(plan.job.train).activations or plan.job.train.recompute != "none":
        return None
    return (
        "train.offload_activations changes nothing: nothing is recomputed; train.recompute=full or"
        " selective"
    )


def _no_latents(plan: Plan) -> str | None:
    """Warns of recomputed latents in a job that has none to recompute."""
    train = plan.job.train
    mla = plan.model.mla
    if train.recompute_latents is not True or (
        mla is not None and train.recompute in ("selective", "budget")
    ):
        return None
    reason = f"model {plan.model.name} has no latent attention"
    if mla is not None:
        reason = f"train.recompute={train.recompute}; it belongs to selective"
    return f"train.recompute_latents changes nothing: {reason}"


def _offload(plan: Plan) -> str | None:
    """Reports the cost of an update or of activations on the host.

    It does so if that is most of the step, rests on assumed rates, or changes the training.
    """
    offload = offload_of(plan.job.train)
    terms = plan.time.terms
    keys = {"offload": offload.optimizer, "offload_activations": offload.activations}
    settings = " ".join(f"train.{key}={target}" for key, target in keys.items() if target)
    if not settings:
        return None
    seconds = 0.0
    if offload.optimizer:
        seconds += terms.get("optimizer", 0.0)
    if offload.activations:
        seconds += terms.get("activations", 0.0)
    share = seconds / plan.time.step_s
    host = host_of(plan.cluster)
    reasons = []
    if plan.cluster.host is UNSET:
        reasons.append(
            f"cluster.host is not described: {host.disk_bytes_per_s / 1e9:g} GB/s of disk are"
            f" assumed, and {host.link_bytes_per_s / 1e9:g} GB/s between GPU and host"
        )
    if share > OFFLOADED:
        reasons.append(
            f"that is {share:.0%} of the step: a larger global batch, or zero1 over more ranks"
        )
    if offload.delayed:
        reasons.append(
            "each step computes with weights that lack the update before it: not the same"
            " training as without train.offload_delayed"
        )
    if not reasons:
        return None
    return f"{settings} takes {seconds:.3g} s per step; " + "; ".join(reasons)


def _demo(plan: Plan) -> str | None:
    """Warns of a demo corpus."""
    if not plan.job.data.demo:
        return None
    return (
        f"data {plan.job.data.name} is a demo corpus: it shows the machinery, it does not train a"
        " language model"
    )
