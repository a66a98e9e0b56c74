"""Masked tokens as one process hides them, token by token from their definition (BERT, arXiv
1810.04805, section 3.1), without shared code but the hash that salts are made with."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_ALL = (1 << 64) - 1


def plain_masked(
    tokens: Tensor,
    indices: Sequence[int],
    *,
    seed: int,
    mask: int,
    vocabulary: int,
    eod: int,
) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets of whole samples int64 [b, s], which have these numbers in the
    data order; -100: no target."""
    inputs = tokens.clone()
    targets = torch.full_like(tokens, -100)
    length = tokens.shape[1]
    for row, index in enumerate(indices):
        first = index * length
        draws = {
            position: _random(seed, "chosen", first + position) / 2**63
            for position in range(length)
            if tokens[row, position] != eod
        }
        for position, draw in draws.items():
            if draw >= 0.15 and draw > min(draws.values()):
                continue
            targets[row, position] = tokens[row, position]
            outcome = _random(seed, "outcome", first + position) / 2**63
            if outcome < 0.8:
                inputs[row, position] = mask
            elif outcome < 0.9:
                inputs[row, position] = _random(seed, "token", first + position) % vocabulary
    return inputs, targets


def _random(seed: int, use: str, number: int) -> int:
    """Returns a random number below 2^63 of token `number`: the finalizer of splitmix64."""
    digest = hashlib.blake2b(f"{seed}/masked/{use}".encode(), digest_size=8).digest()
    x = (number * 0x9E3779B97F4A7C15 + int.from_bytes(digest, "little")) & _ALL
    x = ((x ^ x >> 32) * 0xFF51AFD7ED558CCD) & _ALL
    x = ((x ^ x >> 29) * 0xC4CEB9FE1A85EC53) & _ALL
    return (x ^ x >> 32) & (_ALL >> 1)
