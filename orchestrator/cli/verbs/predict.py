"""`orch predict`: predicts step time, throughput and memory for every row of a table, and scores
the predictions against measurements."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.accuracy.calibrate.table import Ablation
    from orchestrator.accuracy.predict.predict import Prediction
    from orchestrator.accuracy.predict.score import Score
    from orchestrator.cost.profile import Profile

#: Rows between two updates of the progress line on a terminal.
PROGRESS = 1000
#: Most rows whose columns are all kept in memory. Longer tables are scored without fits of the
#: cost model.
MOST_KEPT = 20_000
#: Impossible measured cells that are named one by one.
MOST_REFUSED = 5
#: Marks of the page section that `--into` replaces.
BEGIN = "<!-- orch predict --score: begin -->"
END = "<!-- orch predict --score: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        metavar="FILE.csv",
        type=Path,
        required=True,
        help="the runs, with columns as in docs/accuracy.md",
    )
    parser.add_argument(
        "--out",
        metavar="FILE.csv",
        type=Path,
        help="write the predictions here",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        type=Path,
        help="a profile of orch calibrate (default: the shipped one)",
    )
    parser.add_argument(
        "--after",
        metavar="ROW_ID",
        help="predict after an update of the profile with this measured row",
    )
    parser.add_argument(
        "--score",
        action="store_true",
        help="show errors by group, from the measured columns",
    )
    parser.add_argument(
        "--terms",
        action="store_true",
        help="score the cost model also without each of its terms (takes minutes)",
    )
    parser.add_argument(
        "--into",
        metavar="FILE.md",
        type=Path,
        help="write the score between the marks of this page",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Reads, predicts and writes one row at a time; a score keeps only the columns that it
    compares."""
    from orchestrator.accuracy.predict.predict import COLUMNS, predict
    from orchestrator.accuracy.predict.score import COMPARED
    from orchestrator.cli.terminal import write_file
    from orchestrator.cost.profile import read_profile, shipped
    from orchestrator.plan.exits import Exit

    measured: list[dict[str, str]] = []
    predictions: list[Prediction] = []
    profile = read_profile(args.profile) if args.profile else shipped()
    if args.after is not None:
        profile = _after(args.table, args.after, profile)
    scored = args.score or args.terms or args.into is not None

    def kept() -> Iterator[dict[str, str]]:
        for row in read_table(args.table):
            if scored:
                keeps_row = len(measured) < MOST_KEPT
                measured.append(
                    row if keeps_row else {name: row[name] for name in COMPARED if name in row}
                )
            yield row

    def lines() -> Iterator[str]:
        predicted = progress(predict(kept(), profile))
        # Reading the first row refuses a file that is not a table before anything is written.
        first = next(predicted, None)
        yield csv_line(COLUMNS)
        for prediction in chain([first] if first else [], predicted):
            if scored:
                predictions.append(prediction)
            yield csv_line(prediction.cells())

    if args.out:
        write_file(
            args.out,
            (line.encode(errors="replace") for line in lines()),
            "--out",
        )
    else:
        for line in lines():
            if not scored:
                print(line, end="")
    if scored:
        _score(args, measured, predictions, profile)
    return Exit.DONE


def _score(
    args: argparse.Namespace,
    rows: list[dict[str, str]],
    predictions: list[Prediction],
    profile: Profile,
) -> None:
    """Scores the predictions, and prints the score or writes it into a page."""
    from orchestrator.accuracy.predict.rows import row_id
    from orchestrator.accuracy.predict.score import score
    from orchestrator.observe.pages.accuracy_page import as_json, page

    _warn_refused(args.table, rows)
    terms: list[Ablation] = []
    if args.after is not None:
        scored_rows = [index for index, row in enumerate(rows) if row_id(row) != args.after]
        rows = [rows[index] for index in scored_rows]
        predictions = [predictions[index] for index in scored_rows]
    if len(rows) > MOST_KEPT or args.after is not None:
        table_score = score(rows, predictions)
    else:
        table_score, terms = _fitted_score(args, rows, predictions, profile)
    if args.into:
        section = page(table_score, terms)
        write_into(args.into, f"Profile {profile.label}.\n\n```\n{section}\n```")
    if args.json:
        from orchestrator.cli.terminal import print_json

        print_json({"profile": profile.label, **as_json(table_score, terms)})
    elif not args.into:
        print(page(table_score, terms))


def _warn_refused(path: Path, rows: list[dict[str, str]]) -> None:
    """Warns of measured cells that are impossible, which the score leaves out."""
    from orchestrator.accuracy.predict.score import unread

    refused = unread(rows)
    for line in refused[:MOST_REFUSED]:
        print(f"orch: warning: --table {path}: {line}; left out of the score", file=sys.stderr)
    if len(refused) > MOST_REFUSED:
        print(f"orch: warning: and {len(refused) - MOST_REFUSED:,} more", file=sys.stderr)


def _fitted_score(
    args: argparse.Namespace,
    rows: list[dict[str, str]],
    predictions: list[Prediction],
    profile: Profile,
) -> tuple[Score, list[Ablation]]:
    """Scores the predictions together with fits of the cost model to parts of the table; with
    --terms also without each term of the model."""
    from orchestrator.accuracy.calibrate.accuracy import accuracy
    from orchestrator.cli.terminal import show_progress

    seen = profile.fitted_on.what == "table" and profile.fitted_on.sha256 == digest(args.table)
    table_score = accuracy(rows, predictions, profile, seen, show_progress)
    if not args.terms:
        return table_score, []
    from orchestrator.accuracy.calibrate.observations import observations
    from orchestrator.accuracy.calibrate.table import ablate

    return table_score, ablate(observations(rows), show_progress)


def write_into(path: Path, section: str) -> None:
    """Replaces the section between the marks of a page. Raises OrchError (64) if the page cannot be
    read or has no marks."""
    from orchestrator.cli.terminal import write_file
    from orchestrator.errors import OrchError

    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OrchError(f"--into {path}: {error}") from None
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise OrchError(f"--into {path}: the file needs the lines {BEGIN} and {END}")
    write_file(path, f"{before}{BEGIN}\n{section}\n{END}{after}".encode(), "--into")


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, as recorded in profiles."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _after(path: Path, name: str, profile: Profile) -> Profile:
    from orchestrator.accuracy.calibrate.observations import after_row
    from orchestrator.accuracy.predict.cells import RowError
    from orchestrator.accuracy.predict.rows import row_id
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit

    for row in read_table(path):
        if row_id(row) == name:
            try:
                return after_row(profile, row)
            except RowError as error:
                raise OrchError(f"--after {name}: {error}", Exit.CONFIG) from None
    raise OrchError(f"--after {name}: --table {path} has no row with this id", Exit.USAGE)


def csv_line(cells: Sequence[str]) -> str:
    import csv
    import io

    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def progress(predictions: Iterable[Prediction]) -> Iterator[Prediction]:
    """Yields the predictions, and counts those of a long table on stderr if it is a terminal."""
    shown = sys.stderr.isatty()
    count = 0
    for count, prediction in enumerate(predictions, 1):
        yield prediction
        if shown and count % PROGRESS == 0:
            print(
                f"\r{count:,} rows",
                end="",
                file=sys.stderr,
                flush=True,
            )
    if shown and count >= PROGRESS:
        print(f"\r{count:,} rows", file=sys.stderr)


def read_table(path: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of a table one at a time. Raises OrchError (64, 65) with the reason if it is
    unreadable."""
    from orchestrator.accuracy.predict.table import TableError, read_rows
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit

    try:
        with path.open("rb") as file:
            yield from read_rows(file)
    except TableError as error:
        raise OrchError(f"--table {path}: {error}", Exit.CONFIG) from None
    except OSError as error:
        raise OrchError(f"--table {path}: {error.strerror}", Exit.USAGE) from None
