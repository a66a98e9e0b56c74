"""What a judge has found, and how far apart two tensors are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
#: Times its rounding, measured or of `rounding`, that a quantity may be off (docs/verify.md).
ALLOWED = 6.0
#: The same over all matrices of a kind together (every layer's `attn.wq`), in bf16 and fp16: so
#: many elements that the ratio hardly varies, and a rounding too many shows.
ALLOWED_KIND = 2.0


def rounding(terms: int, dtype: torch.dtype) -> float:
    """What rounding does to a sum of so many terms in any order, over the sum of their sizes.

    That is half the distance from 1 to the next number, times the root of the number of terms. A
    sum is off by more than `ALLOWED` times as much with a probability of 2 exp(-ALLOWED^2 / 2) a
    term, 3e-8, if its roundings are independent and zero on average (Higham and Mary 2019, SIAM J.
    Sci. Comput. 41(5), section 2). No bound is below that: what is measured of two programs may
    be zero by luck."""
    return math.sqrt(terms) * torch.finfo(dtype).eps / 2


@dataclass
class Findings:
    """The worst of each quantity as (error, bound, where), by error over bound; and what is wrong
    whatever the size."""

    worst: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    steps: int = 0
    skipped: int = 0  # of those, because fp16 overflowed

    def measure(self, what: str, error: float, bound: float, where: str) -> None:
        """Not a number is beyond any bound."""
        if not error < math.inf:
            error = 1e300
        bound = max(bound, 1e-300)
        if what not in self.worst or error / bound > self.worst[what][0] / self.worst[what][1]:
            self.worst[what] = error, bound, where

    def expect(self, holds: bool, problem: str) -> None:
        if not holds:
            self.problems.append(problem)

    def mean(
        self,
        what: str,
        found: float,
        exact: Tensor,
        rounded: Tensor,
        floor: float,
        where: str,
        alike: bool = False,
    ) -> None:
        """`found`: the sum of elements of which `exact` are the true ones and `rounded` one
        program's. Their rounding, as if it were independent, is what the sum may be off; with
        `alike`, as if all were off the same way (equal tokens have nearly equal scores). `floor`:
        what it may be off in any case, over the sum."""
        total = float(exact.sum())
        off = rounded.double() - exact
        noise = ALLOWED_KIND * float(off.abs().sum()) if alike else ALLOWED * float(off.norm())
        scale = max(abs(total), 1e-300)
        self.measure(what, abs(found - total) / scale, max(noise / scale, floor), where)

    def elements(self, what: str, found: Tensor, wanted: Tensor, room: Tensor, where: str) -> None:
        """The element furthest beyond its room; where the room is nothing, both must be equal."""
        error = (found - wanted).abs()
        over = torch.where(error > 0, error / room.clamp(min=1e-300), 0.0).flatten()
        at = int(over.argmax())
        scale = max(float(wanted.abs().max()), 1e-300)
        self.measure(
            what, float(error.flatten()[at]) / scale, float(room.flatten()[at]) / scale, where
        )


def rms(grads: Tensors) -> float:
    """Root mean square of all elements."""
    return math.sqrt(
        sum(float(g.double().square().sum()) for g in grads.values())
        / sum(g.numel() for g in grads.values())
    )


def distance(found: Tensor, wanted: Tensor, overall: float, blur: float = 0.0) -> float:
    """2-norm of the difference (and of `blur`) over that of `wanted`; a gradient that is zero but
    for rounding (a key bias) is measured by a thousandth of the model's `overall` root mean
    square."""
    scale = max(float(wanted.double().norm()), 1e-3 * overall * wanted.numel() ** 0.5)
    return (float((found.double() - wanted.double()).norm()) + blur) / scale


def narrow(tensors: list[Tensor], precision: torch.dtype) -> float:
    """Share of elements that are numbers of a precision, to a few units of fp32."""
    flat = torch.cat([one.double().flatten() for one in tensors])
    flat = flat[flat.abs() > flat.abs().mean() / 4]
    mantissa = torch.frexp(flat)[0]  # the exponent range of fp16 is no matter of this
    near = mantissa.to(precision).double()
    return float(((mantissa - near).abs() < 2.0**-19).double().mean())
