"""Dropout (Srivastava et al. 2014) and jitter, equal on every layout: a counter-based generator
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") on (seed, name of the module,
token, feature).

A token's `token_index` is its number in the run's data order, different for every step, sample and
position; shards of a sequence carry the numbers of their tokens. So any rank draws the same mask
for its elements as a single process, and so do recomputation and a resumed run. No generator has a
state.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.plan.document import Model

_BITS = 24  # of a random number of jitter: the precision of fp32


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


#: The odd constants of splitmix64 and MurmurHash3's finaliser.
_STEP, _FIRST, _SECOND = (
    _signed(x) for x in (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
)


def salt_of(name: str) -> int:
    """Returns a random int64 that is a function of `name`."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def spread(x: Tensor) -> Tensor:
    """Moves counters far from each other, for `mix`."""
    return x * _STEP


def mix(x: Tensor) -> Tensor:
    """Scatters int64 counters over all 64 bits; a bijection. Products wrap around."""
    x = (x ^ _shifted(x, 32)) * _FIRST
    x = (x ^ _shifted(x, 29)) * _SECOND
    return x ^ _shifted(x, 32)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifts right and fills with zeros; torch's shift keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def kept(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Returns bool of the broadcast shape of `rows` and `columns`, which are mixed: True with
    probability 1 - rate.

    Multiplicative hashing (Dietzfelbinger et al. 1997): of the product of a mixed number and an odd
    mixed number the highest of 64 bits decide. It takes two kernels over the broadcast shape.
    """
    return rows * (columns | 1) >= int(rate * 2.0**64) - (1 << 63)


def mixed_counters(count: int, device: torch.device | str) -> Tensor:
    """Returns the mixed int64 numbers 0, 1, ... of features or heads."""
    return mix(torch.arange(count, device=device) * _STEP)


class Seeded(nn.Module):
    """A module whose random numbers are a function of the seed. `width`: the features or heads of
    the whole model at this module."""

    def __init__(self, rate: float, width: int):
        super().__init__()
        self.rate = rate
        self.width = width
        self.scale = 1.0 / (1.0 - rate)
        self.salt: Tensor  # int64 scalar, set by `seed_dropout`
        # int64 [width], set by `seed_dropout`: to a compiler a product of `arange` looks like
        # indices
        self.counters: Tensor

    def extra_repr(self) -> str:
        return f"{self.rate}"


class Dropout(Seeded):
    """[b, s, h] -> the same with some elements zeroed, the others scaled by 1 / (1 - rate)."""

    def forward(self, x: Tensor, token_index: Tensor | None) -> Tensor:
        """`token_index` int64 [b, s]: the numbers of the tokens in `x`; not read when the rate is
        0."""
        if not self.rate:
            return x
        assert token_index is not None
        keep = kept(
            mix(token_index * _STEP + self.salt)[..., None],
            self.counters,
            self.rate,
        )
        return _Masked.apply(x, keep, self.scale)


class _Masked(torch.autograd.Function):
    """x * keep * scale, with one kernel on CUDA in each direction; saves only the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return torch.ops.aten.native_dropout_backward(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return torch.ops.aten.native_dropout_backward(grad, keep, ctx.scale), None, None


class AttentionDropout(Seeded):
    """Dropout of attention probabilities. `first_head`: the number of this rank's first head in the
    whole model."""

    def __init__(self, rate: float, heads: int):
        super().__init__(rate, heads)
        self.first_head = 0

    def kept(self, queries: Tensor, keys: Tensor, heads: int) -> Tensor:
        """Token numbers int64 [b, s_q] and [b, s_k] -> bool [b, heads, s_q, s_k]; the caller
        multiplies the kept probabilities by `scale`."""
        head = self.counters[self.first_head : self.first_head + heads]
        rows = mix(queries * _STEP + self.salt)[:, None, :, None]
        columns = mix(keys[:, None, :] * _STEP + head[:, None])[:, :, None, :]
        return kept(rows, columns, self.rate)


class Jitter(Seeded):
    """[n, hidden] -> the same, each number times a random one between 1 - `rate` and 1 + `rate`.
    The
    input of routers is jittered so that experts of nearly equal score are all tried (Switch, arXiv
    2101.03961, table 11). Backward needs one saved number per token."""

    def forward(self, x: Tensor, token_index: Tensor) -> Tensor:
        """`token_index` int64 [n]: the numbers of the tokens in `x`."""
        return _Jittered.apply(
            x,
            mix(spread(token_index) + self.salt),
            self.counters,
            self.rate,
        )


def jitter_noise(
    rows: Tensor,
    columns: Tensor,
    rate: float,
    dtype: torch.dtype,
) -> Tensor:
    """Returns the random factors [n, hidden] of mixed int64 [n] and [hidden], by multiplicative
    hashing as in `kept`."""
    bits = (rows[:, None] * (columns | 1)) >> (64 - _BITS) & ((1 << _BITS) - 1)
    return bits.to(dtype).mul_(2 * rate / (1 << _BITS)).add_(1 - rate)


class _Jittered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows: Tensor,
        columns: Tensor,
        rate: float,
    ) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.rate = rate
        return x * jitter_noise(rows, columns, rate, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows, columns = ctx.saved_tensors
        return grad * jitter_noise(rows, columns, ctx.rate, grad.dtype), None, None, None


def draws(model: Model) -> bool:
    """Whether the model draws random numbers per token, so that it needs the tokens' numbers."""
    return model.dropout > 0 or bool(model.moe and model.moe.jitter)


def seed_dropout(stage: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Salts every dropout in a stage by (seed, its global name): `layers.17.drop_mlp` draws the
    same numbers on every layout."""
    counters: dict[int, Tensor] = {}
    for name, module in stage.named_modules():
        if isinstance(module, Seeded) and module.rate:
            module.salt = torch.tensor(salt_of(f"{seed}/dropout/{name}"), device=device)
            if module.width not in counters:
                counters[module.width] = mixed_counters(module.width, device)
            module.counters = counters[module.width]
