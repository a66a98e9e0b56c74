"""Any layout of any size, scaled down to what one machine runs.

Arithmetic goes wrong where techniques meet and where a degree passes a ratio (stages to
micro-batches, tp to key-value heads, layers to stages), not by thousands of ranks. So a layout that
is too large becomes a few small ones: in each, one degree is as large as the machine lets it be,
the others at their least, and every technique is there. A model is scaled in kind: norms,
positions, activations and ratios stay, sizes go.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, lcm, prod
from typing import Any

from msgspec import structs

from orchestrator.config.schema import Config, ModelSpec, ParallelSpec
from orchestrator.plan.document import Moe
from orchestrator.plan.schedules import SCHEDULES, illegal
from orchestrator.planner.model.layers import resolve

from .techniques import MLA

#: Most ranks of a small layout: 32 take ten seconds and a gigabyte on two cores.
MOST_RANKS = 32
#: Ranks that a layout gets where dp is left out: as many as the cluster has, and no more than this.
RANKS = 8
#: One process holds the model in float64 with its optimizer, and every rank its part of that.
MOST_PARAMETERS = 50_000_000
#: What a model that is scaled down gets, and from which size on it gets that.
HEAD_DIM = 8
VOCAB = 257
MOST_HEADS = 32
MOST_HIDDEN = 512
MOST_STAGES = 16
#: Least degree at which an axis that is used does all that it does: a hybrid of two groups of two
#: wants four ranks.
LEAST = 2

AXES = ("tp", "pp", "cp", "ep", "dp")
Degrees = dict[str, int]


def asked(config: Config) -> Degrees:
    """The degrees of a layout of words; dp that is left out is what the cluster leaves, and where
    that is nothing, what ZeRO has to have."""
    par = config.parallel
    degrees = {axis: getattr(par, axis) or 1 for axis in AXES[:-1]}
    model = ranks(degrees)
    gpus = config.cluster.nodes * config.cluster.gpus_per_node
    replicas = max(1, min(gpus, RANKS) // model if model <= RANKS else gpus // model)
    shards = par.zero and degrees["cp"] == 1
    return degrees | {"dp": par.dp or max(replicas, LEAST if shards else 1)}


def ranks(degrees: Degrees) -> int:
    return prod(degrees.values())


def smaller(config: Config, degrees: Degrees) -> Iterator[Degrees]:
    """`degrees` as they are if the machine runs them, else the small layouts that stand for
    them."""
    if ranks(degrees) <= MOST_RANKS:
        yield degrees
        return
    least = {axis: min(degree, LEAST) for axis, degree in degrees.items()}
    if config.parallel.zero_group > 1 and least["dp"] * least["cp"] * least["ep"] < 4:
        least["dp"] = min(degrees["dp"], 4)
    if config.parallel.uneven:
        least["dp"] = min(degrees["dp"], 3)
    layouts: list[Degrees] = []
    for axis in sorted(degrees, key=lambda axis: axis == "ep"):
        room = MOST_RANKS * least[axis] // ranks(least)
        scaled_degrees = least | {axis: _within(degrees[axis], room)}
        if degrees[axis] > least[axis] and scaled_degrees not in layouts:
            layouts.append(scaled_degrees)
        alone = {other_axis: degrees[axis] if other_axis == axis else 1 for other_axis in degrees}
        if room < degrees[axis] <= MOST_RANKS and axis != "dp" and degrees[axis] > 1:
            layouts.append(alone)  # no room for it beside the others: by itself
    yield from layouts


def _within(degree: int, room: int) -> int:
    """The largest divisor of a degree that there is room for; for one with few divisors the room
    itself, made even."""
    best = max(number for number in range(1, min(degree, room) + 1) if degree % number == 0)
    return best if best > room // 2 or best == degree else max(room - room % 2, 1)


def scaled(config: Config, degrees: Degrees, small: Degrees, named: bool) -> Config:
    """The job at other degrees, with a model and stages that keep the ratios. `named`: the user
    chose the model, which stays as it is where the layout does and it is not too large."""
    par = config.parallel
    fits = small == degrees
    pipelined = small["pp"] > 1
    vpp = virtual_stages(config, degrees, small)
    listed = par.stage_layers
    group = par.zero_group
    if not fits:
        listed = _stages(listed, small["pp"] * vpp) if listed and pipelined else None
        alike = ranks({axis: small[axis] for axis in ("dp", "cp", "ep")})  # hold the same weights
        group = (
            group
            if alike % max(group, 1) == 0 and group < alike
            else LEAST
            if alike >= 2 * LEAST
            else 0
        )
    changes: dict[str, Any] = {"vpp": vpp, "zero_group": group, "stage_layers": listed}
    if par.etp is not None:
        changes["etp"] = tensor_ranks(config, small)
    if not pipelined and degrees["pp"] > 1:
        changes |= {"schedule": None, "schedule_file": None}
    model = config.model
    if not (fits and named) or resolve(model).parameters > MOST_PARAMETERS:
        model = _in_kind(config, degrees, small, sum(listed) if listed else None)
    return structs.replace(config, model=model, parallel=structs.replace(par, **small, **changes))


def _stages(listed: list[int], stages: int) -> list[int]:
    """Layers of fewer stages: the first and the last as they are to the others, each of one layer,
    two or none."""
    usual = sorted(listed)[len(listed) // 2]

    def few(layers: int) -> int:
        return 0 if layers == 0 else 1 if layers < usual else 2

    middle = [few(listed[1 + at % max(len(listed) - 2, 1)]) for at in range(stages - 2)]
    return [few(listed[0]), *middle, few(listed[-1])]


def _in_kind(config: Config, degrees: Degrees, small: Degrees, layers: int | None) -> ModelSpec:
    """The model in small: what the small degrees do not divide, and what is too large, is replaced.
    `layers`: as many, where that is known."""
    model = config.model
    par = config.parallel
    tp = small["tp"]
    heads = model.heads
    kv_heads = model.kv_heads or model.heads
    ffn = model.ffn_hidden
    divides = tp * (small["cp"] if par.cp_method == "ulysses" else 1)
    shared = kv_heads < degrees["tp"]  # a key-value head is on several ranks
    if (
        heads % divides
        or (kv_heads % tp and tp % kv_heads)
        or shared != (kv_heads < tp)
        or heads > MOST_HEADS
    ):
        queries_per_head = min(heads // kv_heads, 2)  # queries that share a key-value head
        kv_heads = max(1, tp * kv_heads // degrees["tp"]) if shared else tp
        heads = lcm(2 * divides, kv_heads * queries_per_head)
    large = heads != model.heads or model.hidden > MOST_HIDDEN
    hidden, head_dim = (heads * HEAD_DIM, HEAD_DIM) if large else (model.hidden, model.head_dim)
    return structs.replace(
        model,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        layers=layers or _layers(config, degrees, small),
        ffn_hidden=tp * ceil(48 / tp) if ffn % tp or ffn > 4 * MOST_HIDDEN else ffn,
        vocab=min(model.vocab, VOCAB),
        max_seq_len=min(model.max_seq_len, MOST_HIDDEN),
        moe=_few_experts(model.moe, small, spread_of(config, small)) if model.moe else None,
        mla=structs.replace(MLA, q_lora_rank=min(model.mla.q_lora_rank, MLA.q_lora_rank))
        if model.mla
        else None,
    )


def spread_of(config: Config, small: Degrees) -> int:
    """Ranks with different experts, of small degrees."""
    folded = small["cp"] if config.parallel.fold_cp else 1
    return small["tp"] // tensor_ranks(config, small) * folded * small["ep"]


def tensor_ranks(config: Config, small: Degrees) -> int:
    """Ranks that each expert is cut over, of small degrees: fewer than tp, where that is so."""
    par = config.parallel
    tp = small["tp"]
    if par.etp is None or par.etp >= (par.tp or 1):
        return tp
    return max(number for number in range(1, max(tp, 2)) if tp % number == 0 and number <= par.etp)


def _few_experts(moe: Moe, small: Degrees, ranks: int) -> Moe:
    """Two or more on each rank, in two groups for each that a token may use, chosen as before."""
    top_groups = min(moe.top_groups, 2)
    groups = 2 * top_groups if moe.groups > 1 else 1
    experts = lcm(2 * ranks, groups) * (2 if groups > 1 else 1)
    return structs.replace(
        moe,
        experts=experts,
        top_k=min(moe.top_k, 3, experts // groups * top_groups),
        ffn_hidden=small["tp"] * ceil(16 / small["tp"]),
        shared_ffn_hidden=small["tp"] * ceil(24 / small["tp"]) if moe.shared_ffn_hidden else 0,
        first_dense_layers=min(moe.first_dense_layers, 1),
        groups=groups,
        top_groups=top_groups,
    )


def virtual_stages(config: Config, degrees: Degrees, small: Degrees) -> int:
    """A rank's: as many as are asked for, fewer where a small layout would have more than
    MOST_STAGES."""
    vpp = config.parallel.vpp or 1
    pp = small["pp"]
    if pp == 1 and degrees["pp"] > 1:
        return 1
    return vpp if small == degrees or pp * vpp <= MOST_STAGES else max(2, MOST_STAGES // pp)


def _layers(config: Config, degrees: Degrees, small: Degrees) -> int:
    """Of the model on a small layout: unequal stages stay so."""
    layers = config.model.layers
    vpp = virtual_stages(config, degrees, small)
    full_stages = degrees["pp"] * (config.parallel.vpp or 1)
    stages = small["pp"] * vpp
    if vpp > 1 and layers + 2 == full_stages:
        return stages - 2  # embedding and head are stages of their own
    if stages <= layers <= 8 or stages == layers:
        return layers
    return (2 * stages if stages <= 4 else stages) + (layers % full_stages > 0 and stages > 1)


def micro_batches(config: Config, degrees: Degrees, small: Degrees, chosen: bool) -> int:
    """For a replica: so many that a pipeline is full, or fewer than stages where the user has
    `chosen` a batch that is so; a legal number."""
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
            break  # nothing that another number mends
        count += 1
    return count


def layout(par: ParallelSpec, degrees: Degrees) -> str:
    """As `parallel=` takes it."""
    etp = min(par.etp, degrees["tp"]) if par.etp is not None else None
    folded = degrees["tp"] // (etp or degrees["tp"]) * (degrees["cp"] if par.fold_cp else 1)
    shown_degrees = degrees | {"ep": degrees["ep"] * folded}
    degree_words = [
        f"{axis}{shown_degrees[axis]}"
        for axis in ("tp", "pp", "dp", "cp", "ep")
        if shown_degrees[axis] > 1
    ]
    degree_words += [f"etp{etp}"] * (etp is not None)
    degree_words += [f"zero{par.zero}"] * bool(par.zero) + [f"vpp{par.vpp}"] * ((par.vpp or 1) > 1)
    return "_".join([*degree_words, *["sp0"] * (par.sp is False)]) or "dp1"
