"""Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2).

Gradients below 2^-24 are zero in fp16. So the loss is multiplied by a scale before backward, and
the gradient is divided by it in fp32 before it is used. Too large a scale makes infinities: that
step is skipped and the scale halved. After `GROWTH_INTERVAL` steps without infinities the scale is
doubled. The numbers are torch.amp.GradScaler's.

The scale lives on the device, which updates it: the host enqueues the next step without knowing it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000
#: At this scale a gradient that is not finite has another cause than the scale.
LOWEST = 2.0**-14


class LossScale:
    """The scale of the next step, and the number of steps since its last change. All ranks see the
    same gradient norm, so all hold the same scale."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        initial: float = INITIAL,
        growth_interval: int = GROWTH_INTERVAL,
    ):
        self.growth_interval = growth_interval
        #: 0-d float64; updates replace the tensor, so a reference keeps the scale of its step.
        self.current = torch.full((), initial, dtype=torch.float64, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def scale(self) -> float:
        """The current scale as a number. Waits for the device."""
        return float(self.current)

    @scale.setter
    def scale(self, value: float) -> None:
        self.current = torch.full_like(self.current, value)

    def update(self, finite: Tensor) -> None:
        """Updates the scale after a step. `finite`, 0-d bool: whether the gradient norm was finite
        and the gradient applied; otherwise the step was skipped."""
        good_steps = (self._good_steps + 1) * finite
        grows = good_steps == self.growth_interval
        halved = (self.current / 2).clamp(min=LOWEST)
        grown = torch.where(grows, self.current * 2, self.current)
        self.current = torch.where(finite, grown, halved)
        self._good_steps = good_steps * ~grows

    def state(self) -> dict[str, float]:
        """Returns the scalars that a checkpoint keeps. Waits for the device."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": float(self._good_steps)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """Restores the scale from the scalars of a checkpoint. A checkpoint that was written
        without loss scaling changes nothing."""
        self.scale = scalars.get("loss_scale", self.scale)
        self._good_steps.fill_(int(scalars.get("loss_scale_good_steps", float(self._good_steps))))
