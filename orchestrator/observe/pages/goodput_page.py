"""Renders the time of a run by state, as a strip and a table, and the cost of each fault. Pure
text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.observe.colours import STATE
from orchestrator.observe.goodput.intervals import STATES, WallState
from orchestrator.style import GRAY, RED, Style, fold, seconds

LETTER = {state: state[0].upper() for state in STATES} | {"rendezvous": "Z"}
_SHOWN = 0.2  # share of a cell from which lost time is visible
_MOST_FAULTS = 20


def goodput(report: Mapping[str, Any], style: Style) -> str:
    """The section of `orch report` on goodput and faults."""
    account = report["goodput"]
    wall_s = account["wall_s"]
    head = "Goodput"
    if account["ettr"] is not None:
        head = f"Goodput: ETTR {account['ettr']:.1%} of {seconds(wall_s)}"
    lines = [style.title(head)]
    if account["intervals"]:
        lines.append(strip(account["intervals"], wall_s, style, style.width))
        lines += _scale(wall_s, style)
    if not account["seconds"]:
        lines.append("unknown: the program reports no steps")
    lines += _states(account["seconds"], wall_s or 1.0, style)
    lines += _samples(report["samples"], style)
    lines = [line for line in lines if line]
    if report["faults"]:
        lines += ["", *_faults(report["faults"], style)]
    return "\n".join(lines)


def _states(seconds_of: Mapping[str, float], wall_s: float, style: Style) -> list[str]:
    lines = []
    for state in STATES:
        spent = seconds_of.get(state, 0.0)
        if spent > 0:
            name = style.paint(f"{LETTER[state] + ' ' + state.replace('_', ' '):<22}", STATE[state])
            bar = style.bar(spent / wall_s, 30, STATE[state])
            lines.append(f"{name}{seconds(spent):>14}{spent / wall_s:>8.1%}  {bar}")
    return lines


def _samples(samples: Mapping[str, Any], style: Style) -> list[str]:
    if not samples["consumed"]:
        return []
    if samples["problems"]:
        lines = []
        for problem in samples["problems"][:5]:
            lines += style.fold(style.paint(f"samples: {problem}", RED), 2)
        return lines
    recomputed = ""
    if samples["undone_steps"]:
        recomputed = f", {samples['undone_steps']} steps were undone and recomputed"
    return style.fold(f"{samples['consumed']:,} samples, each once{recomputed}", 2)


def strip(
    intervals: Sequence[Sequence[Any]],
    wall_s: float,
    style: Style,
    cells: int,
) -> str:
    """Draws time from left to right. A cell shows the state that took most of its time, but a lost
    fifth of a cell is always visible."""
    if wall_s <= 0:
        return ""
    characters = []
    index = 0
    for cell in range(cells):
        cell_start = wall_s * cell / cells
        cell_end = wall_s * (cell + 1) / cells
        while index < len(intervals) - 1 and intervals[index][1] <= cell_start:
            index += 1
        spent_in = dict.fromkeys(STATES, 0.0)
        for start, end, state in intervals[index:]:
            if start >= cell_end:
                break
            spent_in[state] += max(0.0, min(end, cell_end) - max(start, cell_start))
        state = _cell_state(spent_in, cell_end - cell_start)
        character = "█" if style.colour and style.unicode else LETTER[state]
        characters.append(style.paint(character, STATE[state]))
    return "".join(characters)


def _cell_state(spent_in: dict[WallState, float], cell_s: float) -> WallState:
    lost = {state: spent for state, spent in spent_in.items() if state != "productive"}
    worst = max(lost, key=lost.__getitem__)
    if lost[worst] >= _SHOWN * cell_s:
        return worst
    return max(spent_in, key=spent_in.__getitem__)


def _scale(wall_s: float, style: Style) -> list[str]:
    last = seconds(wall_s)
    return [style.paint(f"0 s{last:>{max(1, style.width - 3)}}", GRAY)]


def _faults(faults: Sequence[Mapping[str, Any]], style: Style) -> list[str]:
    """Lists the faults, one per line: when it was detected, its cost, its first cause."""
    unplanned = sum(not fault["planned"] for fault in faults)
    planned = len(faults) - unplanned
    counts = _count(unplanned, "fault")
    if planned:
        counts += f", {_count(planned, 'planned change')}"
    steps = sum(fault["lost_steps"] or 0 for fault in faults)
    lost = sum(fault["lost_s"] for fault in faults)
    head = f"{'epoch':>5}  {'noticed':>8} {'back':>8} {'steps':>5} {'lost':>8}  first cause"
    lines = [
        style.title(f"{counts}: {_count(steps, 'step')} and {seconds(lost)} lost"),
        style.paint(head, GRAY),
    ]
    for fault in faults[-_MOST_FAULTS:]:
        lines += _fault_lines(fault, style)
    if len(faults) > _MOST_FAULTS:
        lines.append(f"... and {len(faults) - _MOST_FAULTS} before")
    return lines


def _fault_lines(fault: Mapping[str, Any], style: Style) -> list[str]:
    lost_steps = "-" if fault["lost_steps"] is None else str(fault["lost_steps"])
    numbers = (
        f"{fault['epoch']:>5}  {_seconds(fault['noticed_s']):>8} {_seconds(fault['back_s']):>8}"
        f" {lost_steps:>5} {_seconds(fault['lost_s']):>8}  "
    )
    width = max(30, style.width - len(numbers))
    first, *continuation = fold(fault["text"] or fault["kind"], width)
    colour = None if fault["planned"] else RED
    indent = " " * len(numbers)
    return [
        numbers + style.paint(first, colour),
        *(indent + style.paint(line, colour) for line in continuation),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)
