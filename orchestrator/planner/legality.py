"""Refuses degrees that break a rule of `plan.supported.LAYOUT`: the rule, its numbers, the nearest
legal degrees."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

from msgspec import UNSET, UnsetType, structs

from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.batch import divisors
from orchestrator.plan.domains import domains_of
from orchestrator.plan.expert_mesh import tensor_ranks
from orchestrator.plan.supported import Case, broken

Near = Callable[
    [int, int, bool], list[int]
]  # (degree, the most there can be, whether 1 may start) -> degrees to try


def check(case: Case) -> None:
    """Raise OrchError (65) naming the broken rule, its numbers and the nearest legal degrees."""
    breach = broken(case)
    if not breach:
        return
    rule, problem = breach
    specs = dict.fromkeys(near.spec for near in nearest_legal(case))
    hint = f"nearest legal: {', '.join(specs)}" if specs else "no other degrees are legal"
    raise OrchError(f"parallel: rule {rule!r}: {problem}; {hint}", Exit.CONFIG)


def nearest_legal(case: Case, limit: int = 3) -> list[Case]:
    """Up to `limit` legal cases, nearest first: fewest changed degrees, then the smallest change by
    factors of two.

    Tries all tp, pp, cp, ep, vpp within a factor of four of the wanted ones, else those that divide
    the GPUs; dp is what is taken when left out. How experts fold stays as it is where it can.
    """
    for near in (_near, partial(_dividing, case.gpus)):
        legal = [
            (_distance(case, candidate), candidate)
            for candidate in _around(case, near)
            if broken(candidate) is None
        ]
        if legal:
            return [candidate for _, candidate in sorted(legal, key=lambda pair: pair[0])[:limit]]
    return []


def _around(case: Case, near: Near) -> Iterator[Case]:
    domains = domains_of(case.cluster)
    experts = case.model.moe.experts if case.model.moe else 1
    stages = min(case.model.layers, case.gpus)
    for tp, pp in product(near(case.tp, case.model.heads, True), near(case.pp, stages, True)):
        for cp, ep in product(
            near(case.cp, case.gpus, case.fold_cp is True), near(case.ep, experts, False)
        ):
            dp = domains.filled(tp, cp, ep, pp, case.allow_tp_across_nvlink) // (tp * pp * cp * ep)
            if not dp:
                continue
            for vpp, etp in product(near(case.vpp, case.model.layers, False), _cuts(case, tp)):
                cut = isinstance(etp, int) and etp < tp
                sp = case.sp or (case.tp == 1 and tp > 1) or cut
                candidate = structs.replace(
                    case, tp=tp, pp=pp, cp=cp, ep=ep, dp=dp, vpp=vpp, sp=sp, etp=etp
                )
                plain = case.model.moe is None or (cp == 1 and isinstance(etp, int))
                yield structs.replace(candidate, fold_cp=UNSET) if plain else candidate


def _cuts(case: Case, tp: int) -> list[int | UnsetType]:
    """Ranks of tp that each expert may be cut over. Without experts there is nothing to cut."""
    if not isinstance(case.etp, int) or case.model.moe is None:
        return [UNSET]
    return [*divisors(tp)]


def _dividing(gpus: int, value: int, largest: int, start: bool) -> list[int]:
    """All degrees that could be, for `value`; one that is 1 stays so, unless it may `start`."""
    return (
        [1]
        if value == 1 and not start
        else [degree for degree in range(1, largest + 1) if gpus % degree == 0]
    )


def _near(value: int, largest: int, start: bool) -> list[int]:
    """Degrees to try for `value`: from a quarter to four times it. An axis of degree 1 stays
    unused, or may `start`."""
    if value == 1:
        return [degree for degree in (1, 2, 4, 8) if degree <= largest] if start else [1]
    low = 1 if value <= 4 else value // 4
    high = min(largest, value * 4)
    span = range(low, high + 1)
    if (
        len(span) > 24
    ):  # wide: keep to powers of two and the value's own divisors and small multiples
        kept_degrees = {2**k for k in range(low.bit_length() - 1, high.bit_length() + 1)}
        kept_degrees |= {value // d for d in (1, 2, 3, 4) if value % d == 0} | {
            value * d for d in (1, 2, 3, 4)
        }
        return sorted(v for v in kept_degrees | {largest} if 1 <= v <= high)
    return list(span)


def _distance(case: Case, candidate: Case) -> tuple[int, float, float, str]:
    """Sort key: fewest changed degrees (dp not counted), least change in powers of two, least
    change of dp, spec."""
    axes = ("tp", "pp", "cp", "ep", "vpp")
    factors = [abs(math.log2(getattr(candidate, axis) / getattr(case, axis))) for axis in axes]
    if isinstance(case.etp, int):
        factors.append(abs(math.log2(tensor_ranks(candidate) / case.etp)))
    changed = sum(factor > 0 for factor in factors)
    return changed, sum(factors), abs(math.log2(candidate.dp / max(1, case.dp))), candidate.spec
