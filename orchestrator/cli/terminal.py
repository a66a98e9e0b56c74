"""What the terminal can show. The only place of the CLI that asks."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.style import Style


def style() -> Style:
    """Colour on a terminal unless NO_COLOR is set (no-color.org), 80 columns elsewhere, ASCII where it must be."""
    from orchestrator.style import Style

    terminal = sys.stdout.isatty()
    colour = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size((80, 24)).columns if terminal else 80
    return Style(colour=colour, width=max(60, min(width, 160)), unicode="utf" in (sys.stdout.encoding or "").lower())
