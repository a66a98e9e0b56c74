"""Judges the gradients that AdamW was given, and what it made of them.

The allowed error of a gradient is measured, not chosen: it is `ALLOWED` times the difference
between this oracle in the run's own precision, cut into the run's micro-batches, and this oracle in
fp64. docs/verify.md has the measurements. No bound is below what the arithmetic of its sum explains
(`findings.rounding`); in fp64, where nothing is measured, that alone is the unit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from . import optimizer
from .data import Reader
from .findings import ALLOWED, ALLOWED_KIND, Findings, distance, narrow, rms, rounding
from .network import Tensors
from .shapes import shapes
from .state import State

#: In fp64 a margin beyond the statistics of rounding costs nothing: no real error is that small,
#: and kernels for other processors cancel nearly equal numbers in another order.
LEAST_ROUNDING = 2e-13
#: Operations of AdamW that round an element of the second moment, and of the weight.
MOMENT_OPERATIONS = 4
WEIGHT_OPERATIONS = 8


class GradientJudge:
    """Compares the gradients of one run's steps with exact ones, and AdamW with its definition."""

    def __init__(
        self, plan: dict[str, Any], reader: Reader, precision: torch.dtype, findings: Findings
    ):
        self.train = plan["job"]["train"]
        self.optim = plan["job"]["optim"]
        self.precision = precision
        self.findings = findings
        self.wide = torch.promote_types(precision, torch.float32)  # of master and moments
        self.ulp = torch.finfo(self.wide).eps / 2
        self.shapes = shapes(plan["model"])
        # A value passes each matrix forward and backward, and is summed over the step's tokens.
        tokens = plan["parallel"]["global_batch_samples"] * reader.length
        terms = tokens + sum(sum(shape[-2:]) for shape in self.shapes.values())
        self.sum_rounding = max(rounding(terms, self.wide), LEAST_ROUNDING)
        # The norm is the root of a sum over all parameters: it is off by half as much as the sum.
        parameters = sum(math.prod(shape) for shape in self.shapes.values())
        self.norm_rounding = rounding(parameters, self.wide) / 2
        self.noise: dict[str, float] = {}  # rounding of each gradient, over its norm
        self.kind_noise: dict[str, float] = {}  # the same over all layers' gradients of a kind
        #: gradients of the first step in the run's precision, until `_check_narrow` has used them
        self.rounded_grads: Tensors | None = None

    def measure_noise(self, exact: Tensors, rounded: Tensors) -> None:
        """Measures what rounding alone does to each gradient of a step.

        In fp64 that is the rounding of a sum whose terms are as large as the model's gradients,
        though its result may be small: attention's backward subtracts nearly equal numbers.
        """
        overall = rms(exact)
        term = self.sum_rounding * overall if self.precision == torch.float64 else 0.0
        squared_noise = defaultdict[str, float](float)  # by kind
        squared_norms = defaultdict[str, float](float)
        for name, grad in exact.items():
            error = distance(rounded[name], grad, overall, term * grad.numel() ** 0.5)
            self.noise[name] = max(error, self.sum_rounding)
            norm = float(grad.norm())
            squared_noise[kind_of(name)] += (self.noise[name] * norm) ** 2
            squared_norms[kind_of(name)] += norm**2
        self.kind_noise = {
            kind: math.sqrt(squared_noise[kind] / max(squared_norm, 1e-300))
            for kind, squared_norm in squared_norms.items()
        }

    def judge(
        self, before: State, after: State, exact: Tensors, norm: float, location: str
    ) -> None:
        """Judges the gradient that AdamW was given, which follows from the first moments before and
        after the step."""
        clip = optimizer.clipping(norm, self.train["clip_grad_norm"])
        overall = rms(exact)
        squared_norm = 0.0
        squared_blur = 0.0
        grads = Tensors()
        kinds = dict[str, list[float]]()
        for name, expected in exact.items():
            grad, blur = self._gradient(before, after, name, clip)
            grads[name] = grad
            error = distance(grad, expected, overall)
            # One layer has few elements, whose rounding may be small by luck; all layers have many.
            noise = max(self.noise[name], self.kind_noise[kind_of(name)])
            bound = ALLOWED * noise + distance(expected, expected, overall, blur)
            self.findings.measure("gradient", error, bound, f"{location}, {name}")
            self._add_kind(kinds, name, grad - expected, expected)
            squared_norm += float(grad.square().sum())
            squared_blur += blur**2
        for kind, (squared_error, squared_size) in kinds.items():
            bound = ALLOWED_KIND * self.kind_noise[kind]
            error = math.sqrt(squared_error / squared_size)
            self.findings.measure("rounding", error, bound, f"{location}, {kind}")
        exact_norm = self._judge_norm(exact, norm, location)
        bound = 4 * math.sqrt(squared_blur) / exact_norm + ALLOWED * self.norm_rounding
        error = abs(math.sqrt(squared_norm) - norm) / max(norm, 1e-300)
        self.findings.measure("clipping", error, bound, location)
        self._check_narrow(grads, location)

    def _gradient(
        self, before: State, after: State, name: str, clip: float
    ) -> tuple[Tensor, float]:
        """Returns the gradient behind two first moments, and the 2-norm of its rounding."""
        beta = self.optim["beta1"]
        first = before.tensors["exp_avg"][name].double()
        then = after.tensors["exp_avg"][name].double()
        grad = (then - beta * first) / (1 - beta) / clip
        size = float((then.abs() + beta * first.abs()).norm())
        return grad, 2 * self.ulp * size / (1 - beta) / clip

    def _judge_norm(self, exact: Tensors, norm: float, location: str) -> float:
        """Judges the reported norm; returns the exact one."""
        exact_norm = math.sqrt(sum(float(grad.square().sum()) for grad in exact.values()))
        squared_noise = sum(
            (self.noise[name] * float(grad.norm())) ** 2 for name, grad in exact.items()
        )
        noise = math.sqrt(squared_noise) / exact_norm
        allowed = ALLOWED * (noise + self.norm_rounding)
        self.findings.measure("norm", abs(norm - exact_norm) / exact_norm, allowed, location)
        return exact_norm

    def _add_kind(
        self, kinds: dict[str, list[float]], name: str, error: Tensor, expected: Tensor
    ) -> None:
        """Adds the squares of error and size to those of all layers' matrices of a kind, in a
        narrow precision."""
        if self.precision == self.wide or not optimizer.decays(self.shapes[name]):
            return
        sums = kinds.setdefault(kind_of(name), [0.0, 0.0])
        sums[0] += float(error.norm()) ** 2
        sums[1] += float(expected.norm()) ** 2

    def _check_narrow(self, grads: Tensors, location: str) -> None:
        """Checks that gradients are sums in fp32: such a sum of several narrow numbers is a narrow
        number itself only in a few elements. Measured once per run."""
        if self.precision == self.wide or self.train["grad_dtype"] != "fp32":
            return
        if not self.rounded_grads:
            return
        names = [
            name for name, grad in grads.items() if grad.dim() > 1 and not name.startswith("embed")
        ]
        share = narrow([grads[name] for name in names], self.precision)
        rounded_share = narrow([self.rounded_grads[name] for name in names], self.precision)
        self.rounded_grads = Tensors()
        self.findings.measure("narrow", share, 1.5 * rounded_share + 0.03, location)

    def judge_update(
        self, before: State, after: State, *, updates: int, lr: float, location: str
    ) -> None:
        """Judges AdamW, element by element, from the saved moments."""
        beta1 = self.optim["beta1"]
        beta2 = self.optim["beta2"]
        old = before.tensors
        new = after.tensors
        for name, saved in new["master"].items():
            first = old["exp_avg"][name].double()
            then = new["exp_avg"][name].double()
            second = old["exp_avg_sq"][name].double()
            squared = new["exp_avg_sq"][name].double()
            grad = (then - beta1 * first) / (1 - beta1)
            blur = 2 * self.ulp * (then.abs() + beta1 * first.abs()) / (1 - beta1)
            expected = beta2 * second + (1 - beta2) * grad.square()
            allowed = self._allowed(MOMENT_OPERATIONS, expected)
            allowed += (1 - beta2) * (2 * grad.abs() + blur) * blur
            parameter_location = f"{location}, {name}"
            self.findings.elements("second moment", squared, expected, allowed, parameter_location)
            weight = old["master"][name].double()
            expected = optimizer.updated(
                weight, then, squared, updates=updates, lr=lr, optim=self.optim
            )
            size = weight.abs() + (expected - weight).abs()
            allowed = self._allowed(WEIGHT_OPERATIONS, size)
            self.findings.elements("weight", saved.double(), expected, allowed, parameter_location)

    def _allowed(self, operations: int, size: Tensor) -> Tensor:
        """Returns the allowed error of elements of this size after so many operations. Below the
        smallest normal number a rounding is not proportional to the size, and a device may take
        such numbers for zero."""
        return ALLOWED * rounding(operations, self.wide) * size + torch.finfo(self.wide).tiny


def kind_of(name: str) -> str:
    """Returns a parameter's name without its layer: `layers.attn.wq.weight`."""
    return ".".join(component for component in name.split(".") if not component.isdigit())
