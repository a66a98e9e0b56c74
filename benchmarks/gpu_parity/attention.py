"""The attention kernels that context parallelism and packed documents call directly, against
float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer import compat


def attention(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of attention with its log-sum-exp, forward and backward, against float64 on
    the host: one block to another, and runs of tokens of several lengths, one of which has no
    keys."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    errors = dict[str, float]()
    for name, queries, keys, causal in (("diagonal", 192, 192, True), ("past", 128, 320, False)):
        q, k, v, grad = (drawn(2, 8, length, 64) for length in (queries, keys, keys, queries))
        results = list[list[Tensor]]()
        for place, kind in ((torch.device("cpu"), torch.float64), (device, dtype)):
            placed = [x.to(place, kind) for x in (q, k, v, grad)]
            out, lse = compat.flash_forward(*placed[:3], causal, 0.125)
            # The log-sum-exp of a longer row than this block's, as a ring of several ranks has it.
            longer = lse + 0.5
            gradients = compat.flash_backward(placed[3], *placed[:3], out, longer, causal, 0.125)
            results.append([out, lse, *gradients])
        errors[f"block, {name}"] = _worst(*results)
    runs = ((100, 100), (28, 60), (64, 0), (64, 96))
    rows = sum(queries for queries, _ in runs)
    columns = sum(keys for _, keys in runs)
    q = drawn(rows, 8, 64)
    k = drawn(columns, 4, 64)
    v = drawn(columns, 4, 64)
    grad = drawn(rows, 8, 64)
    results = []
    for place, kind in ((torch.device("cpu"), torch.float64), (device, dtype)):
        segments = compat.Segments.of(runs, place)
        placed = [x.to(place, kind) for x in (q, k, v, grad)]
        out, lse = compat.segments_forward(*placed[:3], segments, False, 0.125)
        finite = lse.masked_fill(lse.isinf(), 0.0)
        gradients = compat.segments_backward(
            placed[3], *placed[:3], out, lse, segments, False, 0.125
        )
        if not torch.equal(
            lse.isinf().cpu(), (results[0][1] == 0).cpu() if results else lse.isinf().cpu()
        ):
            errors["runs of tokens, rows without keys"] = math.inf
        results.append([out, finite, *gradients])
    errors["runs of tokens"] = _worst(*results)
    return errors


def _worst(truth: list[Tensor], found: list[Tensor]) -> float:
    pairs = zip(found, truth, strict=True)
    return max(float((here.double().cpu() - there).norm() / there.norm()) for here, there in pairs)
