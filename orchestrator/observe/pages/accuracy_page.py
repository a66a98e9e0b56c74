"""Renders the errors of predictions as tables. Pure text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.accuracy.calibrate.table import Ablation
    from orchestrator.accuracy.predict.score import Errors, Score

_WIDTH = 80
NOTHING = "The table has no measured columns: step_time_s, peak_mem_gib, status."
#: Column -> field of `Errors`.
TIME = {"mean": "mean", "p90": "p90", "bias": "bias", "after 1": "after_one"}
TIME |= {"in 68%": "inside68", "in 95%": "inside95"}
MEMORY = {name: TIME[name] for name in ("mean", "p90", "bias", "in 68%", "in 95%")}


def page(score: Score, terms: Sequence[Ablation] = ()) -> str:
    """The tables of step time, memory, order of layouts and fits. `terms`: the errors without each
    term of the cost model."""
    tables = []
    if score.time:
        columns = TIME
        if any(row.fitted is not None for row in score.time):
            columns = {"fitted": "fitted"} | TIME
        tables.append(_errors("step time", score.time, columns))
    if score.memory:
        tables.append(_errors("peak memory", score.memory, MEMORY))
    if score.order:
        rows = [
            (
                row.group,
                row.layouts,
                row.sweeps,
                f"{row.spearman:.2f}",
                row.regret,
                row.worst,
            )
            for row in score.order
        ]
        tables.append(
            _table("order of layouts", ("layouts", "sweeps", "Spearman", "regret", "worst"), rows)
        )
    if score.fits:
        counts = [
            [score.fits.get((measured, predicted), 0) for predicted in ("ok", "oom")]
            for measured in ("ok", "oom")
        ]
        tables.append(
            _table(
                "measured / predicted",
                ("fits", "oom"),
                [("fits", *counts[0]), ("oom", *counts[1])],
            )
        )
    if terms:
        tables.append(
            _table(
                "terms",
                ("fitted", "left out"),
                [(row.term, row.fitted, row.left_out) for row in terms],
            )
        )
    return "\n\n".join(tables) or NOTHING


def _errors(title: str, rows: Sequence[Errors], columns: dict[str, str]) -> str:
    lines = [
        (
            row.group,
            row.rows,
            *(getattr(row, field) for field in columns.values()),
        )
        for row in rows
    ]
    return _table(
        title,
        ("rows", *columns),
        lines,
        signed=1 + 1 + list(columns).index("bias"),
    )


def _table(
    title: str,
    head: Sequence[str],
    rows: Iterable[Sequence[Any]],
    signed: int = -1,
) -> str:
    """Formats shares as percentages; those of the column `signed` have a sign."""
    table = [[title, *head]]
    for name, *values in rows:
        cells = [_cell(value, index == signed) for index, value in enumerate(values, start=1)]
        table.append([f"  {name}", *cells])
    names, *columns = (max(map(len, column)) for column in zip(*table, strict=True))
    gap = 2 if names + sum(columns) + 2 * len(columns) <= _WIDTH else 1
    lines = []
    for name, *cells in table:
        padded = [cell.rjust(width + gap) for cell, width in zip(cells, columns, strict=True)]
        lines.append(name.ljust(names) + "".join(padded))
    return "\n".join(lines)


def _cell(value: Any, signed: bool) -> str:
    if value is None:
        return "-"
    if signed:
        return f"{value:+.1%}"
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def as_json(score: Score, terms: Sequence[Ablation] = ()) -> dict[str, Any]:
    """The content of `page` as plain values."""
    lists = {
        name: [row._asdict() for row in getattr(score, name)]
        for name in ("time", "memory", "order")
    }
    fits = [
        {"measured": measured, "predicted": predicted, "rows": rows}
        for (measured, predicted), rows in sorted(score.fits.items())
    ]
    return {
        **lists,
        "fits": fits,
        **({"terms": [term._asdict() for term in terms]} if terms else {}),
    }
