"""Narrow optimizer state as one process computes it, number by number from its definition, without
shared code."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xFF51AFD7ED558CCD
_SECOND = 0xC4CEB9FE1A85EC53
_ALL = (1 << 64) - 1


def narrowed(
    value: Tensor,
    form: str,
    *,
    kind: str,
    name: str,
    seed: int,
    update: int,
) -> Tensor:
    """Returns a parameter's state of one kind as it is stored after an update, in the dtype of
    `value`."""
    if form == "bf16":
        key = f"{seed}/state/{kind}/{name}".encode()
        salt = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        update_salt = _mixed((update * _STEP + salt) & _ALL)
        width = value.shape[-1] if value.dim() > 1 else 1
        flat = list[float]()
        for index, x in enumerate(value.flatten().tolist()):
            row, column = divmod(index, width)
            row_bits = _mixed((row * _STEP + update_salt) & _ALL)
            column_bits = _mixed((column * _STEP) & _ALL)
            flat.append(_stochastic(x, ((row_bits * (column_bits | 1)) & _ALL) >> 48))
        return torch.tensor(flat, dtype=value.dtype).view_as(value)
    if value.dim() == 1:
        return value
    blocks = value.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    numbers = torch.tensor(_numbers(kind != "exp_avg_sq"), dtype=value.dtype)
    nearest = (blocks / largest.where(largest > 0, 1.0))[..., None].sub(numbers).abs().argmin(-1)
    return (numbers[nearest] * largest).view_as(value)


def _numbers(signed: bool) -> list[float]:
    """Returns the number of every pattern of 8 bits: a sign, zeros, a one, and a fraction; the two
    patterns without a one are 0 and 1."""
    numbers = [0.0, 1.0]
    length = 7 if signed else 8
    for pattern in range(1 if signed else 2, 1 << length):  # seven zeros at most
        tail = pattern.bit_length() - 1  # bits after the first one
        zeros = length - 1 - tail
        fraction = pattern - (1 << tail)
        size = (0.1 + 0.9 * (fraction + 0.5) / (1 << tail)) * 10.0**-zeros
        numbers += [size, -size] if signed else [size]
    return sorted(numbers)


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 32)) * _FIRST) & _ALL
    x = ((x ^ (x >> 29)) * _SECOND) & _ALL
    return x ^ (x >> 32)


def _stochastic(x: float, bits: int) -> float:
    """Rounds to 8 binary digits, the leading one included, by 16 random bits."""
    if x == 0 or not math.isfinite(x):
        return x
    mantissa, exponent = math.frexp(abs(x))
    digits = mantissa * 256  # 128 to 256
    below = math.floor(digits)
    up = (digits - below) + bits / 65536 >= 1
    return math.copysign(math.ldexp((below + up) / 256, exponent), x)
