"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from orchestrator.plan.document import Optim

#: Share of the run that the final decay of WSD takes when `decay_steps` is 0 (MiniCPM, arXiv 2404.06395, section 4).
WSD_DECAY_SHARE = 0.1


def learning_rate(step: int, optim: Optim, total_steps: int) -> float:
    """The rate of update number `step`, counted from 1 (so the first update already moves).

    - warm-up: linear to `lr` over `warmup_steps`;
    - constant: stays there;
    - cosine: half a cosine from the end of warm-up to step `decay_steps` (0 = `total_steps`), then stays at the floor
      (SGDR, arXiv 1608.03983, eq. 5, one cycle);
    - wsd: stays at `lr`, then falls linearly over the last `decay_steps` steps (0 = a tenth of the run).

    The floor is `lr * min_lr_ratio`. Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"learning-rate step {step} is below 1")
    if step < optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    floor = optim.lr * optim.min_lr_ratio
    if optim.schedule == "constant":
        return optim.lr
    if optim.schedule == "cosine":
        end = optim.decay_steps or total_steps
        progress = _clamp((step - optim.warmup_steps) / max(end - optim.warmup_steps, 1))
        return floor + (optim.lr - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if optim.schedule == "wsd":
        length = optim.decay_steps or max(round(total_steps * WSD_DECAY_SHARE), 1)
        start = max(total_steps - length, optim.warmup_steps)
        return optim.lr - (optim.lr - floor) * _clamp((step - start) / max(total_steps - start, 1))
    raise ValueError(f"unknown schedule {optim.schedule!r}; legal: constant, cosine, wsd")


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)
