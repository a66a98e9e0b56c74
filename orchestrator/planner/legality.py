"""The rules that degrees must keep, each by name; and the legal words nearest to an illegal one.

A rule is a function from a `Case` to a problem or None. The first broken rule is reported in one line: the rule, the
numbers, and the nearest words that keep every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from msgspec import Struct, structs

from orchestrator.errors import OrchError
from orchestrator.plan import Exit, schedules
from orchestrator.plan.batch import share
from orchestrator.plan.document import Cluster, CpMethod, Model
from orchestrator.plan.legal import sharding, unequal


class Case(Struct, frozen=True, kw_only=True):
    """One choice of degrees against one model, cluster and batch. `dp` is a number here, never left out."""

    tp: int
    cp: int
    ep: int
    pp: int
    dp: int
    vpp: int
    zero: int
    sp: bool
    schedule: str | None  # None: what suits vpp
    schedule_rows: list[list[str]] = []  # of schedule "table"
    cp_method: CpMethod = "zigzag"
    zero_group: int = 0
    allow_tp_across_nvlink: bool
    micro_batch_size: int
    global_batch_samples: int
    uneven: bool = False  # replicas may take unequal numbers of micro-batches
    batch_ramp: bool = False
    seq_len: int
    model: Model
    cluster: Cluster

    @property
    def gpus(self) -> int:
        return len(self.cluster.node_names) * self.cluster.gpus_per_node

    @property
    def micro_batches(self) -> int:
        """Of a replica; the most, where they take unequal numbers."""
        return self.unequal[0] if self.unequal else self.global_batch_samples // self.samples_at_once

    @property
    def samples_at_once(self) -> int:
        """Of one micro-batch on every replica."""
        return self.micro_batch_size * self.dp * self.ep

    @property
    def unequal(self) -> list[int]:
        """Micro-batches that each replica takes, where that is allowed and they do not divide; else empty."""
        if not self.uneven or self.global_batch_samples % self.samples_at_once == 0:
            return []
        return share(self.global_batch_samples // self.micro_batch_size, self.dp * self.ep)

    @property
    def schedule_name(self) -> str:
        return self.schedule or ("interleaved" if self.vpp > 1 else "1f1b")

    @property
    def word(self) -> str:
        """As `parallel=` takes it: degrees above 1, dp when the word would otherwise leave it out of sight."""
        parts = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "dp", "cp", "ep") if getattr(self, name) > 1]
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [f"vpp{self.vpp}"] if self.vpp > 1 else []
        parts += ["sp0"] if self.tp > 1 and not self.sp else []
        return "_".join(parts) or "dp1"


def _gpus(case: Case) -> str | None:
    model_gpus = case.tp * case.pp * case.cp * case.ep
    if model_gpus * case.dp == case.gpus:
        return None
    shape = f"{len(case.cluster.node_names)} nodes x {case.cluster.gpus_per_node} GPUs = {case.gpus}"
    return (
        f"tp{case.tp} x pp{case.pp} x dp{case.dp} x cp{case.cp} x ep{case.ep} = {model_gpus * case.dp} ranks on {shape}"
    )


def _heads(case: Case) -> str | None:
    if case.model.heads % case.tp:
        return f"tp={case.tp} does not divide {case.model.heads} attention heads"
    return None


def _kv_heads(case: Case) -> str | None:
    kv = case.model.kv_heads
    if case.model.mla is None and kv % case.tp and case.tp % kv:
        return f"tp={case.tp} neither divides {kv} key-value heads nor is a multiple of them"
    return None


def _ffn(case: Case) -> str | None:
    moe = case.model.moe
    widths = [("ffn_hidden", case.model.ffn_hidden)]
    widths += [("moe.ffn_hidden", moe.ffn_hidden), ("moe.shared_ffn_hidden", moe.shared_ffn_hidden)] if moe else []
    for name, width in widths:
        if width % case.tp:
            return f"tp={case.tp} does not divide {name} {width}"
    return None


def _layers(case: Case) -> str | None:
    if case.pp * case.vpp > case.model.layers:
        return f"pp{case.pp} x vpp{case.vpp} = {case.pp * case.vpp} stages for {case.model.layers} layers"
    return None


def _virtual_stages(case: Case) -> str | None:
    if case.vpp > 1 and case.pp == 1:
        return f"vpp={case.vpp} needs a pipeline (pp of 2 or more)"
    return None


def _nvlink(case: Case) -> str | None:
    """A tensor-parallel group is innermost, so it stays inside when every domain holds whole groups."""
    if case.allow_tp_across_nvlink:
        return None
    for domain in case.cluster.nvlink_domains:
        size = len(domain) * case.cluster.gpus_per_node
        if size % case.tp:
            return (
                f"tp={case.tp} groups would leave their NVLink domain of {size} GPUs"
                " (parallel.allow_tp_across_nvlink=true plans it all the same and says what it costs)"
            )
    return None


def _experts(case: Case) -> str | None:
    if case.ep == 1:
        return None
    if case.model.moe is None:
        return f"ep={case.ep}, but {case.model.name} has no experts"
    if case.model.moe.experts % case.ep:
        return f"ep={case.ep} does not divide {case.model.moe.experts} experts"
    return None


def _sequence(case: Case) -> str | None:
    """Balanced context parallelism cuts a sequence in 2*cp pieces, sequence parallelism each rank's part in tp."""
    balanced = case.cp > 1 and case.cp_method in ("zigzag", "allgather")
    pieces = ((2 if balanced else 1) * case.cp, case.cp * (case.tp if case.sp else 1))
    for piece, why in zip(pieces, (f"{case.cp_method}, cp", "cp x tp, with sequence parallelism"), strict=True):
        if case.seq_len % piece:
            return f"a sequence of {case.seq_len} tokens does not cut into {piece} equal parts ({why})"
    return None


def _ulysses(case: Case) -> str | None:
    """Heads are exchanged for sequence: each rank of the group takes its share of them."""
    heads = case.model.heads // case.tp
    if case.cp == 1 or case.cp_method != "ulysses" or heads % case.cp == 0:
        return None
    return f"cp={case.cp} does not divide the {heads} attention heads of a tp rank (cp_method=ulysses)"


def _zero_group(case: Case) -> str | None:
    """Hybrid sharding cuts the ranks that hold the same weights into groups of equal size."""
    if not case.zero_group:
        return None
    ranks = case.dp * case.cp * case.ep
    if case.zero == 0:
        return f"zero_group={case.zero_group} needs something to shard: zero1, zero2 or zero3"
    if ranks % case.zero_group:
        return (
            f"zero_group={case.zero_group} does not divide the dp x cp x ep = {ranks} ranks that hold the same weights"
        )
    return None


def _sharding(case: Case) -> str | None:
    name, replicas = case.schedule_name, case.dp * case.cp * case.ep
    return sharding(case.zero, case.zero_group, case.pp, name, replicas, schedules.copies(name, case.pp, case.vpp))


def _positions(case: Case) -> str | None:
    if case.model.position == "learned" and case.seq_len > case.model.max_seq_len:
        return f"train.seq_len={case.seq_len}, {case.model.name} has {case.model.max_seq_len} learned positions"
    return None


def _batch(case: Case) -> str | None:
    samples = case.samples_at_once
    if case.uneven and case.global_batch_samples % case.micro_batch_size == 0 and case.global_batch_samples >= samples:
        return _unequal(case) if case.unequal else None
    if case.global_batch_samples % samples:
        below = case.global_batch_samples // samples * samples
        near = " or ".join(str(size) for size in (below, below + samples) if size)
        return (
            f"a global batch of {case.global_batch_samples} samples does not split into micro-batches of"
            f" {case.micro_batch_size} over dp{case.dp} x ep{case.ep} = {case.dp * case.ep} ranks"
            f" (train.global_batch_samples={near} does)"
        )
    return None


def _unequal(case: Case) -> str | None:
    """From ZeRO-2 on all compute as many micro-batches as the replica that takes most (`plan.batch.computed`)."""
    counts = case.unequal if case.zero < 2 else case.unequal[:1]
    problem = unequal(counts, case.ep, case.pp, case.vpp, case.schedule_name, case.batch_ramp)
    return problem and f"replicas take {case.unequal[-1]} or {case.unequal[0]} micro-batches: {problem}"


def _schedule(case: Case) -> str | None:
    if case.schedule_name != schedules.TABLE:
        return schedules.illegal(case.schedule_name, case.pp, case.micro_batches, case.vpp)
    if not case.schedule_rows:
        return "schedule table needs parallel.schedule_file"
    table = schedules.read_rows(case.schedule_rows)
    found = (table.pp, table.vpp, table.micro_batches)
    if found == (case.pp, case.vpp, case.micro_batches):
        return None
    return "the table is for pp{} x vpp{} and {} micro-batches".format(*found) + (
        f", the job has pp{case.pp} x vpp{case.vpp} and {case.micro_batches}"
    )


RULES: dict[str, Callable[[Case], str | None]] = {
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


def broken(case: Case) -> tuple[str, str] | None:
    """(rule, what is wrong) of the first rule that `case` breaks, or None."""
    for name, rule in RULES.items():
        problem = rule(case)
        if problem:
            return name, problem
    return None


def check(case: Case) -> None:
    """Raise OrchError (65) naming the broken rule, its numbers and the nearest legal words."""
    found = broken(case)
    if not found:
        return
    rule, problem = found
    words = [near.word for near in nearest_legal(case)]
    hint = f"nearest legal: {', '.join(words)}" if words else "no degrees near these are legal"
    raise OrchError(f"parallel: rule {rule!r}: {problem}; {hint}", Exit.CONFIG)


def nearest_legal(case: Case, limit: int = 3) -> list[Case]:
    """Up to `limit` legal cases, nearest first: fewest changed degrees, then the smallest change by factors of two.

    Searches every tp, pp, cp, ep, vpp within a factor of four of the wanted ones, dp taking what the cluster leaves.
    """
    found: list[tuple[tuple, Case]] = []
    for candidate in _around(case):
        if broken(candidate) is None:
            found.append((_distance(case, candidate), candidate))
    found.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in found[:limit]]


def _around(case: Case) -> Iterator[Case]:
    for tp in _near(case.tp, case.model.heads, start=True):
        for pp in _near(case.pp, min(case.model.layers, case.gpus), start=True):
            for cp in _near(case.cp, case.gpus):
                for ep in _near(case.ep, case.model.moe.experts if case.model.moe else 1):
                    rest, remainder = divmod(case.gpus, tp * pp * cp * ep)
                    if remainder or not rest:
                        continue
                    for vpp in _near(case.vpp, case.model.layers):
                        sp = case.sp or (case.tp == 1 and tp > 1)
                        yield structs.replace(case, tp=tp, pp=pp, cp=cp, ep=ep, dp=rest, vpp=vpp, sp=sp)


def _near(value: int, most: int, start: bool = False) -> list[int]:
    """Degrees to try for `value`: from a quarter to four times it. An axis of degree 1 stays unused, or may `start`."""
    if value == 1:
        return [degree for degree in (1, 2, 4, 8) if degree <= most] if start else [1]
    low, high = 1 if value <= 4 else value // 4, min(most, value * 4)
    span = range(low, high + 1)
    if len(span) > 24:  # wide: keep to powers of two and the value's own divisors and small multiples
        keep = {2**k for k in range(low.bit_length() - 1, high.bit_length() + 1)}
        keep |= {value // d for d in (1, 2, 3, 4) if value % d == 0} | {value * d for d in (1, 2, 3, 4)}
        return sorted(v for v in keep | {most} if 1 <= v <= high)
    return list(span)


def _distance(wanted: Case, other: Case) -> tuple[int, float, float, str]:
    """Order of suggestions: fewest degrees changed (dp follows for free), least change in powers of two, the word."""
    axes = ("tp", "pp", "cp", "ep", "vpp")
    factors = [abs(math.log2(getattr(other, axis) / getattr(wanted, axis))) for axis in axes]
    changed = sum(factor > 0 for factor in factors)
    return changed, sum(factors), abs(math.log2(other.dp / max(1, wanted.dp))), other.word
