"""Scaling layouts of any size down to what one machine can run.

Errors of arithmetic come from combinations of techniques, and from degrees that pass a ratio
(stages to micro-batches, tp to key-value heads, layers to stages), not from thousands of ranks. So
a layout that is too large becomes a few small ones with every technique: in each, one degree is as
large as the machine allows, and the others are at their least. A model keeps its norms, positions,
activations and ratios, and loses its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, gcd, lcm, prod
from typing import Any

from msgspec import structs

from orchestrator.config.schema import Config, ModelSpec, ParallelSpec
from orchestrator.cost.model.layers import resolve
from orchestrator.plan.document import Moe
from orchestrator.plan.schedules import SCHEDULES, illegal
from orchestrator.plan.trained import STATE_BLOCK

from .expert_models import MLA

#: Most ranks of a small layout: 32 take ten seconds and a gigabyte on two cores.
MOST_RANKS = 32
#: Most ranks of a layout without dp, which otherwise fills the cluster.
RANKS = 8
#: Most parameters of a model: one process holds the model in float64 with its optimizer, and every
#: rank a part of that.
MOST_PARAMETERS = 50_000_000
#: Head dimension of models that are scaled down, and their largest sizes.
HEAD_DIM = 8
VOCAB = 257
MOST_HEADS = 32
MOST_HIDDEN = 512
MOST_STAGES = 16
#: Least degree at which an axis does everything that it does at larger degrees. (A hybrid of two
#: groups of two needs four ranks.)
LEAST = 2

AXES = ("tp", "pp", "cp", "ep", "dp")
Degrees = dict[str, int]


def requested_degrees(config: Config) -> Degrees:
    """Returns the degrees of the configured layout. A missing dp uses the rest of the cluster, and
    is at least what ZeRO needs."""
    par = config.parallel
    degrees = {axis: getattr(par, axis) or 1 for axis in AXES[:-1]}
    if par.dp:
        return degrees | {"dp": par.dp}
    model_ranks = ranks(degrees)
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    if model_ranks <= RANKS:
        gpus = min(gpus, RANKS)
    shards_over_dp = par.zero and degrees["cp"] == 1
    least = LEAST if shards_over_dp else 1
    return degrees | {"dp": max(gpus // model_ranks, least)}


def ranks(degrees: Degrees) -> int:
    return prod(degrees.values())


def small_layouts(config: Config, degrees: Degrees) -> Iterator[Degrees]:
    """Yields the degrees unchanged if this machine runs them, else those of the small layouts in
    their place."""
    if ranks(degrees) <= MOST_RANKS:
        yield degrees
        return
    least = {axis: min(degree, LEAST) for axis, degree in degrees.items()}
    replicas = least["dp"] * least["cp"] * least["ep"]
    if config.parallel.zero_group > 1 and replicas < 2 * LEAST:
        least["dp"] = min(degrees["dp"], 2 * LEAST)
    if config.parallel.uneven:
        least["dp"] = min(degrees["dp"], 3)
    layouts: list[Degrees] = []
    for axis in sorted(degrees, key=lambda axis: axis == "ep"):
        degree = degrees[axis]
        room = MOST_RANKS * least[axis] // ranks(least)
        scaled_degrees = least | {axis: _within(degree, room)}
        if degree > least[axis] and scaled_degrees not in layouts:
            layouts.append(scaled_degrees)
        if axis != "dp" and max(room, 1) < degree <= MOST_RANKS:
            # The other axes leave no room for the whole degree: also without them.
            layouts.append(dict.fromkeys(degrees, 1) | {axis: degree})
    yield from layouts


def _within(degree: int, room: int) -> int:
    """Returns the largest divisor of a degree up to `room`; for a degree with few divisors `room`
    itself, made even."""
    candidates = range(1, min(degree, room) + 1)
    divisor = max(number for number in candidates if degree % number == 0)
    if divisor > room // 2 or divisor == degree:
        return divisor
    return max(room - room % 2, 1)


def scaled(config: Config, degrees: Degrees, small: Degrees, named: bool) -> Config:
    """Returns the job at small degrees, with a model and stages of the same ratios. `named`: the
    user chose the model, which stays unchanged if the layout does and it is not too large."""
    par = config.parallel
    fits = small == degrees
    pipelined = small["pp"] > 1
    vpp = virtual_stages(config, degrees, small)
    stage_layers = par.stage_layers
    zero_group = par.zero_group
    if not fits:
        stages = small["pp"] * vpp
        stage_layers = _stages(stage_layers, stages) if stage_layers and pipelined else None
        zero_group = _zero_group(zero_group, small)
    changes: dict[str, Any] = {"vpp": vpp, "zero_group": zero_group, "stage_layers": stage_layers}
    if par.etp is not None:
        changes["etp"] = tensor_ranks(config, small)
    if not pipelined and degrees["pp"] > 1:
        changes |= {"schedule": None, "schedule_file": None}
    model = config.model
    if not (fits and named) or resolve(model).parameters > MOST_PARAMETERS:
        layers = sum(stage_layers) if stage_layers else None
        model = _small_model(config, degrees, small, layers)
    return structs.replace(
        config,
        model=model,
        parallel=structs.replace(par, **small, **changes),
    )


def _zero_group(group: int, small: Degrees) -> int:
    """Returns the size of ZeRO's groups on a small layout: unchanged if it divides the ranks with
    the same weights, else the least one; 0 if there is no room for two groups."""
    replicas = ranks({axis: small[axis] for axis in ("dp", "cp", "ep")})
    if replicas % max(group, 1) == 0 and group < replicas:
        return group
    return LEAST if replicas >= 2 * LEAST else 0


def _stages(stage_layers: list[int], stages: int) -> list[int]:
    """Returns the layers of fewer stages: none, one or two for each, so that the first and the last
    compare with the others as before."""
    median = sorted(stage_layers)[len(stage_layers) // 2]

    def few(layers: int) -> int:
        if layers == 0:
            return 0
        return 1 if layers < median else 2

    inner = max(len(stage_layers) - 2, 1)
    middle = [few(stage_layers[1 + index % inner]) for index in range(stages - 2)]
    return [few(stage_layers[0]), *middle, few(stage_layers[-1])]


def _small_model(
    config: Config,
    degrees: Degrees,
    small: Degrees,
    layers: int | None,
) -> ModelSpec:
    """Returns the model with smaller sizes: those that the small degrees do not divide, and those
    that are too large, are replaced. `layers`: their number, if it is known."""
    model = config.model
    tp = small["tp"]
    heads, kv_heads = _few_heads(config, degrees, small)
    ffn = model.ffn_hidden
    hidden = model.hidden
    head_dim = model.head_dim
    if heads != model.heads or model.hidden > MOST_HIDDEN:
        hidden = heads * HEAD_DIM
        head_dim = HEAD_DIM
    if ffn % tp or ffn > 4 * MOST_HIDDEN:
        ffn = tp * ceil(48 / tp)
    moe: Moe | None = model.moe
    if moe is not None:
        moe = _few_experts(moe, small, expert_ranks(config, small))
    mla = model.mla
    if mla is not None:
        mla = structs.replace(MLA, q_lora_rank=min(mla.q_lora_rank, MLA.q_lora_rank))
    small_model = structs.replace(
        model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        layers=layers or _layers(config, degrees, small),
        ffn_hidden=ffn,
        vocab=min(model.vocab, VOCAB),
        max_seq_len=min(model.max_seq_len, MOST_HIDDEN),
        moe=moe,
        mla=mla,
    )
    if config.optim.state == "8bit":
        return _in_whole_blocks(small_model, tp, tensor_ranks(config, small))
    return small_model


def _few_heads(config: Config, degrees: Degrees, small: Degrees) -> tuple[int, int]:
    """Returns the (query, key-value) heads that the small degrees divide, in the ratio of the
    model's."""
    tp = small["tp"]
    heads = config.model.heads
    kv_heads = config.model.kv_heads or heads
    head_ranks = tp
    if config.parallel.cp_method == "ulysses":
        head_ranks *= small["cp"]
    shared = kv_heads < degrees["tp"]  # a key-value head is on several ranks
    splits = heads % head_ranks == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    if splits and shared == (kv_heads < tp) and heads <= MOST_HEADS:
        return heads, kv_heads
    queries_per_head = min(heads // kv_heads, 2)  # queries that share a key-value head
    few_kv_heads = max(1, tp * kv_heads // degrees["tp"]) if shared else tp
    return lcm(2 * head_ranks, few_kv_heads * queries_per_head), few_kv_heads


def _in_whole_blocks(model: ModelSpec, tp: int, etp: int) -> ModelSpec:
    """Returns the model with rows so long that every rank holds whole blocks of optimizer state in
    8 bits; experts are cut over `etp` ranks."""

    def enlarged(size: int, ranks: int = 1) -> int:
        unit = STATE_BLOCK * ranks
        return ceil(size / unit) * unit

    heads_of_rank = model.heads // tp
    unit = STATE_BLOCK // gcd(STATE_BLOCK, heads_of_rank)  # of a head's features
    head_dim = ceil((model.head_dim or model.hidden // model.heads) / unit) * unit
    moe = model.moe
    if moe is not None:
        moe = structs.replace(
            moe,
            ffn_hidden=enlarged(moe.ffn_hidden, etp),
            shared_ffn_hidden=enlarged(moe.shared_ffn_hidden, tp),
        )
    mla = model.mla
    if mla is not None:
        mla = structs.replace(
            mla,
            q_lora_rank=enlarged(mla.q_lora_rank),
            kv_lora_rank=enlarged(mla.kv_lora_rank),
            v_head_dim=ceil(mla.v_head_dim / unit) * unit,
        )
    return structs.replace(
        model,
        head_dim=head_dim,
        hidden=enlarged(model.hidden),
        ffn_hidden=enlarged(model.ffn_hidden, tp),
        moe=moe,
        mla=mla,
    )


def expert_ranks(config: Config, small: Degrees) -> int:
    """Returns the number of ranks with different experts on a small layout."""
    folded = small["cp"] if config.parallel.fold_cp else 1
    return small["tp"] // tensor_ranks(config, small) * folded * small["ep"]


def tensor_ranks(config: Config, small: Degrees) -> int:
    """Returns the number of ranks that share each expert on a small layout: fewer than tp if the
    large layout has fewer."""
    par = config.parallel
    tp = small["tp"]
    if par.etp is None or par.etp >= (par.tp or 1):
        return tp
    divisors = (number for number in range(1, max(tp, 2)) if tp % number == 0)
    return max(divisor for divisor in divisors if divisor <= par.etp)


def _few_experts(moe: Moe, small: Degrees, ranks: int) -> Moe:
    """Returns a mixture with at least two experts per rank, and two groups for each group that a
    token may use. The choice of experts is unchanged."""
    tp = small["tp"]
    top_groups = min(moe.top_groups, 2)
    groups = 1
    experts = 2 * ranks
    if moe.groups > 1:
        groups = 2 * top_groups
        experts = 2 * lcm(experts, groups)
    usable_experts = experts // groups * top_groups
    return structs.replace(
        moe,
        experts=experts,
        top_k=min(moe.top_k, 3, usable_experts),
        ffn_hidden=tp * ceil(16 / tp),
        shared_ffn_hidden=tp * ceil(24 / tp) if moe.shared_ffn_hidden else 0,
        first_dense_layers=min(moe.first_dense_layers, 1),
        groups=groups,
        top_groups=top_groups,
    )


def virtual_stages(config: Config, degrees: Degrees, small: Degrees) -> int:
    """Returns the number of stages per rank: as configured, or fewer if a small layout would have
    more than MOST_STAGES."""
    vpp = config.parallel.vpp or 1
    pp = small["pp"]
    if pp == 1 and degrees["pp"] > 1:
        return 1
    if small == degrees or pp * vpp <= MOST_STAGES:
        return vpp
    return max(2, MOST_STAGES // pp)


def _layers(config: Config, degrees: Degrees, small: Degrees) -> int:
    """Returns the number of layers of the model on a small layout: unequal stages stay unequal."""
    layers = config.model.layers
    vpp = virtual_stages(config, degrees, small)
    full_stages = degrees["pp"] * (config.parallel.vpp or 1)
    stages = small["pp"] * vpp
    if vpp > 1 and layers + 2 == full_stages:
        return stages - 2  # embedding and head are stages of their own
    if stages <= layers <= 8 or stages == layers:
        return layers
    small_layers = 2 * stages if stages <= 4 else stages
    unequal = layers % full_stages > 0 and stages > 1
    return small_layers + 1 if unequal else small_layers


def micro_batches(
    config: Config,
    degrees: Degrees,
    small: Degrees,
    chosen: bool,
) -> int:
    """Returns a legal number of micro-batches per replica: enough to fill the pipeline, or fewer
    than stages if the user has `chosen` such a batch."""
    par = config.parallel
    train = config.train
    pp = small["pp"]
    count = max(4, 2 * small["pp"])
    samples = train.global_batch_samples or (train.global_batch_tokens or 0) // train.seq_len
    requested = samples // ((par.micro_batch_size or 1) * degrees["dp"] * degrees["ep"])
    if chosen and degrees["pp"] > 1 and 0 < requested < degrees["pp"]:
        count = max(1, round(requested * pp / degrees["pp"]))
    schedule = par.schedule or ("interleaved" if (par.vpp or 1) > 1 and pp > 1 else "1f1b")
    vpp = virtual_stages(config, degrees, small)
    while schedule in SCHEDULES and illegal(schedule, pp, count, vpp) and count < 8 * pp:
        if illegal(schedule, pp, count + 1, vpp) and illegal(schedule, pp, count + 2, vpp):
            break  # another number does not help
        count += 1
    return count


def layout(par: ParallelSpec, degrees: Degrees) -> str:
    """Returns the layout as `parallel=` takes it."""
    tp = degrees["tp"]
    etp = min(par.etp, tp) if par.etp is not None else None
    folded = tp // (etp or tp)
    if par.fold_cp:
        folded *= degrees["cp"]
    shown_degrees = degrees | {"ep": degrees["ep"] * folded}
    degree_words = [
        f"{axis}{shown_degrees[axis]}"
        for axis in ("tp", "pp", "dp", "cp", "ep")
        if shown_degrees[axis] > 1
    ]
    if etp is not None:
        degree_words.append(f"etp{etp}")
    if par.zero:
        degree_words.append(f"zero{par.zero}")
    if (par.vpp or 1) > 1:
        degree_words.append(f"vpp{par.vpp}")
    if par.sp is False:
        degree_words.append("sp0")
    return "_".join(degree_words) or "dp1"
