"""Experts that accept a bounded number of tokens: further choices of an expert are dropped, and add
nothing to their tokens.

The bound counts within a sequence, and an expert accepts the first of its tokens in the sequence
(GShard, arXiv 2006.16668, section 2.2, with one group per sequence). So the dropped choices depend
neither on the layout, nor on the size of micro-batches, nor on later tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .permutation import counted_by_row


def first_choices(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """Returns bool [b, s, k]: whether a choice is among the first `capacity` choices of its expert
    in its sequence. `chosen` int64 [b, s, k]: the choices of whole sequences, all different for one
    token."""
    flat = chosen.flatten(1)
    order = flat.argsort(dim=1, stable=True)  # by expert, then by position in the sequence
    counts = counted_by_row(flat, experts)
    starts = counts.cumsum(1) - counts
    sorted_experts = flat.gather(1, order)
    positions = torch.arange(flat.shape[1], device=flat.device)
    rank_in_expert = positions - starts.gather(1, sorted_experts)
    accepted = torch.empty_like(flat, dtype=torch.bool)
    accepted.scatter_(1, order, rank_in_expert < capacity)
    return accepted.view_as(chosen)
