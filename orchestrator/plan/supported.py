"""The rules for the layout of every program; `trained` has the rules of the bundled trainer. Pure.

Each rule is a function from a `Case` to a problem in one line, or None. The planner refuses layouts
that break `LAYOUT` and warns about those that break `trained.TRAINER`; the search recommends
neither. Submit and render refuse both if the bundled trainer would run the job, and the trainer
checks again before it builds anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import UNSET, Struct, UnsetType

from .batch import divisors, nearest_divisors, share
from .document import (
    TABLE,
    AllToAll,
    BatchRamp,
    Cluster,
    CpMethod,
    GradWire,
    Matmul,
    Model,
    Objective,
    Precision,
)
from .domains import domains_of
from .expert_mesh import axes, expert_mesh, folds_cp, in_words

#: Methods of context parallelism that give each rank two pieces of a sequence, so that all ranks
#: have equal work in causal attention.
BALANCED = ("zigzag", "allgather")
#: Schedules for one number of micro-batches, or for even numbers only, which a growing batch
#: breaks.
FIXED_BATCH = (TABLE, "dualpipe")


class Case(Struct, frozen=True, kw_only=True):
    """One choice of degrees for one model, cluster and batch. `dp` is always a number here."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    vpp: int
    zero: int
    sp: bool
    schedule: str | None  # None: 1f1b, or interleaved if vpp is above 1
    schedule_rows: list[list[str]] = []  # for schedule "table"
    cp_method: CpMethod = "zigzag"
    zero_group: int = 0
    etp: int | UnsetType = UNSET
    fold_cp: bool | UnsetType = UNSET
    expert_all_to_all: AllToAll | UnsetType = UNSET
    allow_tp_across_nvlink: bool
    micro_batch_size: int
    global_batch_samples: int
    uneven: bool = False  # replicas may take unequal numbers of micro-batches
    replica_micro_batches: list[int] = []  # those numbers, if a plan has them
    batch_ramp: BatchRamp | None = None
    seq_len: int
    objective: Objective | UnsetType = UNSET
    matmul: Matmul = ""
    optim_state: str = ""  # the same as `Optim.state`
    comm_buffer_bytes: int = 0  # 0: unbounded
    offload: str = ""  # the same as `Offload.optimizer`
    offload_weights: bool = False
    precision: Precision = "fp32"
    grad_dtype: Precision = "fp32"
    grad_wire: GradWire | UnsetType = UNSET
    model: Model
    cluster: Cluster

    @property
    def gpus(self) -> int:
        return len(self.cluster.node_names) * self.cluster.gpus_per_node

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.ep * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per replica; the largest, if replicas differ."""
        if self.unequal:
            return max(self.unequal)
        return self.global_batch_samples // self.samples_at_once

    @property
    def samples_at_once(self) -> int:
        """The number of samples in one micro-batch of every replica."""
        return self.micro_batch_size * self.dp * self.ep

    @property
    def unequal(self) -> list[int]:
        """The number of micro-batches of each replica, if the replicas differ; empty if all take
        equally many. They may differ only if `uneven` allows it, and only if the batch does not
        divide equally."""
        if self.replica_micro_batches:
            return self.replica_micro_batches
        if not self.uneven or self.global_batch_samples % self.samples_at_once == 0:
            return []
        return share(self.global_batch_samples // self.micro_batch_size, self.dp * self.ep)

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")

    @property
    def spec(self) -> str:
        """The words that `parallel=` takes: degrees above 1, or "dp1" if there are none. Keys
        follow if no word can express how experts fold."""
        degrees = {name: getattr(self, name) for name in ("tp", "pp", "dp", "cp", "ep")}
        folded = isinstance(self.etp, int) or folds_cp(self)
        mesh_degrees = in_words(self) if folded else None
        if mesh_degrees:  # in a word with etp, ep is that of the expert mesh
            degrees["ep"] = mesh_degrees[1]
        degree_words = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        if mesh_degrees:
            degree_words.append(f"etp{mesh_degrees[0]}")
        if self.zero:
            degree_words.append(f"zero{self.zero}")
        if self.vpp > 1:
            degree_words.append(f"vpp{self.vpp}")
        if self.tp > 1 and not self.sp:
            degree_words.append("sp0")
        keys = []
        if folded and not mesh_degrees:
            if isinstance(self.etp, int):
                keys.append(f"parallel.etp={self.etp}")
            if folds_cp(self):
                keys.append("parallel.fold_cp=true")
        return " ".join(["_".join(degree_words) or "dp1", *keys])


Rule = Callable[[Case], str | None]


def _gpus(case: Case) -> str | None:
    """A layout must use all GPUs, the part of each NVLink domain that its groups fill, or whole
    nodes inside the part that groups of the model fill."""
    if case.ranks == case.gpus:
        return None
    domains = domains_of(case.cluster)
    model = (case.tp, case.cp, case.ep, case.pp)
    usable_gpus = domains.parts(*model)
    whole_nodes = case.ranks % case.cluster.gpus_per_node == 0 and any(
        case.ranks <= limit < case.gpus for limit in usable_gpus
    )
    if whole_nodes or case.ranks in domains.parts(*model, case.dp):
        return None
    nodes = len(case.cluster.node_names)
    shape = f"{nodes} nodes x {case.cluster.gpus_per_node} GPUs = {case.gpus}"
    smaller = [gpus for gpus in usable_gpus if gpus < case.gpus]
    if smaller:
        shape += f", of which groups of {usable_gpus[smaller[0]]} use {smaller[0]}"
    if case.cluster.left_out:
        kinds = [f"{count} {kind}" for kind, count in case.cluster.left_out.items()]
        shape += f" (left out: {', '.join(kinds)})"
    return (
        f"tp{case.tp} x pp{case.pp} x dp{case.dp} x cp{case.cp} x ep{case.ep} = {case.ranks} ranks"
        f" on {shape}"
    )


def _heads(case: Case) -> str | None:
    """A tensor-parallel rank computes whole attention heads, as many as every other rank."""
    if case.model.heads % case.tp:
        return f"tp={case.tp} does not divide {case.model.heads} attention heads"
    return None


def _kv_heads(case: Case) -> str | None:
    """A tensor-parallel rank has whole key-value heads, or shares one with ranks that have no
    other."""
    kv = case.model.kv_heads
    if case.model.mla is None and kv % case.tp and case.tp % kv:
        return f"tp={case.tp} neither divides {kv} key-value heads nor is a multiple of them"
    return None


def _ffn(case: Case) -> str | None:
    """Tensor-parallel ranks hold equal slices of every feed-forward matrix, those of experts
    too."""
    moe = case.model.moe
    widths = [("ffn_hidden", case.model.ffn_hidden)]
    widths += (
        [("moe.ffn_hidden", moe.ffn_hidden), ("moe.shared_ffn_hidden", moe.shared_ffn_hidden)]
        if moe
        else []
    )
    for name, width in widths:
        if width % case.tp:
            return f"tp={case.tp} does not divide {name} {width}"
    return None


def _layers(case: Case) -> str | None:
    """Every stage needs a layer, but with virtual stages embedding and head may be two further
    stages without layers."""
    stages = case.pp * case.vpp
    layers = case.model.layers
    legal = stages <= layers or (case.vpp > 1 and stages == layers + 2)
    return None if legal else f"pp{case.pp} x vpp{case.vpp} = {stages} stages for {layers} layers"


def _virtual_stages(case: Case) -> str | None:
    """Virtual stages are turns that a rank of a pipeline takes, so they need a pipeline."""
    if case.vpp > 1 and case.pp == 1:
        return f"vpp={case.vpp} needs a pipeline (pp of 2 or more)"
    return None


def _nvlink(case: Case) -> str | None:
    """Innermost groups must not leave their NVLink domain: tp, or tp x ep if a domain can hold
    that."""
    domains = domains_of(case.cluster)
    group = domains.expert_group(case.tp, case.ep)
    room = domains.usable(group)
    if case.allow_tp_across_nvlink or case.ranks <= room:
        return None
    size = domains.largest * domains.gpus_per_node
    name = f"tp={case.tp}" + f" x ep={case.ep}" * (group > case.tp)
    held = (
        f": whole groups take {room} of {domains.gpus} GPUs, dp={case.dp} {case.ranks}"
        if room
        else ""
    )
    return (
        f"{name} groups would leave their NVLink domain of {size} GPUs{held}"
        " (parallel.allow_tp_across_nvlink=true plans it anyway and reports its cost)"
    )


def _experts(case: Case) -> str | None:
    """The ranks that share experts must divide them. If tp ranks hold different experts, each sends
    its own tokens, which needs sequence parallelism."""
    etp = case.etp
    ep = expert_mesh(case).ep
    folded = case.etp is not UNSET or case.fold_cp is True
    if ep == 1 and not folded:
        return None
    if case.model.moe is None:
        options = [f"etp={etp}"] * isinstance(etp, int) + ["fold_cp=true"] * (case.fold_cp is True)
        return (
            f"{' '.join(options + [f'ep={case.ep}'] * (case.ep > 1))}, but {case.model.name} has no"
            " experts"
        )
    if isinstance(etp, int) and case.tp % etp:
        legal = ", ".join(map(str, divisors(case.tp)))
        return f"etp={etp} does not divide tp={case.tp}; legal: {legal}"
    if case.fold_cp is True and case.cp == 1:
        return (
            "fold_cp=true with cp=1: no cp ranks to hold different experts; legal: cp of 2 or more,"
            " or leave it out"
        )
    name = f"ep={ep}" + f" (over {', '.join(axes(case))})" * folded
    experts = case.model.moe.experts
    if experts % ep:
        near = " and ".join(map(str, nearest_divisors(experts, ep)))
        return f"{name} does not divide {experts} experts; nearest divisors: {near}"
    if "tp" in axes(case) and not case.sp:
        return (
            f"etp={etp} below tp={case.tp} needs sequence parallelism, by which each tp rank has"
            " tokens of its own"
        )
    return None


def _sequence(case: Case) -> str | None:
    """Balanced context parallelism cuts a sequence into 2 * cp pieces; sequence parallelism cuts
    each rank's piece into tp pieces."""
    balanced = case.cp > 1 and case.cp_method in BALANCED
    cp_pieces = 2 * case.cp if balanced else case.cp
    sp_pieces = case.cp * case.tp if case.sp else case.cp
    reasons = [
        (cp_pieces, f"{case.cp_method}, cp"),
        (sp_pieces, "cp x tp, with sequence parallelism"),
    ]
    for pieces, reason in reasons:
        if case.seq_len % pieces:
            return (
                f"a sequence of {case.seq_len} tokens does not cut into {pieces} equal parts"
                f" ({reason})"
            )
    return None


def _ulysses(case: Case) -> str | None:
    """Ulysses exchanges sequence for heads: each cp rank takes an equal share of the heads."""
    heads = case.model.heads // case.tp
    if case.cp == 1 or case.cp_method != "ulysses" or heads % case.cp == 0:
        return None
    return (
        f"cp={case.cp} does not divide the {heads} attention heads of a tp rank (cp_method=ulysses)"
    )


def _zero_group(case: Case) -> str | None:
    """Hybrid sharding divides the ranks that hold the same weights (dp x cp x ep) into groups of
    equal size, and needs something to shard."""
    return zero_group(case.zero, case.zero_group, case.dp * case.cp * case.ep)


def zero_group(zero: int, group: int, ranks: int) -> str | None:
    """Hybrid sharding divides the `ranks` that hold the same weights (dp x cp x ep) into groups of
    equal size."""
    if not group:
        return None
    if zero == 0:
        return f"zero_group={group} needs something to shard: zero1, zero2 or zero3"
    if ranks % group:
        near = " or ".join(map(str, nearest_divisors(ranks, group)))
        return (
            f"zero_group={group} does not divide the dp x cp x ep = {ranks} ranks that hold the"
            f" same weights ({near} does)"
        )
    return None


def _sharding(case: Case) -> str | None:
    """Gradients leave in the order in which backward completes them, from ZeRO-2 on, and two model
    copies on one pipeline (dualpipe) complete them in different orders."""
    from .schedules import copies

    schedule = case.schedule_name
    return sharding(case.zero, schedule, copies(schedule, case.pp, case.vpp))


def sharding(zero: int, schedule: str, copies: int) -> str | None:
    """Checks a ZeRO stage against a schedule that holds `copies` of the model on one pipeline
    (dualpipe: 2)."""
    if zero >= 2 and copies > 1:
        return (
            f"zero={zero} with schedule {schedule}: both ranks of a stage complete its gradients in"
            " different orders; use zero0 or zero1"
        )
    return None


def _positions(case: Case) -> str | None:
    """Learned positions are a table, which has no rows for a longer sequence."""
    if case.model.position == "learned" and case.seq_len > case.model.max_seq_len:
        return (
            f"train.seq_len={case.seq_len}, {case.model.name} has {case.model.max_seq_len} learned"
            " positions"
        )
    return None


def _batch(case: Case) -> str | None:
    """Every replica takes equally many whole micro-batches, unless `parallel.uneven` allows one
    more; replicas that exchange tokens of experts take equally many in any case."""
    samples = case.samples_at_once
    if (
        case.uneven
        and case.global_batch_samples % case.micro_batch_size == 0
        and case.global_batch_samples >= samples
    ):
        return _unequal(case) if case.unequal else None
    if case.global_batch_samples % samples:
        below = case.global_batch_samples // samples * samples
        near = " or ".join(str(size) for size in (below, below + samples) if size)
        return (
            f"a global batch of {case.global_batch_samples} samples does not split into"
            f" micro-batches of {case.micro_batch_size} over dp{case.dp} x ep{case.ep} ="
            f" {case.dp * case.ep} ranks (train.global_batch_samples={near} does)"
        )
    return None


def _unequal(case: Case) -> str | None:
    """Checks numbers of micro-batches that differ by replica. From ZeRO-2 on, all replicas compute
    as many as the largest share (`plan.batch.computed`)."""
    largest = max(case.unequal)
    smallest = min(case.unequal)
    problem = None
    if case.ep > 1:
        problem = (
            f"ep={case.ep}: the all-to-all of experts joins the replicas in every micro-batch, so"
            " all need equally many"
        )
    elif case.batch_ramp is not None:
        problem = "train.batch_ramp grows the batch in whole micro-batches on every replica"
    elif case.schedule_name == TABLE:
        problem = "a schedule table is for one number of micro-batches"
    else:
        from .schedules import illegal

        counts = sorted(set(case.unequal)) if case.zero < 2 else [largest]
        refusals = (illegal(case.schedule_name, case.pp, count, case.vpp) for count in counts)
        problem = next(filter(None, refusals), None)
    return problem and f"replicas take {smallest} or {largest} micro-batches: {problem}"


def _schedule(case: Case) -> str | None:
    """A schedule is an order of actions for certain numbers of stages and micro-batches."""
    from .schedules import illegal, read_rows

    if case.schedule_name != TABLE:
        return illegal(case.schedule_name, case.pp, case.micro_batches, case.vpp)
    if not case.schedule_rows:
        return "schedule table needs parallel.schedule_file"
    table = read_rows(case.schedule_rows)
    if (table.pp, table.vpp, table.micro_batches) == (case.pp, case.vpp, case.micro_batches):
        return None
    return (
        f"the table is for pp{table.pp} x vpp{table.vpp} and {table.micro_batches} micro-batches,"
        f" the job has pp{case.pp} x vpp{case.vpp} and {case.micro_batches}"
    )


#: The rules for every program's layout.
LAYOUT: dict[str, Rule] = {
    "gpus": _gpus,
    "heads": _heads,
    "kv_heads": _kv_heads,
    "ffn": _ffn,
    "layers": _layers,
    "virtual_stages": _virtual_stages,
    "nvlink": _nvlink,
    "experts": _experts,
    "sequence": _sequence,
    "ulysses": _ulysses,
    "zero_group": _zero_group,
    "positions": _positions,
    "batch": _batch,
    "schedule": _schedule,
    "sharding": _sharding,
}


def broken(case: Case, rules: Mapping[str, Rule] = LAYOUT) -> tuple[str, str] | None:
    """Finds the first rule that `case` breaks. Returns (rule, problem), or None."""
    for name, rule in rules.items():
        if problem := rule(case):
            return name, problem
    return None
