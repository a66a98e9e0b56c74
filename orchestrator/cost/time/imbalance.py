"""The imbalance of the ranks that share the experts: the load of the fullest rank over the mean.

Every layer waits for its fullest rank, for its products and for the rows that the exchange brings
it. Loads of single experts differ by a share `spread` of their mean (a standard deviation, of one
layer and step; `parameters`, "moe.spread"). A rank holds an ep-th of the experts. If ranks were
independent, loads would differ by spread * sqrt(ep / (experts - 1)) of the mean. The fullest rank
is as far above the mean as the largest of ep normal numbers is expected to be (Blom 1958). The
fixed sum of the loads moves all of them alike. There is no imbalance if every rank holds all
experts.
"""

from __future__ import annotations

from math import sqrt

from msgspec import UNSET

from orchestrator.cost.dual import Number
from orchestrator.cost.rates import Rates
from orchestrator.plan.document import Model, Moe, Parallel
from orchestrator.plan.expert_mesh import expert_mesh

LEAST_SPREAD = 1e-3  # measured loads are never quite even


def spread_name(moe: Moe) -> str:
    """Returns the name of a router's parameter in the profile, by what balances its loads.

    That is a bias that every step's loads move, a term of the loss, or nothing.
    """
    if moe.bias_update:
        return "moe.spread.bias"
    return "moe.spread.loss" if moe.balance_loss else "moe.spread.none"


def load_factor(model: Model, parallel: Parallel, spread: float) -> float:
    """Returns the load of the fullest rank over the mean; 1 if all experts are on every rank.

    It is at most what `top_k` different experts per token allow, or what experts take
    (`moe.capacity_factor`).
    """
    moe = model.moe
    ep = expert_mesh(parallel).ep
    if moe is None or ep == 1:
        return 1.0
    limit = (
        moe.experts / moe.top_k if moe.capacity_factor is UNSET else max(1.0, moe.capacity_factor)
    )
    return min(1.0 + spread * _distance(moe.experts, ep), ep, limit)


def spread_of(factor: float, experts: int, ep: int) -> float:
    """Returns the spread with which `load_factor` gives the `factor` measured on ep >= 2 ranks."""
    return max(LEAST_SPREAD, (factor - 1.0) / _distance(experts, ep))


def _distance(experts: int, ep: int) -> float:
    """Returns the expected load of the fullest rank above the mean, for a spread of 1."""
    # Imported here because it takes a millisecond, which models without experts need not pay.
    from statistics import NormalDist

    return NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25)) * sqrt(ep / (experts - 1))


def imbalance(parallel: Parallel, rate: Rates) -> Number:
    """Returns the plan's load factor, with the uncertainty of the profile's parameter."""
    factor = parallel.expert_imbalance
    return 1.0 + (factor - 1.0) * rate.expert_spread if isinstance(factor, float) else 1.0
