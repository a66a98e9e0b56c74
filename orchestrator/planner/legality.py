"""Refuses degrees that break a rule of `plan.supported.LAYOUT`.

The refusal names the rule, its numbers and the nearest legal degrees.
"""

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

# (degree, largest possible degree, whether an axis of degree 1 may grow) -> degrees to try
Near = Callable[[int, int, bool], list[int]]


def check(case: Case) -> None:
    """Raises OrchError (65) with the broken rule, its numbers and the nearest legal degrees."""
    breach = broken(case)
    if not breach:
        return
    rule, problem = breach
    specs = dict.fromkeys(near.spec for near in nearest_legal(case))
    hint = f"nearest legal: {', '.join(specs)}" if specs else "no other degrees are legal"
    raise OrchError(f"parallel: rule {rule!r}: {problem}; {hint}", Exit.CONFIG)


def nearest_legal(case: Case, limit: int = 3) -> list[Case]:
    """Returns up to `limit` legal cases, nearest first.

    Near means the fewest changed degrees, then the smallest change by factors of two. All tp, pp,
    cp, ep and vpp within a factor of four of the configured ones are tried, else those that divide
    the GPUs. dp is the degree that is taken when it is left out. The experts keep their folding if
    they can.
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
    """Yields the cases that `near` reaches from this case."""
    domains = domains_of(case.cluster)
    experts = case.model.moe.experts if case.model.moe else 1
    stages = min(case.model.layers, case.gpus)
    for tp, pp in product(near(case.tp, case.model.heads, True), near(case.pp, stages, True)):
        for cp, ep in product(
            near(case.cp, case.gpus, case.fold_cp is True),
            near(case.ep, experts, False),
        ):
            ranks_per_replica = tp * pp * cp * ep
            dp = domains.filled(tp, cp, ep, pp, case.allow_tp_across_nvlink) // ranks_per_replica
            if not dp:
                continue
            for vpp, etp in product(near(case.vpp, case.model.layers, False), _cuts(case, tp)):
                cut = isinstance(etp, int) and etp < tp
                sp = case.sp or (case.tp == 1 and tp > 1) or cut
                candidate = structs.replace(
                    case,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    ep=ep,
                    dp=dp,
                    vpp=vpp,
                    sp=sp,
                    etp=etp,
                )
                plain = case.model.moe is None or (cp == 1 and isinstance(etp, int))
                yield structs.replace(candidate, fold_cp=UNSET) if plain else candidate


def _cuts(case: Case, tp: int) -> list[int | UnsetType]:
    """Returns the numbers of tp ranks that each expert may be cut over.

    Without experts there is nothing to cut.
    """
    if not isinstance(case.etp, int) or case.model.moe is None:
        return [UNSET]
    return [*divisors(tp)]


def _dividing(gpus: int, value: int, largest: int, start: bool) -> list[int]:
    """Returns all degrees that divide the GPUs. A degree of 1 stays so, unless it may `start`."""
    return (
        [1]
        if value == 1 and not start
        else [degree for degree in range(1, largest + 1) if gpus % degree == 0]
    )


def _near(value: int, largest: int, start: bool) -> list[int]:
    """Returns the degrees to try for `value`: from a quarter to four times it.

    An axis of degree 1 stays unused, unless it may `start`.
    """
    if value == 1:
        return [degree for degree in (1, 2, 4, 8) if degree <= largest] if start else [1]
    low = 1 if value <= 4 else value // 4
    high = min(largest, value * 4)
    span = range(low, high + 1)
    # A wide span is thinned to powers of two and the value's own divisors and small multiples.
    if len(span) > 24:
        exponents = range(low.bit_length() - 1, high.bit_length() + 1)
        kept_degrees = {2**exponent for exponent in exponents}
        kept_degrees |= {value // d for d in (1, 2, 3, 4) if value % d == 0}
        kept_degrees |= {value * d for d in (1, 2, 3, 4)}
        return sorted(v for v in kept_degrees | {largest} if 1 <= v <= high)
    return list(span)


def _distance(case: Case, candidate: Case) -> tuple[int, float, float, str]:
    """Returns the sort key of a candidate.

    The key is the number of changed degrees without dp, the change in powers of two, the change of
    dp, and the spec.
    """
    axes = ("tp", "pp", "cp", "ep", "vpp")
    factors = [abs(math.log2(getattr(candidate, axis) / getattr(case, axis))) for axis in axes]
    if isinstance(case.etp, int):
        factors.append(abs(math.log2(tensor_ranks(candidate) / case.etp)))
    changed = sum(factor > 0 for factor in factors)
    dp_factor = abs(math.log2(candidate.dp / max(1, case.dp)))
    return changed, sum(factors), dp_factor, candidate.spec
