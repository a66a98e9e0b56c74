"""The findings of a judge, and the distance between two tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
#: A quantity may be off by this many times its rounding, measured or of `rounding`
#: (docs/verify.md).
ALLOWED = 6.0
#: The same over all matrices of a kind together (every layer's `attn.wq`), in bf16 and fp16: they
#: have so many elements that the ratio hardly varies, and one rounding too many is found.
ALLOWED_KIND = 2.0


def rounding(terms: int, dtype: torch.dtype) -> float:
    """Returns the rounding of a sum of so many terms in any order, over the sum of their sizes.

    That is half the distance from 1 to the next number, times the root of the number of terms. A
    sum is off by more than `ALLOWED` times as much with a probability of 2 exp(-ALLOWED^2 / 2) per
    term, 3e-8, if its roundings are independent and zero on average (Higham and Mary 2019, SIAM J.
    Sci. Comput. 41(5), section 2). No bound is below that, since the measured difference of two
    programs may be zero by luck."""
    return math.sqrt(terms) * torch.finfo(dtype).eps / 2


@dataclass
class Findings:
    """The worst case of each quantity as (error, bound, location), by error over bound; and
    problems that have no size."""

    worst: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0  # of those, because fp16 overflowed

    def measure(self, quantity: str, error: float, bound: float, location: str) -> None:
        """Records an error and its bound. An error that is not a number exceeds any bound."""
        if not error < math.inf:
            error = 1e300
        bound = max(bound, 1e-300)
        worst_error, worst_bound, _ = self.worst.get(quantity, (-1.0, 1.0, ""))
        if error / bound > worst_error / worst_bound:
            self.worst[quantity] = error, bound, location

    def expect(self, holds: bool, problem: str) -> None:
        """Records a problem unless a condition holds."""
        if not holds:
            self.problems.append(problem)

    def mean(
        self,
        quantity: str,
        actual: float,
        exact: Tensor,
        *,
        rounded: Tensor,
        floor: float,
        location: str,
        alike: bool = False,
    ) -> None:
        """Compares `actual`, a sum, with that of the `exact` elements. `rounded` are the elements
        as one program computes them.

        The sum may be off by their rounding, taken as independent; with `alike` taken as if all
        were off in the same direction (equal tokens have nearly equal scores). `floor` is the least
        allowed error, over the sum.
        """
        total = float(exact.sum())
        rounding_errors = rounded.double() - exact
        allowed = ALLOWED * float(rounding_errors.norm())
        if alike:
            allowed = ALLOWED_KIND * float(rounding_errors.abs().sum())
        scale = max(abs(total), 1e-300)
        self.measure(quantity, abs(actual - total) / scale, max(allowed / scale, floor), location)

    def elements(
        self, quantity: str, actual: Tensor, expected: Tensor, allowed: Tensor, location: str
    ) -> None:
        """Compares two tensors by the element that is furthest beyond its allowed error; where that
        is 0, both must be equal."""
        error = (actual - expected).abs()
        ratios = torch.where(error > 0, error / allowed.clamp(min=1e-300), 0.0).flatten()
        worst = int(ratios.argmax())
        scale = max(float(expected.abs().max()), 1e-300)
        worst_error = float(error.flatten()[worst]) / scale
        bound = float(allowed.flatten()[worst]) / scale
        self.measure(quantity, worst_error, bound, location)


def rms(grads: Tensors) -> float:
    """Returns the root mean square of all elements."""
    squares = sum(float(grad.double().square().sum()) for grad in grads.values())
    return math.sqrt(squares / sum(grad.numel() for grad in grads.values()))


def distance(actual: Tensor, expected: Tensor, overall: float, blur: float = 0.0) -> float:
    """Returns the 2-norm of the difference, plus `blur`, over that of `expected`. A gradient that
    is zero but for rounding (a key bias) is measured by a thousandth of the model's `overall` root
    mean square."""
    least_scale = 1e-3 * overall * expected.numel() ** 0.5
    scale = max(float(expected.double().norm()), least_scale)
    return (float((actual.double() - expected.double()).norm()) + blur) / scale


def narrow(tensors: list[Tensor], precision: torch.dtype) -> float:
    """Returns the share of elements that are numbers of a precision, to a few units of fp32."""
    flat = torch.cat([tensor.double().flatten() for tensor in tensors])
    flat = flat[flat.abs() > flat.abs().mean() / 4]
    mantissa = torch.frexp(flat)[0]  # whatever the exponent range of fp16
    rounded = mantissa.to(precision).double()
    return float(((mantissa - rounded).abs() < 2.0**-19).double().mean())
