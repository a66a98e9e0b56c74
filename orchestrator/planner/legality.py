"""Refuses degrees that break a rule of `plan.supported.LAYOUT`: the rule, its numbers, the nearest legal degrees."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import structs

from orchestrator.errors import OrchError
from orchestrator.plan import Exit
from orchestrator.plan.domains import domains_of
from orchestrator.plan.supported import Case, broken


def check(case: Case) -> None:
    """Raise OrchError (65) naming the broken rule, its numbers and the nearest legal degrees."""
    found = broken(case)
    if not found:
        return
    rule, problem = found
    specs = [near.spec for near in nearest_legal(case)]
    hint = f"nearest legal: {', '.join(specs)}" if specs else "no degrees near these are legal"
    raise OrchError(f"parallel: rule {rule!r}: {problem}; {hint}", Exit.CONFIG)


def nearest_legal(case: Case, limit: int = 3) -> list[Case]:
    """Up to `limit` legal cases, nearest first: fewest changed degrees, then the smallest change by factors of two.

    Tries all tp, pp, cp, ep, vpp within a factor of four of the wanted ones; dp is what is taken when left out.
    """
    found: list[tuple[tuple[int, float, float, str], Case]] = []
    for candidate in _around(case):
        if broken(candidate) is None:
            found.append((_distance(case, candidate), candidate))
    found.sort(key=lambda pair: pair[0])
    return [candidate for _, candidate in found[:limit]]


def _around(case: Case) -> Iterator[Case]:
    domains = domains_of(case.cluster)
    for tp in _near(case.tp, case.model.heads, start=True):
        for pp in _near(case.pp, min(case.model.layers, case.gpus), start=True):
            for cp in _near(case.cp, case.gpus):
                for ep in _near(case.ep, case.model.moe.experts if case.model.moe else 1):
                    rest = domains.filled(tp, cp, ep, pp, case.allow_tp_across_nvlink) // (tp * pp * cp * ep)
                    if not rest:
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
    """Sort key: fewest changed degrees (dp not counted), least change in powers of two, least change of dp, spec."""
    axes = ("tp", "pp", "cp", "ep", "vpp")
    factors = [abs(math.log2(getattr(other, axis) / getattr(wanted, axis))) for axis in axes]
    changed = sum(factor > 0 for factor in factors)
    return changed, sum(factors), abs(math.log2(other.dp / max(1, wanted.dp))), other.spec
