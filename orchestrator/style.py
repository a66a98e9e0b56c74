"""Numbers, bars and colours for a terminal. Pure: a `Style` decides once whether there is colour
and how wide the output is.

This is not rich, which takes 58 ms to import; this takes 2, and a verb on a cached plan takes 80
in all.
"""

from __future__ import annotations

from msgspec import Struct

GRAY = 245
RED = 203
GREEN = 78
YELLOW = 221  # of words

#: Colours of areas, as xterm 256-colour codes, in terminals and pictures alike. Each has one
#: meaning. Any two differ by a CIEDE2000 of 10 or more, also with the three common kinds of
#: colour-blindness (tests/observe/test_colours.py).
REPLICA = (67, 217, 107, 99, 186, 73, 177, 112)  # further replicas repeat them with a pattern
CATEGORY_COLOUR = {"params": 60, "grads": 124, "optimizer": 100, "activations": 131, "buffers": 92}
COMMUNICATION = 125
COMPUTE = 245
IDLE = 238
FORWARD = 153
BACKWARD = 86


def hex_of(code: int) -> str:
    """Returns #rrggbb of a code of the 256, from 16 on."""
    if code >= 232:
        return "#" + f"{8 + 10 * (code - 232):02x}" * 3
    levels = (0, 95, 135, 175, 215, 255)
    code = code - 16
    return "#" + "".join(f"{levels[code // step % 6]:02x}" for step in (36, 6, 1))


class Style(Struct, frozen=True):
    """The properties of a terminal. colour: ANSI escapes allowed. width: columns. Without
    `unicode`, bars are plain ASCII."""

    colour: bool = False
    width: int = 80
    unicode: bool = True

    def paint(self, string: str, code: int | None = None, bold: bool = False) -> str:
        if not self.colour or (code is None and not bold):
            return string
        codes = ["1"] if bold else []
        if code is not None:
            codes.append(f"38;5;{code}")
        return f"\033[{';'.join(codes)}m{string}\033[0m"

    def fill(self, string: str, code: int) -> str:
        """Returns text on a coloured background; plain without colour."""
        return f"\033[48;5;{code};38;5;16m{string}\033[0m" if self.colour else string

    def title(self, heading: str) -> str:
        dash = "─" if self.unicode else "-"
        line = dash * max(0, self.width - len(heading) - 1)
        return f"{self.paint(heading, bold=True)} {self.paint(line, GRAY)}"

    def bar(self, share: float, cells: int, code: int) -> str:
        """Draws a bar of `share` (0 to 1, more is cut) of `cells` cells, to an eighth of a cell."""
        share = min(max(share, 0.0), 1.0)
        if not self.unicode:
            full = round(share * cells)
            return self.paint("#" * full, code) + "." * (cells - full)
        eighths = round(share * cells * 8)
        if share > 0:
            eighths = max(1, eighths)
        full, eighth = divmod(eighths, 8)
        body = "█" * full + ("▏▎▍▌▋▊▉"[eighth - 1] if eighth else "")
        return self.paint(body, code) + " " * (cells - full - (eighth > 0))


def fold(line: str, width: int, indent: int = 0) -> list[str]:
    """Folds a line into as many as it needs, those after the first indented; a word that is too
    long stays whole."""
    if len(line) <= width:
        return [line]
    import textwrap

    wrapper = textwrap.TextWrapper(width, subsequent_indent=" " * indent)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(line) or [""]


def si(value: float, unit: str = "") -> str:
    """Formats three digits with a decimal prefix: 1234567 -> "1.23 M"."""
    for factor, prefix in (
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(value) >= factor * 0.9995:
            return f"{three(value / factor)} {prefix}{unit}"
    return f"{three(value)} {unit}".rstrip()


def percent(share: float) -> str:
    """Formats whole percents; a share that rounds to nothing is "<1%"."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def seconds(value: float) -> str:
    """Formats a duration with three digits: 0.00123 -> "1.23 ms", 4000 -> "1 h 07 min"."""
    if value >= 3600:
        hours, minutes = divmod(round(value / 60), 60)
        return f"{hours} h {minutes:02d} min"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor * 0.9995:
            return f"{three(value / factor)} {unit}"
    return "0 s" if value == 0 else f"{three(value / 1e-6)} us"


def binary(value: float) -> str:
    """Formats bytes with three digits: 1536 -> "1.50 KiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{three(value / scale)} {unit}"
    return f"{value:.0f} B"


def three(value: float) -> str:
    """Formats three digits, thousands in full."""
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
