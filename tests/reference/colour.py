"""How far apart colours look: CIEDE2000, also as people with the three common kinds of
colour-blindness see them.

Sharma, Wu, Dalal, "The CIEDE2000 Color-Difference Formula", 2005; Machado, Oliveira, Fernandes, "A
Physiologically-based Model for Simulation of Color Vision Deficiency", 2009 (severity 1.0, on
linear RGB).
"""

from __future__ import annotations

from math import atan2, cos, degrees, exp, hypot, radians, sin, sqrt

Triple = tuple[float, float, float]
Matrix = tuple[Triple, Triple, Triple]

VISION: dict[str, Matrix] = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
_XYZ: Matrix = (
    (0.4124564, 0.3575761, 0.1804375),
    (0.2126729, 0.7151522, 0.0721750),
    (0.0193339, 0.1191920, 0.9503041),
)
_WHITE = (0.95047, 1.0, 1.08883)


def lab(hex_: str, vision: str = "usual") -> Triple:
    """CIELAB (D65) of #rrggbb."""
    values = [int(hex_[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    seen = [min(1.0, max(0.0, v)) for v in _times(VISION[vision], linear)]
    x, y, z = (_f(v / white) for v, white in zip(_times(_XYZ, seen), _WHITE, strict=True))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(first: Triple, second: Triple) -> float:
    """CIEDE2000 of two CIELAB colours."""
    (l1, a1, b1) = first
    (l2, a2, b2) = second
    mean = (hypot(a1, b1) + hypot(a2, b2)) / 2
    g = 0.5 * (1 - sqrt(mean**7 / (mean**7 + 25**7)))
    a1 = a1 * (1 + g)
    a2 = a2 * (1 + g)
    c1 = hypot(a1, b1)
    c2 = hypot(a2, b2)
    h1, h2 = (degrees(atan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    big_h = 2 * sqrt(c1 * c2) * sin(radians(turn / 2))
    l = (l1 + l2) / 2
    c = (c1 + c2) / 2
    if c1 * c2 == 0:
        h = h1 + h2
    elif abs(h1 - h2) <= 180:
        h = (h1 + h2) / 2
    else:
        h = (h1 + h2 + (360 if h1 + h2 < 360 else -360)) / 2
    t = (
        1
        - 0.17 * _cos(h - 30)
        + 0.24 * _cos(2 * h)
        + 0.32 * _cos(3 * h + 6)
        - 0.2 * _cos(4 * h - 63)
    )
    rotation = -sin(radians(60 * exp(-(((h - 275) / 25) ** 2)))) * 2 * sqrt(c**7 / (c**7 + 25**7))
    in_l = (l2 - l1) / (1 + 0.015 * (l - 50) ** 2 / sqrt(20 + (l - 50) ** 2))
    in_c = (c2 - c1) / (1 + 0.045 * c)
    in_h = big_h / (1 + 0.015 * c * t)
    return sqrt(in_l**2 + in_c**2 + in_h**2 + rotation * in_c * in_h)


def _cos(angle: float) -> float:
    return cos(radians(angle))


def _f(value: float) -> float:
    return value ** (1 / 3) if value > (6 / 29) ** 3 else value / (3 * (6 / 29) ** 2) + 4 / 29


def _times(matrix: Matrix, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]
