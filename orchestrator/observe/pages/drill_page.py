"""Renders the table at the end of a drill. Pure text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.style import GRAY, GREEN, RED, Style, seconds


def table(rows: Sequence[Mapping[str, Any]], style: Style) -> str:
    """The success rate, p50 and p95 of each fault and position."""
    lines = [style.title("Drill")]
    head = (
        f"{'fault':<13}{'victim':<13}{'recovered':>9}{'noticed p50':>12}{'p95':>9}"
        f"{'steps p50':>10}{'p95':>9}{'lost':>5}"
    )
    lines.append(style.paint(head, GRAY))
    for row in rows:
        share = f"{row['recovered']}/{row['trials']}"
        colour = GREEN if row["recovered"] == row["trials"] else RED
        noticed = row["noticed_s"]
        steps = row["stepping_s"]
        most_lost_steps = row["lost_steps"]["max"]
        lines.append(
            f"{row['fault']:<13}{row['position']:<13}{style.paint(f'{share:>9}', colour)}"
            f"{_s(noticed['p50']):>12}{_s(noticed['p95']):>9}"
            f"{_s(steps['p50']):>10}{_s(steps['p95']):>9}"
            f"{'-' if most_lost_steps is None else most_lost_steps:>5}"
        )
        for problem in row["problems"][:3]:
            lines += style.fold(f"  {style.paint(problem, RED)}", 4)
    return "\n".join(lines)


def _s(value: float | None) -> str:
    return "-" if value is None else seconds(value)
