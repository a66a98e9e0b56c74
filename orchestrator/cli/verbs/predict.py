"""`orch predict`: step time, throughput and memory for every row of a table, and how far off they
are."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.planner.calibrate.table import Ablation
    from orchestrator.planner.cost.profile import Profile
    from orchestrator.planner.predict.predict import Prediction
    from orchestrator.planner.predict.score import Score

#: Rows between two lines of progress on a terminal.
PROGRESS = 1000
#: Rows of which a score keeps all columns, to fit and to update; of longer tables it compares
#: predictions alone.
MOST_KEPT = 20_000
#: Measured cells that cannot be, which are named one by one.
MOST_REFUSED = 5
#: What `--into` replaces of a page.
BEGIN = "<!-- orch predict --score: begin -->"
END = "<!-- orch predict --score: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--table",
        metavar="FILE.csv",
        type=Path,
        required=True,
        help="columns as in docs/accuracy.md",
    )
    parser.add_argument("--out", metavar="FILE.csv", type=Path, help="write predictions here")
    parser.add_argument(
        "--profile",
        metavar="FILE",
        type=Path,
        help="orch calibrate's parameters, not the shipped ones",
    )
    parser.add_argument(
        "--after",
        metavar="ROW_ID",
        help="predict as if this row had been measured on these machines",
    )
    parser.add_argument(
        "--score", action="store_true", help="errors by group where the table has measured columns"
    )
    parser.add_argument(
        "--terms",
        action="store_true",
        help="score the model without each of its terms too; minutes",
    )
    parser.add_argument(
        "--into", metavar="FILE.md", type=Path, help="write the score into this page's marks"
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Rows are read, predicted and written one at a time; a score keeps of each what it
    compares."""
    from orchestrator.cli.terminal import write_file
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.cost.profile import read_profile, shipped
    from orchestrator.planner.predict.predict import COLUMNS, predict
    from orchestrator.planner.predict.score import COMPARED

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
        first = next(
            predicted, None
        )  # a file that is no table is refused before anything is written
        yield csv_line(COLUMNS)
        for prediction in chain([first] if first else [], predicted):
            if scored:
                predictions.append(prediction)
            yield csv_line(prediction.cells())

    if args.out:
        write_file(args.out, (line.encode(errors="replace") for line in lines()), "--out")
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
    from orchestrator.cli.terminal import show_progress
    from orchestrator.observe.pages.accuracy_page import as_json, page
    from orchestrator.planner.predict.rows import row_id
    from orchestrator.planner.predict.score import score, unread

    for line in (refused := unread(rows))[:MOST_REFUSED]:
        print(
            f"orch: warning: --table {args.table}: {line}; left out of the score", file=sys.stderr
        )
    if len(refused) > MOST_REFUSED:
        print(f"orch: warning: and {len(refused) - MOST_REFUSED:,} more", file=sys.stderr)
    accuracy_score: Score
    terms: list[Ablation] = []
    if args.after is not None:
        scored_rows = [index for index, row in enumerate(rows) if row_id(row) != args.after]
        rows = [rows[index] for index in scored_rows]
        predictions = [predictions[index] for index in scored_rows]
    if len(rows) > MOST_KEPT or args.after is not None:
        accuracy_score = score(rows, predictions)
    else:
        from orchestrator.planner.calibrate.accuracy import accuracy

        seen = profile.fitted_on.what == "table" and profile.fitted_on.sha256 == digest(args.table)
        accuracy_score = accuracy(rows, predictions, profile, seen, show_progress)
        if args.terms:
            from orchestrator.planner.calibrate.observations import observations
            from orchestrator.planner.calibrate.table import ablate

            terms = ablate(observations(rows), show_progress)
    if args.into:
        write_into(
            args.into, f"Profile {profile.label}.\n\n```\n{page(accuracy_score, terms)}\n```"
        )
    if args.json:
        from orchestrator.cli.terminal import print_json

        print_json({"profile": profile.label, **as_json(accuracy_score, terms)})
    elif not args.into:
        print(page(accuracy_score, terms))


def write_into(path: Path, section: str) -> None:
    """Replace what stands between the marks of a page. OrchError (64) where it cannot be read or
    has none."""
    from orchestrator.cli.terminal import write_file
    from orchestrator.errors import OrchError

    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OrchError(f"--into {path}: {error}") from None
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise OrchError(f"--into {path}: it has no lines {BEGIN} and {END}")
    write_file(path, f"{before}{BEGIN}\n{section}\n{END}{after}".encode(), "--into")


def digest(path: Path) -> str:
    """SHA-256 of a file, as the provenance of a profile has it."""
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _after(path: Path, name: str, profile: Profile) -> Profile:
    from orchestrator.errors import OrchError
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.calibrate.observations import after_row
    from orchestrator.planner.predict.cells import RowError
    from orchestrator.planner.predict.rows import row_id

    for row in read_table(path):
        if row_id(row) == name:
            try:
                return after_row(profile, row)
            except RowError as error:
                raise OrchError(f"--after {name}: {error}", Exit.CONFIG) from None
    raise OrchError(f"--after {name}: --table {path} has no row of this id", Exit.USAGE)


def csv_line(cells: Sequence[str]) -> str:
    import csv
    import io

    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


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
    """The rows of a file, one at a time. Raises OrchError (64, 65) with what makes it
    unreadable."""
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
