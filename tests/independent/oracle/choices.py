"""Reads the experts that a run's tokens chose from the records of its ranks
(`job.record_choices`), and judges each choice.

The oracle computes with the recorded choices but does not trust them: the loss and all gradients
are compared at them, so they must be the choices that the run computed with, and each choice must
be the best by the exact scores, but for the rounding that this oracle measures in the run's own
precision.
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
    """The choices of all tokens of a step by layer: int64 and float [samples, sequence, k]."""

    experts: dict[int, Tensor]
    logits: dict[int, Tensor]
    weights: dict[int, Tensor]

    def rows(self, samples: slice) -> Choices:
        """Returns the choices of some samples."""

        def rows_of(tensors: dict[int, Tensor]) -> dict[int, Tensor]:
            return {layer: tensor[samples] for layer, tensor in tensors.items()}

        return Choices(rows_of(self.experts), rows_of(self.logits), rows_of(self.weights))


class Unrecorded(ValueError):
    """A token whose choice is not recorded once."""


def read(
    run: Path,
    step: int,
    *,
    consumed: int,
    samples: int,
    length: int,
    layers: list[int],
    top_k: int,
) -> Choices:
    """Reads the choices of a step that began when the run had consumed so many samples. Raises
    Unrecorded."""
    choices = Choices({}, {}, {})
    count = samples * length
    folder = run / "choices" / f"step-{step:08d}"
    records = [load_file(path) for path in sorted(folder.glob("rank-*.safetensors"))]
    for layer in layers:
        layer_records = [record for record in records if f"{layer}.tokens" in record]
        if not layer_records:
            raise Unrecorded(f"step {step}: no choices of layer {layer}")
        tokens = (
            torch.cat([record[f"{layer}.tokens"] for record in layer_records]) - consumed * length
        )
        order = tokens.argsort()
        if not torch.equal(tokens[order], torch.arange(count)):
            raise Unrecorded(
                f"step {step}: layer {layer} has not recorded each of {count} tokens once"
            )
        for name, target in (
            ("experts", choices.experts),
            ("logits", choices.logits),
            ("weights", choices.weights),
        ):
            ordered = torch.cat([record[f"{layer}.{name}"] for record in layer_records])[order]
            target[layer] = ordered.view(samples, length, top_k)
        choices.experts[layer] = choices.experts[layer].long()
    return choices


def needed_rounding(values: Tensor, chosen: Tensor, moe: dict[str, Any]) -> Tensor:
    """Returns the least rounding [n] of the values that explains each choice.

    `values` [n, experts] decide the choice, `chosen` is int64 [n, k]. If every value is off by that
    much, the choice has the k highest values among the best groups. It is infinite where no
    rounding is enough, and where of two equal values in a group the one with the higher number was
    chosen. Sigmoid scores rank groups by the sum of their two best, soft-max scores by the best.
    """
    groups = moe.get("groups", 1)
    size = moe["experts"] // moe.get("groups", 1)
    picked = torch.zeros_like(values, dtype=torch.bool).scatter_(-1, chosen, True)
    legal = picked.sum(-1) == chosen.shape[-1]
    lowest = values.masked_fill(~picked, math.inf).amin(-1)
    terms = min(2, size) if moe.get("score", "softmax") == "sigmoid" else 1
    group_scores = values.unflatten(-1, (groups, size)).topk(terms, -1).values.sum(-1)
    least = torch.full_like(lowest, math.inf)
    for kept_groups in itertools.combinations(range(groups), moe.get("top_groups", 1)):
        group_of = [expert // size for expert in range(values.shape[-1])]
        closed = torch.tensor([group not in kept_groups for group in group_of])
        best = values.masked_fill(picked | closed, -math.inf).amax(-1)
        shift = (best - lowest).clamp(min=0) / 2
        shift = torch.maximum(shift, _group_shift(group_scores, kept_groups) / (2 * terms))
        least = torch.where((picked & closed).any(-1), least, torch.minimum(least, shift))
    return least.masked_fill(~legal | _wrong_among_equals(values, picked, size), math.inf)


def _group_shift(group_scores: Tensor, kept_groups: tuple[int, ...]) -> Tensor:
    """Returns by how much [n] the best of the other groups is above the worst of the kept ones."""
    rest = [group for group in range(group_scores.shape[-1]) if group not in kept_groups]
    if not rest:
        return torch.zeros_like(group_scores[:, 0])
    difference = group_scores[:, rest].amax(-1) - group_scores[:, list(kept_groups)].amin(-1)
    return difference.clamp(min=0)


def _wrong_among_equals(values: Tensor, picked: Tensor, size: int) -> Tensor:
    """Returns bool [n]: whether an expert was chosen whose value equals that of an earlier expert
    of its group that was not chosen."""
    value = values.unflatten(-1, (-1, size))
    picked_in_group = picked.unflatten(-1, (-1, size))
    equal = value[..., :, None] == value[..., None, :]
    is_earlier = torch.ones(size, size, dtype=torch.bool).tril(-1)  # [expert, earlier expert]
    skipped = picked_in_group[..., :, None] & ~picked_in_group[..., None, :]
    return (equal & is_earlier & skipped).flatten(1).any(-1)


def counts(chosen: Tensor, experts: int) -> Tensor:
    """Returns int64 [experts]: the number of choices of each expert."""
    return torch.stack([(chosen == expert).sum() for expert in range(experts)])
