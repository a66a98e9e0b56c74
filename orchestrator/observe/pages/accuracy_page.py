"""How far predictions are off, as tables. Pure text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.accuracy.calibrate.table import Ablation
    from orchestrator.accuracy.predict.score import Errors, Score

NOTHING = "The table has no measured columns: step_time_s, peak_mem_gib, status."
#: Column -> field of `Errors`.
TIME = {"mean": "mean", "p90": "p90", "bias": "bias", "after 1": "after_one"}
TIME |= {"in 68%": "inside68", "in 95%": "inside95"}
MEMORY = {name: TIME[name] for name in ("mean", "p90", "bias", "in 68%", "in 95%")}


def page(found: Score, terms: Sequence[Ablation] = ()) -> str:
    """Step time, memory, order of layouts, fits; and the terms of the model, where they were left
    out one by one."""
    parts = []
    if found.time:
        fitted = any(one.fitted is not None for one in found.time)
        parts.append(
            _errors("step time", found.time, {**({"fitted": "fitted"} if fitted else {}), **TIME})
        )
    if found.memory:
        parts.append(_errors("peak memory", found.memory, MEMORY))
    if found.order:
        rows = [
            (one.group, one.layouts, one.sweeps, f"{one.spearman:.2f}", one.regret, one.worst)
            for one in found.order
        ]
        parts.append(
            _table("order of layouts", ("layouts", "sweeps", "Spearman", "regret", "worst"), rows)
        )
    if found.fits:
        counts = [
            [found.fits.get((kind, other), 0) for other in ("ok", "oom")] for kind in ("ok", "oom")
        ]
        parts.append(
            _table(
                "measured / predicted", ("fits", "oom"), [("fits", *counts[0]), ("oom", *counts[1])]
            )
        )
    if terms:
        parts.append(
            _table(
                "terms",
                ("fitted", "left out"),
                [(one.term, one.fitted, one.left_out) for one in terms],
            )
        )
    return "\n\n".join(parts) or NOTHING


def _errors(title: str, rows: Sequence[Errors], columns: dict[str, str]) -> str:
    lines = [
        (one.group, one.rows, *(getattr(one, field) for field in columns.values())) for one in rows
    ]
    return _table(title, ("rows", *columns), lines, signed=1 + 1 + list(columns).index("bias"))


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]], signed: int = -1) -> str:
    """Shares as percents; the column `signed` with its sign."""
    rows = list(rows)
    wide = max(24, *(len(str(row[0])) for row in rows)) + 2
    lines = [f"{title:<{wide}}" + "".join(f"{name:>9}" for name in head)]
    for row in rows:
        cells = [_cell(value, index == signed) for index, value in enumerate(row)][1:]
        lines.append(f"  {row[0]!s:<{wide - 2}}" + "".join(f"{cell:>9}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any, signed: bool) -> str:
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}" if isinstance(value, float) else str(value)


def as_json(found: Score, terms: Sequence[Ablation] = ()) -> dict[str, Any]:
    """The same as plain values."""
    lists = {
        name: [row._asdict() for row in getattr(found, name)]
        for name in ("time", "memory", "order")
    }
    fits = [
        {"measured": measured, "predicted": predicted, "rows": rows}
        for (measured, predicted), rows in sorted(found.fits.items())
    ]
    return {**lists, "fits": fits, **({"terms": [one._asdict() for one in terms]} if terms else {})}
