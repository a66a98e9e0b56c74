"""Computes learning rates. A schedule is a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import structs

from .document import Optim

#: Share of the run that the final decay of WSD takes when `decay_steps` is 0 (MiniCPM, arXiv
#: 2404.06395, section 4).
WSD_DECAY_SHARE = 0.1
#: Keys of the schedule's record in a checkpoint.
RATE = "learning_rate"
STEPS = "train_steps"
_SAME = 1e-6  # relative


def learning_rate(step: int, optim: Optim, total_steps: int) -> float:
    """The rate of update number `step`, counted from 1 (so the first update already moves).

    - warm-up: linear to `lr` over `warmup_steps`;
    - constant: then stays at `lr`;
    - cosine: then half a cosine until step `decay_steps` (0 = `total_steps`), then stays at the
      floor (SGDR, arXiv 1608.03983, eq. 5, one cycle);
    - wsd: then stays at `lr`, and falls linearly over the last `decay_steps` steps (0 = a tenth of
      the run).

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


def remembered(step: int, optim: Optim, total_steps: int) -> dict[str, float]:
    """The record that a checkpoint of `step` keeps of its schedule, for `jump`."""
    if step == 0:
        return {}
    return {RATE: learning_rate(step, optim, total_steps), STEPS: float(total_steps)}


def jump(saved: Mapping[str, float], step: int, optim: Optim, total_steps: int) -> str:
    """Reports in one line that the learning rate jumps, because this schedule gives another rate at
    the saved step than that step had. "" if the rate continues, if no step follows, or if the
    checkpoint has no record of its schedule."""
    if RATE not in saved or not 0 < step < total_steps:
        return ""

    def goes_on(with_optim: Optim) -> bool:
        rate = learning_rate(step, with_optim, total_steps)
        return math.isclose(saved[RATE], rate, rel_tol=_SAME, abs_tol=1e-300)

    if goes_on(optim):
        return ""
    following = learning_rate(step + 1, optim, total_steps)
    message = (
        f"the learning rate jumps from {saved[RATE]:.3g} at saved step {step} to {following:.3g} at"
        f" step {step + 1}"
    )
    saved_steps = int(saved.get(STEPS, 0))
    old_end = structs.replace(optim, decay_steps=saved_steps)
    is_continued = optim.schedule == "cosine" and saved_steps and goes_on(old_end)
    return (
        f"{message}: optim.decay_steps={saved_steps} keeps the old curve"
        if is_continued
        else message
    )


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)
