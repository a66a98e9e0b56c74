"""Writes all sections as rows for `--json` and as the page docs/reproduce.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.accuracy.reproduce import playbook, runs, zero

from .rows import Load, Plans, Row, Section

TITLE = (
    "# The headline results, reproduced\n"
    "\n"
    "Written by `orch reproduce`; a test computes it again. *Theirs* are published figures, *ours*"
    " are computed by the\n"
    "planner's own functions on every call: nothing is stored. Cells of grids read theirs / ours."
    " **Bold**: further from\n"
    "theirs than the limit of that row, or on the wrong side of a bound; where there is no limit,"
    " the text says why. ±: one\n"
    "standard deviation of a prediction for machines that nobody has measured, from the shipped"
    " profile.\n"
)


def reproduce(load: Load, experiments: Sequence[str]) -> list[Section]:
    """Computes every section, in the page's order.

    `load` composes a configuration; `experiments` are the names of the presets.
    """
    plans = Plans(load)
    return [*runs.sections(plans, experiments), *zero.sections(plans), *playbook.sections(plans)]


def markdown(sections: Sequence[Section]) -> str:
    """Returns the page in Markdown, with a final newline."""
    return "\n".join([TITLE, *map(_section, sections)])


def as_json(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """Returns one dictionary per section."""
    return [
        {
            "title": section.title,
            "source": section.source,
            "why": section.why,
            "rows": [
                {
                    "what": row.what,
                    "column": row.column,
                    "unit": row.unit,
                    "theirs": row.theirs,
                    "ours": row.ours,
                    "sd": row.sd,
                    "bound": row.bound,
                    "within": row.within,
                    "holds": row.holds,
                }
                for row in section.rows
            ],
        }
        for section in sections
    ]


def _section(section: Section) -> str:
    table = _grid(section.rows) if any(row.column for row in section.rows) else _list(section.rows)
    paragraphs = [f"## {section.title}", f"Theirs: {section.source}.", table]
    paragraphs += [f"Ours: {section.about}"] if section.about else []
    paragraphs += [f"Why they differ: {section.why}"] if section.why else []
    return "\n\n".join(paragraphs) + "\n"


def _list(rows: Sequence[Row]) -> str:
    lines = ["| | theirs | ours | difference | at most |", "|---|---|---|---|---|"]
    for row in rows:
        theirs = "-"
        if row.theirs is not None:
            theirs = f"{BOUND[row.bound]}{number(row.theirs)} {row.unit}".strip()
        ours = f"{_ours(row)} {row.unit}".strip()
        if not row.holds:
            ours = f"**{ours}**"
        difference = "-" if row.off is None else f"{row.off:+.1%}"
        lines.append(
            f"| {row.what} | {theirs} | {ours} | {difference} | {_tolerance(row.within)} |"
        )
    return "\n".join(lines)


def _tolerance(within: float | None) -> str:
    if within is None:
        return ""
    return f"{within:.2g}" if within < 1e-3 else f"{within:.1%}"


BOUND = {"": "", "more": "more than ", "less": "less than "}


def _grid(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(row.column for row in rows))
    row_names = list(dict.fromkeys(row.what for row in rows))
    cells = {(row.what, row.column): row for row in rows}
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row_name in row_names:
        row_cells = (cells.get((row_name, column)) for column in columns)
        lines.append(f"| {row_name} | {' | '.join(_cell(row) for row in row_cells)} |")
    return "\n".join(lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    ours = _ours(row) if row.holds else f"**{_ours(row)}**"
    return ours if row.theirs is None else f"{number(row.theirs)} / {ours}"


def _ours(row: Row) -> str:
    """Formats our figure, with plus or minus one standard deviation if it has one."""
    return f"{number(row.ours)} ± {number(row.ours * row.sd)}" if row.sd else number(row.ours)


def number(value: float) -> str:
    """Formats a number with three significant digits: 31.4, 4,190, 3.14e+23."""
    if abs(value) >= 1e6:
        return f"{value:.2e}"
    if value == 0:
        return "0"
    digits = f"{value:.3g}"
    return f"{float(digits):,.0f}" if abs(value) >= 100 else digits
