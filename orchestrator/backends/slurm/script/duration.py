"""Slurm's way of writing a length of time (sbatch(1), `--time`) <-> whole seconds."""

from __future__ import annotations

import re

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

FORMS = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds"
_FORM = re.compile(r"(?:([0-9]{1,6})-)?([0-9]{1,9})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?\Z")
_ENDLESS = {"UNLIMITED", "INFINITE", "-1"}


def parse(text: str) -> int | None:
    """Seconds; None for no limit. Raises OrchError (65) naming the legal forms."""
    word = text.strip()
    if word.upper() in _ENDLESS:
        return None
    found = _FORM.match(word)
    if not found:
        raise OrchError(f"{text!r} is not a Slurm time; forms: {FORMS}, UNLIMITED", Exit.CONFIG)
    days, *rest = found.groups()
    numbers = [int(n) for n in rest if n is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def render(seconds: int) -> str:
    """`D-HH:MM:SS`, the days left out when there are none."""
    if seconds < 0:
        raise ValueError(f"a length of time cannot be {seconds} s")
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
