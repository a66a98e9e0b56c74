"""The oracle for optimizer, clipping and schedules: formulas written down plainly, one parameter at
a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def norm(grads: dict[str, Tensor]) -> float:
    """The 2-norm of all gradients together."""
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads.values()))


def clipped(grads: dict[str, Tensor], limit: float) -> dict[str, Tensor]:
    """Gradients scaled down so that their norm is at most `limit`; 0 leaves them."""
    factor = min(1.0, limit / (norm(grads) + 1e-6)) if limit > 0 else 1.0
    return {name: g * factor for name, g in grads.items()}


class AdamW:
    """Algorithm 2 of arXiv 1711.05101, with decay only on matrices."""

    def __init__(self, beta1: float, beta2: float, eps: float, weight_decay: float):
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.weight_decay = weight_decay
        self.t = 0
        self.m = {}
        self.v = {}

    def step(
        self, weights: dict[str, Tensor], grads: dict[str, Tensor], lr: float
    ) -> dict[str, Tensor]:
        """New weights."""
        self.t += 1
        new = {}
        for name, w in weights.items():
            g = grads[name]
            self.m[name] = self.beta1 * self.m.get(name, torch.zeros_like(w)) + (1 - self.beta1) * g
            self.v[name] = (
                self.beta2 * self.v.get(name, torch.zeros_like(w)) + (1 - self.beta2) * g * g
            )
            m_hat = self.m[name] / (1 - self.beta1**self.t)
            v_hat = self.v[name] / (1 - self.beta2**self.t)
            decay = self.weight_decay if w.dim() > 1 else 0.0
            new[name] = w - lr * decay * w - lr * m_hat / (v_hat.sqrt() + self.eps)
        return new
