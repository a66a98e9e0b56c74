"""Dynamic loss scaling for fp16 (Micikevicius et al., arXiv 1710.03740, section 3.2).

Gradients below 2^-24 are zero in fp16. So the loss is multiplied by a scale before backward and the gradient divided by
it, in fp32, before it is used. A scale too large makes infinities: that step is skipped and the scale halved; after
`GROWTH_INTERVAL` steps without one it is doubled. The numbers are torch.amp.GradScaler's.
"""

from __future__ import annotations

from collections.abc import Mapping

INITIAL = 2.0**16
GROWTH_INTERVAL = 2000
#: At this scale a gradient that overflows is not finite for another reason than the scale.
LOWEST = 2.0**-14


class LossScale:
    """`scale` of the coming step. All ranks see the same gradient norm, so all hold the same scale."""

    def __init__(self, initial: float = INITIAL, growth_interval: int = GROWTH_INTERVAL):
        self.scale, self.growth_interval = initial, growth_interval
        self.good_steps = 0  # since the scale last changed

    @property
    def exhausted(self) -> bool:
        return self.scale <= LOWEST

    def update(self, finite: bool) -> None:
        """After a step whose gradient norm was `finite` (it was applied) or not (it was skipped)."""
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, LOWEST), 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, beside other scalars."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": float(self.good_steps)}

    def restore(self, scalars: Mapping[str, float]) -> None:
        """From the scalars of a checkpoint; one that was written without loss scaling leaves everything as it is."""
        self.scale = scalars.get("loss_scale", self.scale)
        self.good_steps = int(scalars.get("loss_scale_good_steps", self.good_steps))
