"""Normalisation over the hidden dimension. Both kernels compute in fp32 when their input is bf16 or fp16."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.plan.document import Model


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016, arXiv 1607.06450)."""

    def __init__(self, hidden: int, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.empty(hidden)), nn.Parameter(torch.empty(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def make_norm(model: Model) -> nn.Module:
    return (RMSNorm if model.norm == "rms" else LayerNorm)(model.hidden, model.norm_eps)
