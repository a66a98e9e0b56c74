"""The loss of one micro-batch as a sum; the engine divides once, by the global number of valid tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # target of a token that does not count


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target) over the valid tokens; logits [b, s, vocab], targets int64 [b, s] -> scalar, >= fp32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
