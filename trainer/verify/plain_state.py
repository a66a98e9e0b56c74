"""Narrow optimizer state as one process has it, number by number from its definition: no shared
code."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15
_FIRST = 0xFF51AFD7ED558CCD
_SECOND = 0xC4CEB9FE1A85EC53
_ALL = (1 << 64) - 1


def narrowed(value: Tensor, form: str, kind: str, name: str, seed: int, update: int) -> Tensor:
    """A parameter's state of one kind as it is kept after an update, in the dtype of `value`."""
    if form == "bf16":
        salt = int.from_bytes(
            hashlib.blake2b(f"{seed}/state/{kind}/{name}".encode(), digest_size=8).digest(),
            "little",
        )
        ahead = _mixed((update * _STEP + salt) & _ALL)
        width = value.shape[-1] if value.dim() > 1 else 1
        flat = list[float]()
        for at, x in enumerate(value.flatten().tolist()):
            row, column = (
                _mixed((number * _STEP + more) & _ALL)
                for number, more in zip(divmod(at, width), (ahead, 0), strict=True)
            )
            flat.append(_stochastic(x, ((row * (column | 1)) & _ALL) >> 48))
        return torch.tensor(flat, dtype=value.dtype).view_as(value)
    if value.dim() == 1:
        return value
    blocks = value.reshape(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    numbers = torch.tensor(_numbers(kind != "exp_avg_sq"), dtype=value.dtype)
    nearest = (blocks / largest.where(largest > 0, 1.0))[..., None].sub(numbers).abs().argmin(-1)
    return (numbers[nearest] * largest).view_as(value)


def _numbers(signed: bool) -> list[float]:
    """Every pattern of 8 bits: sign, zeros, a one, and a fraction; the two without a one are 0 and
    1."""
    found = [0.0, 1.0]
    length = 7 if signed else 8
    for pattern in range(1 if signed else 2, 1 << length):  # seven zeros at most
        tail = pattern.bit_length() - 1  # bits behind the first one
        zeros = length - 1 - tail
        fraction = pattern - (1 << tail)
        size = (0.1 + 0.9 * (fraction + 0.5) / (1 << tail)) * 10.0**-zeros
        found += [size, -size] if signed else [size]
    return sorted(found)


def _mixed(x: int) -> int:
    x = ((x ^ (x >> 32)) * _FIRST) & _ALL
    x = ((x ^ (x >> 29)) * _SECOND) & _ALL
    return x ^ (x >> 32)


def _stochastic(x: float, bits: int) -> float:
    """To 8 binary digits, the first one included."""
    if x == 0 or not math.isfinite(x):
        return x
    mantissa, exponent = math.frexp(abs(x))
    digits = mantissa * 256  # 128 to 256
    below = math.floor(digits)
    up = (digits - below) + bits / 65536 >= 1
    return math.copysign(math.ldexp((below + up) / 256, exponent), x)
