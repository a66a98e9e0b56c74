"""How many tokens of a sequence an expert takes (`moe.capacity_factor`)."""

from __future__ import annotations

from math import ceil

from msgspec import UNSET

from .document import Model, Moe


def expert_capacity(moe: Moe, seq_len: int) -> int | None:
    """Tokens of a sequence that each expert takes at most, its factor times an equal share of the
    choices, rounded up (Switch, arXiv 2101.03961, equation 3, with several choices a token); None:
    all that choose it."""
    if moe.capacity_factor is UNSET:
        return None
    from fractions import (
        Fraction,
    )  # half a millisecond, which models without such a factor do not pay

    share = Fraction(moe.top_k * seq_len, moe.experts)
    return ceil(
        Fraction(str(moe.capacity_factor)) * share
    )  # as it is written: 1.1 * 10 is 11, not a little more


def taken_choices(moe: Moe, seq_len: int) -> float:
    """Of a token's `top_k` choices, those that experts take where all experts are chosen equally
    often."""
    capacity = expert_capacity(moe, seq_len)
    return (
        moe.top_k if capacity is None else min(float(moe.top_k), capacity * moe.experts / seq_len)
    )


def mlp_width(model: Model, moe: Moe | None, seq_len: int, load: float = 1.0) -> float:
    """Inner features of a layer's MLPs that a token passes; `moe`: None for a dense layer; `load`:
    of the rank whose experts they are, over the mean."""
    if moe is None:
        return float(model.ffn_hidden)
    return taken_choices(moe, seq_len) * moe.ffn_hidden * load + moe.shared_ffn_hidden
