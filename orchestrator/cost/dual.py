"""Numbers that carry their derivatives, so that one cost model serves plans (floats) and fits
(derivatives).

A `Dual` is a value and its gradient in the logarithms of the profile's parameters (forward-mode
automatic differentiation). Every cost formula works on floats and on duals alike; the search uses
floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .numpy_import import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Dual:
    """`value`, and `grad[i]` = d value / d ln(parameter i)."""

    __slots__ = ("grad", "value")

    def __init__(self, value: float, grad: NDArray[np.float64]):
        self.value = value
        self.grad = grad

    def __add__(self, other: Number) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value + other.value, self.grad + other.grad)
        return Dual(self.value + other, self.grad)

    __radd__ = __add__

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.grad)

    def __sub__(self, other: Number) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value - other.value, self.grad - other.grad)
        return Dual(self.value - other, self.grad)

    def __rsub__(self, other: float) -> Dual:
        return Dual(other - self.value, -self.grad)

    def __mul__(self, other: Number) -> Dual:
        if isinstance(other, Dual):
            return Dual(self.value * other.value, self.grad * other.value + other.grad * self.value)
        return Dual(self.value * other, self.grad * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Number) -> Dual:
        if isinstance(other, Dual):
            ratio = self.value / other.value
            return Dual(ratio, (self.grad - other.grad * ratio) / other.value)
        return Dual(self.value / other, self.grad / other)

    def __rtruediv__(self, other: float) -> Dual:
        ratio = other / self.value
        return Dual(ratio, self.grad * (-ratio / self.value))

    def __pow__(self, power: float) -> Dual:
        if self.value == 0.0:
            return Dual(0.0, np.zeros_like(self.grad))
        result = self.value**power
        return Dual(result, self.grad * (power * result / self.value))

    def __lt__(self, other: Number) -> bool:
        return self.value < value_of(other)

    def __le__(self, other: Number) -> bool:
        return self.value <= value_of(other)

    def __gt__(self, other: Number) -> bool:
        return self.value > value_of(other)

    def __ge__(self, other: Number) -> bool:
        return self.value >= value_of(other)


Number = float | Dual


def value_of(number: Number) -> float:
    return number.value if isinstance(number, Dual) else number


def larger(a: Number, b: Number) -> Number:
    return a if value_of(a) >= value_of(b) else b


def smaller(a: Number, b: Number) -> Number:
    return a if value_of(a) <= value_of(b) else b


def log_gradient(number: Number) -> NDArray[np.float64]:
    """d ln(number) / d ln(parameter), float [parameters]; of a number that carries its
    derivatives."""
    assert isinstance(number, Dual)
    return number.grad / number.value


def scaled_like(value: float, number: Number) -> Number:
    """`value` with the relative gradient of `number`: for results that are proportional to it."""
    if isinstance(number, Dual):
        return Dual(
            value, number.grad * (value / number.value) if number.value else number.grad * 0.0
        )
    return value


def duals(values: Mapping[str, float]) -> dict[str, Number]:
    """Parameters by name as numbers that carry their own derivatives, in the order of `values`."""
    unit = np.eye(len(values))
    return {name: Dual(value, unit[at] * value) for at, (name, value) in enumerate(values.items())}
