"""Computes how many tokens of a sequence an expert takes (`moe.capacity_factor`)."""

from __future__ import annotations

from math import ceil

from msgspec import UNSET

from .document import Model, Moe


def expert_capacity(moe: Moe, seq_len: int) -> int | None:
    """The largest number of a sequence's tokens that each expert takes; None if there is no limit.

    It is the capacity factor times an equal share of the choices, rounded up (Switch, arXiv
    2101.03961, equation 3, with several choices per token).
    """
    if moe.capacity_factor is UNSET:
        return None
    # Imported here because it takes half a millisecond, and few models have a capacity factor.
    from fractions import Fraction

    share = Fraction(moe.top_k * seq_len, moe.experts)
    # The decimal digits count, not the binary float: 1.1 * 10 is 11, not a little more.
    return ceil(Fraction(str(moe.capacity_factor)) * share)


def taken_choices(moe: Moe, seq_len: int) -> float:
    """The number of a token's `top_k` choices that experts take if all experts are chosen equally
    often."""
    capacity = expert_capacity(moe, seq_len)
    if capacity is None:
        return moe.top_k
    return min(float(moe.top_k), capacity * moe.experts / seq_len)


def mlp_width(model: Model, moe: Moe | None, seq_len: int, load: float = 1.0) -> float:
    """The number of inner features of a layer's MLPs that a token passes. `moe`: None for a dense
    layer; `load`: the load of the experts' rank over the mean."""
    if moe is None:
        return float(model.ffn_hidden)
    return taken_choices(moe, seq_len) * moe.ffn_hidden * load + moe.shared_ffn_hidden
