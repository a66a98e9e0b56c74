"""Numbers that carry their derivatives, so that one cost model serves plans and fits.

A `Dual` is a value and its gradient in the logarithms of the profile's parameters (forward-mode
automatic differentiation). Every cost formula works on floats and on duals alike. Plans and the
search use floats, fits use duals.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .numpy_import import np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Dual:
    """A value with its derivatives: `grad[i]` is d value / d ln(parameter i)."""

    __slots__ = ("grad", "value")

    def __init__(self, value: float, grad: NDArray[np.float64]):
        self.value = value
        self.grad = grad

    def __add__(self, number: Number) -> Dual:
        if isinstance(number, Dual):
            return Dual(self.value + number.value, self.grad + number.grad)
        return Dual(self.value + number, self.grad)

    __radd__ = __add__

    def __neg__(self) -> Dual:
        return Dual(-self.value, -self.grad)

    def __sub__(self, number: Number) -> Dual:
        if isinstance(number, Dual):
            return Dual(self.value - number.value, self.grad - number.grad)
        return Dual(self.value - number, self.grad)

    def __rsub__(self, number: float) -> Dual:
        return Dual(number - self.value, -self.grad)

    def __mul__(self, number: Number) -> Dual:
        if isinstance(number, Dual):
            return Dual(
                self.value * number.value,
                self.grad * number.value + number.grad * self.value,
            )
        return Dual(self.value * number, self.grad * number)

    __rmul__ = __mul__

    def __truediv__(self, number: Number) -> Dual:
        if isinstance(number, Dual):
            ratio = self.value / number.value
            return Dual(ratio, (self.grad - number.grad * ratio) / number.value)
        return Dual(self.value / number, self.grad / number)

    def __rtruediv__(self, number: float) -> Dual:
        ratio = number / self.value
        return Dual(ratio, self.grad * (-ratio / self.value))

    def __pow__(self, power: float) -> Dual:
        if self.value == 0.0:
            return Dual(0.0, np.zeros_like(self.grad))
        raised = self.value**power
        return Dual(raised, self.grad * (power * raised / self.value))

    def __lt__(self, number: Number) -> bool:
        return self.value < value_of(number)

    def __le__(self, number: Number) -> bool:
        return self.value <= value_of(number)

    def __gt__(self, number: Number) -> bool:
        return self.value > value_of(number)

    def __ge__(self, number: Number) -> bool:
        return self.value >= value_of(number)


Number = float | Dual


def value_of(number: Number) -> float:
    """Returns the value of a number without its derivatives."""
    return number.value if isinstance(number, Dual) else number


def larger(a: Number, b: Number) -> Number:
    """Returns the larger of two numbers."""
    return a if value_of(a) >= value_of(b) else b


def smaller(a: Number, b: Number) -> Number:
    """Returns the smaller of two numbers."""
    return a if value_of(a) <= value_of(b) else b


def log_gradient(number: Number) -> NDArray[np.float64]:
    """Returns d ln(number) / d ln(parameter), float [parameters].

    The number must carry its derivatives.
    """
    assert isinstance(number, Dual)
    return number.grad / number.value


def scaled_like(value: float, number: Number) -> Number:
    """Returns `value` with the relative gradient of `number`, to which it is proportional."""
    if isinstance(number, Dual):
        return Dual(
            value,
            number.grad * (value / number.value) if number.value else number.grad * 0.0,
        )
    return value


def duals(values: Mapping[str, float]) -> dict[str, Number]:
    """Returns the parameters as numbers that carry their own derivatives, in the given order."""
    unit = np.eye(len(values))
    return {
        name: Dual(value, unit[index] * value) for index, (name, value) in enumerate(values.items())
    }
