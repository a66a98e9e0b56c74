"""Which experts a run's tokens chose: read from what its ranks have recorded
(`job.record_choices`), and judged.

The record is taken for the choices, not for their being right: the loss and all gradients are
compared at them, so they are the ones that the run computed with, and each must be the best by the
exact scores, but for as much rounding as this oracle measures in the run's own precision.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class Choices:
    """By layer, of all tokens of a step: int64 and float [samples, sequence, k]."""

    experts: dict[int, Tensor]
    logits: dict[int, Tensor]
    weights: dict[int, Tensor]

    def rows(self, which: slice) -> Choices:
        parts = self.experts, self.logits, self.weights
        return Choices(*({layer: one[which] for layer, one in part.items()} for part in parts))


class Unrecorded(ValueError):
    """A token whose choice is not recorded once."""


def read(
    run: Path, step: int, consumed: int, samples: int, length: int, layers: list[int], top_k: int
) -> Choices:
    """Of the step that began when the run had consumed so many samples. Raises Unrecorded."""
    made = Choices({}, {}, {})
    count = samples * length
    parts = [
        load_file(path)
        for path in sorted((run / "choices" / f"step-{step:08d}").glob("rank-*.safetensors"))
    ]
    for layer in layers:
        mine = [part for part in parts if f"{layer}.tokens" in part]
        if not mine:
            raise Unrecorded(f"step {step}: no choices of layer {layer}")
        tokens = torch.cat([part[f"{layer}.tokens"] for part in mine]) - consumed * length
        order = tokens.argsort()
        if not torch.equal(tokens[order], torch.arange(count)):
            raise Unrecorded(
                f"step {step}: layer {layer} has not recorded each of {count} tokens once"
            )
        for name, into in (
            ("experts", made.experts),
            ("logits", made.logits),
            ("weights", made.weights),
        ):
            whole = torch.cat([part[f"{layer}.{name}"] for part in mine])[order]
            into[layer] = whole.view(samples, length, top_k)
        made.experts[layer] = made.experts[layer].long()
    return made


def needed_rounding(values: Tensor, chosen: Tensor, moe: dict[str, Any]) -> Tensor:
    """values [n, experts], by which experts are chosen, chosen int64 [n, k] -> [n]: the least
    amount by which every value must be off for this to be the choice of the highest k among the
    best groups; infinite where no amount is enough, and where of two equal values in a group the
    one with the higher number was taken.

    Sigmoid scores rank groups by the sum of their two best, soft-max ones by the best.
    """
    groups = moe.get("groups", 1)
    size = moe["experts"] // moe.get("groups", 1)
    picked = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, chosen, True)
    legal = picked.sum(-1) == chosen.shape[-1]
    lowest = values.masked_fill(~picked, math.inf).amin(-1)
    terms = min(2, size) if moe.get("score", "softmax") == "sigmoid" else 1
    worth = values.unflatten(-1, (groups, size)).topk(terms, -1).values.sum(-1)
    needed = torch.full_like(lowest, math.inf)
    for kept in itertools.combinations(range(groups), moe.get("top_groups", 1)):
        outside = [group for group in range(groups) if group not in kept]
        shut = torch.tensor([expert // size not in kept for expert in range(values.shape[-1])])
        best = values.masked_fill(picked | shut, -math.inf).amax(-1)
        need = (best - lowest).clamp(min=0) / 2
        if outside:
            between = worth[:, outside].amax(-1) - worth[:, list(kept)].amin(-1)
            need = torch.maximum(need, between.clamp(min=0) / (2 * terms))
        needed = torch.where((picked & shut).any(-1), needed, torch.minimum(needed, need))
    return needed.masked_fill(~legal | _wrong_among_equals(values, picked, size), math.inf)


def _wrong_among_equals(values: Tensor, picked: Tensor, size: int) -> Tensor:
    """bool [n]: whether an expert was taken whose value equals that of one before it in its group
    that was not."""
    value = values.unflatten(-1, (-1, size))
    taken = picked.unflatten(-1, (-1, size))
    equal = value[..., :, None] == value[..., None, :]
    before = torch.ones(size, size, dtype=torch.bool).tril(-1)  # [expert, one before it]
    return (equal & before & taken[..., :, None] & ~taken[..., None, :]).flatten(1).any(-1)


def counts(chosen: Tensor, experts: int) -> Tensor:
    """int64 [experts]: how many choices each expert got."""
    return torch.stack([(chosen == expert).sum() for expert in range(experts)])
