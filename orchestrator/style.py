"""Numbers, bars and colours for a terminal. Pure: a `Style` decides once whether there is colour
and how wide the output is.

This is not rich, which takes 58 ms to import; this takes 2, and a verb on a cached plan takes 80
in all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

#: Colours of words, as xterm's 256-colour codes. Those of areas: orchestrator/observe/colours.py.
GRAY = 245
RED = 196
GREEN = 71
YELLOW = 221


_COLOURS = re.compile(r"\033\[[0-9;]*m")


class Style(Struct, frozen=True):
    """The properties of a terminal. colour: ANSI escapes allowed. width: columns. Without
    `unicode`, bars are plain ASCII."""

    colour: bool = False
    width: int = 80
    unicode: bool = True

    def paint(self, string: str, code: int | None = None, bold: bool = False) -> str:
        if not self.colour or (code is None and not bold):
            return string
        codes = []
        if bold:
            codes.append("1")
        if code is not None:
            codes.append(f"38;5;{code}")
        return f"\033[{';'.join(codes)}m{string}\033[0m"

    def fill(self, string: str, code: int, ink: int) -> str:
        """Returns text of the colour `ink` on a coloured ground; plain without colour."""
        return f"\033[48;5;{code};38;5;{ink}m{string}\033[0m" if self.colour else string

    def fold(self, line: str, indent: int = 0) -> list[str]:
        """Folds a line at the width of the terminal; the lines after the first are indented."""
        return fold(line, self.width, indent)

    def rows(self, rows: Iterable[tuple[str, str]], indent: int) -> list[str]:
        """Lines of a name and, from column `indent` on, its content, which is folded."""
        width = max(30, self.width - indent)
        start = " " * indent
        lines = []
        for name, content in rows:
            first, *continuation = fold(content, width)
            heading = self.paint(name.ljust(indent - 1), GRAY)
            lines.append(f"{heading} {first}".rstrip())
            lines += [start + line for line in continuation]
        return lines

    def title(self, heading: str) -> str:
        dash = "─" if self.unicode else "-"
        room = self.width - len(heading) - 1
        line = self.paint(dash * max(0, room), GRAY)
        name = self.paint(heading, bold=True)
        return f"{name} {line}"

    def bar(self, share: float, cells: int, code: int) -> str:
        """Draws a bar of `share` (0 to 1, more is cut) of `cells` cells, to an eighth of a cell."""
        share = min(max(share, 0.0), 1.0)
        if not self.unicode:
            full = round(share * cells)
            rest = "." * (cells - full)
            return self.paint("#" * full, code) + rest
        eighths = round(share * cells * 8)
        if share > 0:
            eighths = max(1, eighths)
        full, eighth = divmod(eighths, 8)
        body = "█" * full
        if eighth:
            body += "▏▎▍▌▋▊▉"[eighth - 1]
        rest = " " * (cells - len(body))
        return self.paint(body, code) + rest


def fold(line: str, width: int, indent: int = 0) -> list[str]:
    """Folds a line into as many as it needs, those after the first indented; a word that is too
    long stays whole. Colours take no room."""
    lines = [""]
    for spaced_word in re.findall(r"\s*\S+", line):
        last = lines[-1]
        longer = last + spaced_word
        columns = len(_COLOURS.sub("", longer))
        if columns > width and last.strip():
            start = " " * indent
            lines.append(start + spaced_word.lstrip())
        else:
            lines[-1] = longer
    return lines


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
