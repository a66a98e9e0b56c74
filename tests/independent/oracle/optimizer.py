"""Learning rate, clipping, AdamW and the loss scale of fp16, as docs/verify.md and the papers
define them.

The input is state as the run has saved it; results are in double precision, without rounding in
between.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def learning_rate(step: int, optim: dict[str, Any], steps: int) -> float:
    """Returns the learning rate of step number `step`, counted from 1, in a run of `steps`."""
    peak = optim["lr"]
    warm = optim["warmup_steps"]
    length = optim["decay_steps"]
    floor = peak * optim["min_lr_ratio"]
    if step < warm:
        return peak * step / warm
    if optim["schedule"] == "cosine":
        share = (step - warm) / max((length or steps) - warm, 1)
        return floor + (peak - floor) * (1 + math.cos(math.pi * min(max(share, 0.0), 1.0))) / 2
    if optim["schedule"] == "wsd":
        begin = max(steps - (length or max(round(steps / 10), 1)), warm)
        share = (step - begin) / max(steps - begin, 1)
        return peak - (peak - floor) * min(max(share, 0.0), 1.0)
    return peak


def clipping(norm: float, limit: float) -> float:
    """Returns the factor on the gradient; a limit of 0 means no clipping."""
    return min(1.0, limit / (norm + 1e-6)) if limit else 1.0


def decays(shape: tuple[int, ...] | list[int]) -> bool:
    """Whether weights of a shape decay: matrices do, norms and biases do not."""
    return len(shape) > 1


def updated(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    updates: int,
    lr: float,
    optim: dict[str, Any],
) -> Tensor:
    """Returns the weight after update number `updates`, from the moments after it (arXiv
    1711.05101, algorithm 2)."""
    weight = weight.double()
    first = first.double()
    second = second.double()
    decay = optim["weight_decay"] if decays(weight.shape) else 0.0
    first = first / (1 - optim["beta1"] ** updates)
    second = second / (1 - optim["beta2"] ** updates)
    return weight * (1 - lr * decay) - lr * first / (second.sqrt() + optim["eps"])


def rescaled(scale: float, good_steps: int, finite: bool) -> tuple[float, int]:
    """Returns the loss scale after a step, and the steps since it changed (torch.amp.GradScaler:
    halved after an overflow, doubled after 2,000 steps without; here not below 2^-14)."""
    if not finite:
        return max(scale / 2, 2.0**-14), 0
    return (scale * 2, 0) if good_steps + 1 == 2000 else (scale, good_steps + 1)
