"""`orch predict`: step time, throughput and memory for every row of a table, and how far off they are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.planner.predict.predict import Prediction
    from orchestrator.planner.predict.score import Score

#: Rows between two lines of progress on a terminal.
PROGRESS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", metavar="FILE.csv", type=Path, required=True, help="columns as in docs/accuracy.md")
    parser.add_argument("--out", metavar="FILE.csv", type=Path, help="write predictions here")
    parser.add_argument("--score", action="store_true", help="errors by group where the table has measured columns")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Rows are read, predicted and written one at a time; a score keeps of each what it compares."""
    from orchestrator.cli.terminal import write_file
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.predict.predict import COLUMNS, predict
    from orchestrator.planner.predict.score import COMPARED, score

    measured: list[dict[str, str]] = []
    predictions: list[Prediction] = []

    def kept() -> Iterator[dict[str, str]]:
        for row in read_table(args.table):
            if args.score:
                measured.append({name: row[name] for name in COMPARED if name in row})
            yield row

    def lines() -> Iterator[str]:
        yield csv_line(COLUMNS)
        for prediction in progress(predict(kept())):
            if args.score:
                predictions.append(prediction)
            yield csv_line(prediction.cells())

    if args.out:
        write_file(args.out, (line.encode(errors="replace") for line in lines()), "--out")
    else:
        for line in lines():
            if not args.score:
                print(line, end="")
    if args.score:
        print(page(score(measured, predictions), args.json))
    return Exit.DONE


def csv_line(cells: Sequence[str]) -> str:
    import csv
    import io

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def progress(predictions: Iterable[Prediction]) -> Iterator[Prediction]:
    """The same, with a count on stderr where that is a terminal and the table is long."""
    shown = sys.stderr.isatty()
    count = 0
    for count, prediction in enumerate(predictions, 1):
        yield prediction
        if shown and count % PROGRESS == 0:
            print(f"\r{count:,} rows", end="", file=sys.stderr, flush=True)
    if shown and count >= PROGRESS:
        print(f"\r{count:,} rows", file=sys.stderr)


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """The rows of a file, one at a time. Raises OrchError (64, 65) with what makes it unreadable."""
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.predict.table import TableError, read_rows

    try:
        with path.open("rb") as file:
            yield from read_rows(file)
    except TableError as error:
        raise OrchError(f"--table {path}: {error}", Exit.CONFIG) from None
    except OSError as error:
        raise OrchError(f"--table {path}: {error.strerror}", Exit.USAGE) from None


def page(found: Score, as_json: bool) -> str:
    if as_json:
        import json

        return json.dumps(
            {
                **{name: [row._asdict() for row in getattr(found, name)] for name in ("time", "memory", "order")},
                "fits": [
                    {"measured": measured, "predicted": predicted, "rows": rows}
                    for (measured, predicted), rows in sorted(found.fits.items())
                ],
            }
        )
    lines: list[str] = []
    for title, rows in (("step time", found.time), ("peak memory", found.memory)):
        if rows:
            lines += [f"{title:<26}{'rows':>6}{'mean':>9}{'p90':>9}{'bias':>9}"]
            lines += [f"  {r.group:<24}{r.rows:>6}{r.mean:>9.1%}{r.p90:>9.1%}{r.bias:>+9.1%}" for r in rows] + [""]
    if found.order:
        lines += [f"{'order of layouts':<26}{'rows':>6}{'sweeps':>9}{'Spearman':>9}{'regret':>9}{'worst':>9}"]
        lines += [
            f"  {r.group:<24}{r.rows:>6}{r.sweeps:>9}{r.spearman:>9.2f}{r.regret:>9.1%}{r.worst:>9.1%}"
            for r in found.order
        ] + [""]
    if found.fits:
        lines += [f"{'measured / predicted':<26}{'fits':>6}{'oom':>9}"]
        for kind in ("ok", "oom"):
            counts = [found.fits.get((kind, other), 0) for other in ("ok", "oom")]
            lines.append(f"  {'fits' if kind == 'ok' else 'oom':<24}{counts[0]:>6}{counts[1]:>9}")
    return "\n".join(lines) or "The table has no measured columns: step_time_s, peak_mem_gib, status."
