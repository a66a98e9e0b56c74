"""Where the time of a run went, as a strip and a table, and what each fault has cost. Pure text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.observe.goodput.intervals import STATES
from orchestrator.style import GRAY, GREEN, RED, YELLOW, Style, seconds

COLOUR = {
    "productive": GREEN,
    "replay": 141,
    "startup": 80,
    "checkpoint_stall": 75,
    "rendezvous": YELLOW,
    "waiting": GRAY,
    "hang": RED,
}
LETTER = {state: state[0].upper() for state in STATES} | {"rendezvous": "Z"}
_SHOWN = 0.2  # of a cell: from there on what was not productive is seen
_MOST_FAULTS = 20


def goodput(report: Mapping[str, Any], style: Style) -> str:
    """The section of `orch report`."""
    account = report["goodput"]
    head = (
        "Goodput"
        if account["ettr"] is None
        else f"Goodput: ETTR {account['ettr']:.1%} of {seconds(account['wall_s'])}"
    )
    lines = [style.title(head)]
    if account["intervals"]:
        lines += [
            strip(account["intervals"], account["wall_s"], style, style.width),
            *_scale(account["wall_s"], style),
        ]
    if not account["seconds"]:
        lines.append("unknown: the program reports no steps")
    wall = account["wall_s"] or 1.0
    for state in STATES:
        spent = account["seconds"].get(state, 0.0)
        if spent > 0:
            name = f"{LETTER[state]} {state.replace('_', ' ')}"
            bar = style.bar(spent / wall, 30, COLOUR[state])
            lines.append(
                f"{style.paint(f'{name:<22}', COLOUR[state])}{seconds(spent):>14}{spent / wall:>8.1%}"
                f"  {bar}"
            )
    samples = report["samples"]
    if samples["consumed"]:
        undone = (
            f", {samples['undone_steps']} steps were undone and done again"
            if samples["undone_steps"]
            else ""
        )
        lines.append(
            f"{samples['consumed']:,} samples, each once{undone}" if not samples["problems"] else ""
        )
        lines += [style.paint(f"samples: {problem}", RED) for problem in samples["problems"][:5]]
    lines = [line for line in lines if line]
    return "\n".join(lines + (["", *_faults(report["faults"], style)] if report["faults"] else []))


def strip(intervals: Sequence[Sequence[Any]], wall_s: float, style: Style, cells: int) -> str:
    """Time from left to right; a cell shows what took most of it, but never hides a stop of a fifth
    of it."""
    if wall_s <= 0:
        return ""
    letters = []
    index = 0
    for cell in range(cells):
        cell_start = wall_s * cell / cells
        cell_end = wall_s * (cell + 1) / cells
        inside = dict.fromkeys(STATES, 0.0)
        while index < len(intervals) - 1 and intervals[index][1] <= cell_start:
            index += 1
        for start, end, state in intervals[index:]:
            if start >= cell_end:
                break
            inside[state] += max(0.0, min(end, cell_end) - max(start, cell_start))
        lost = {state: spent for state, spent in inside.items() if state != "productive"}
        worst = max(lost, key=lost.__getitem__)
        shown = (
            worst
            if lost[worst] >= _SHOWN * (cell_end - cell_start)
            else max(inside, key=inside.__getitem__)
        )
        letters.append(
            style.paint("█" if style.colour and style.unicode else LETTER[shown], COLOUR[shown])
        )
    return "".join(letters)


def _scale(wall_s: float, style: Style) -> list[str]:
    last = seconds(wall_s)
    return [style.paint(f"0 s{last:>{max(1, style.width - 3)}}", GRAY)]


def _faults(faults: Sequence[Mapping[str, Any]], style: Style) -> list[str]:
    """One line a fault: when it was, what it was, what it cost."""
    hurt = [fault for fault in faults if not fault["planned"]]
    moved = len(faults) - len(hurt)
    fault_count = f"{len(hurt)} fault{'s' * (len(hurt) != 1)}" + (
        f", {moved} planned change{'s' * (moved != 1)}" * bool(moved)
    )
    steps = sum(fault["lost_steps"] or 0 for fault in faults)
    lost = sum(fault["lost_s"] for fault in faults)
    lines = [
        style.title(f"{fault_count}: {steps} step{'s' * (steps != 1)} and {seconds(lost)} lost")
    ]
    lines.append(
        style.paint(
            f"{'epoch':>5}  {'noticed':>8} {'back':>8} {'steps':>5} {'lost':>8}  first cause", GRAY
        )
    )
    for fault in faults[-_MOST_FAULTS:]:
        cells = [_seconds(fault[name]) for name in ("noticed_s", "back_s")]
        lost_steps = "-" if fault["lost_steps"] is None else str(fault["lost_steps"])
        row = (
            f"{fault['epoch']:>5}  {cells[0]:>8} {cells[1]:>8} {lost_steps:>5}"
            f" {_seconds(fault['lost_s']):>8}  "
        )
        first, *continuation = textwrap.wrap(
            fault["text"] or fault["kind"], max(30, style.width - len(row))
        ) or [""]
        lines.append(row + style.paint(first, None if fault["planned"] else RED))
        lines += [
            " " * len(row) + style.paint(line, None if fault["planned"] else RED)
            for line in continuation
        ]
    return lines + (
        [f"... and {len(faults) - _MOST_FAULTS} before"] if len(faults) > _MOST_FAULTS else []
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)
