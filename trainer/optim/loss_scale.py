"""Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2).

Gradients below 2^-24 are zero in fp16. So the loss is multiplied by a scale before backward and the
gradient divided by it, in fp32, before it is used. A scale too large makes infinities: that step is
skipped and the scale halved; after `GROWTH_INTERVAL` steps without one it is doubled. The numbers
are torch.amp.GradScaler's.

The scale lives on the device, which decides about it: the host enqueues the next step without
knowing it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000
#: At this scale a gradient that overflows is not finite for another reason than the scale.
LOWEST = 2.0**-14


class LossScale:
    """The scale of the coming step, and the steps since it last changed. All ranks see the same
    gradient norm, so all hold the same scale."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        initial: float = INITIAL,
        growth_interval: int = GROWTH_INTERVAL,
    ):
        self.growth_interval = growth_interval
        #: 0-d float64, replaced and never changed: who holds it keeps the scale of a step.
        self.current = torch.full((), initial, dtype=torch.float64, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def scale(self) -> float:
        """Waits for the device."""
        return float(self.current)

    @scale.setter
    def scale(self, value: float) -> None:
        self.current = torch.full_like(self.current, value)

    def update(self, finite: Tensor) -> None:
        """After a step whose gradient norm was `finite` (it was applied) or not (it was skipped):
        0-d bool."""
        good_steps = (self._good_steps + 1) * finite
        grows = good_steps == self.growth_interval
        halved = (self.current / 2).clamp(min=LOWEST)
        self.current = torch.where(
            finite, torch.where(grows, self.current * 2, self.current), halved
        )
        self._good_steps = good_steps * ~grows

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, beside other scalars. Waits for the device."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": float(self._good_steps)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """From the scalars of a checkpoint; one that was written without loss scaling leaves
        everything as it is."""
        self.scale = scalars.get("loss_scale", self.scale)
        self._good_steps.fill_(int(scalars.get("loss_scale_good_steps", float(self._good_steps))))
