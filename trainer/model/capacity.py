"""Experts that take a bounded number of tokens: the rest of a token's choices are dropped and add
nothing to it.

The bound counts within a sequence, and an expert takes those of its tokens that come first in it
(GShard, arXiv
2006.16668, section 2.2, with a group of its own for each sequence). So what is dropped depends
    neither on the layout,
nor on the size of micro-batches, nor on later tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .permutation import counted_by_row


def first_choices(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """bool [b, s, k]: whether a choice is among the first `capacity` of its expert in its sequence.
    `chosen` int64 [b, s, k]: the choices of whole sequences, none twice for one token."""
    flat = chosen.flatten(1)
    order = flat.argsort(dim=1, stable=True)  # by expert, then by place in the sequence
    counts = counted_by_row(flat, experts)
    starts = counts.cumsum(1) - counts
    rank_in_expert = torch.arange(flat.shape[1], device=flat.device) - starts.gather(
        1, flat.gather(1, order)
    )
    return (
        torch.empty_like(flat, dtype=torch.bool)
        .scatter_(1, order, rank_in_expert < capacity)
        .view_as(chosen)
    )
