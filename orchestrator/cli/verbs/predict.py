"""`orch predict`: step time, throughput and memory for every row of a table, and how far off they are."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.planner.predict.score import Score

MOST_BYTES = 256 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", metavar="FILE.csv", type=Path, required=True, help="columns as in docs/accuracy.md")
    parser.add_argument("--out", metavar="FILE.csv", type=Path, help="write predictions here")
    parser.add_argument("--score", action="store_true", help="errors by group where the table has measured columns")


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    import csv
    import io

    from orchestrator.cli.terminal import write_file
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.predict.predict import COLUMNS, predict

    rows = read_table(args.table)
    predictions = list(predict(rows))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(one.cells() for one in predictions)
    if args.out:
        write_file(args.out, text.getvalue().encode(), "--out")
    elif not args.score:
        print(text.getvalue(), end="")
    if args.score:
        from orchestrator.planner.predict.score import score

        print(page(score(rows, predictions), args.json))
    return Exit.DONE


def read_table(path: Path) -> list[dict[str, str]]:
    """Raises OrchError (65) with the place where the file is not a table that can be predicted."""
    import csv

    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.predict.rows import NEEDED

    try:
        if path.stat().st_size > MOST_BYTES:
            raise OrchError(f"--table {path}: larger than {MOST_BYTES >> 20} MiB", Exit.CONFIG)
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restkey="", restval="")
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise OrchError(f"--table {path}: there is no column {missing[0]!r} in its first line", Exit.CONFIG)
            return list(reader)
    except OSError as error:
        raise OrchError(f"--table {path}: {error.strerror}", Exit.USAGE) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise OrchError(f"--table {path}: not a CSV file: {error}", Exit.CONFIG) from None


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
