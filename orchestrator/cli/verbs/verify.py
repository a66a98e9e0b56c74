"""`orch verify`: compares the training arithmetic of a layout with that of one process, by running
both."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

if TYPE_CHECKING:
    from orchestrator.plan.parity import Cell, Verdict

#: Cells of the matrix that share one launch of ranks.
CELLS_PER_LAUNCH = 4
#: The answer to options that are no longer there.
MOVED = (
    "--against and --precision are no longer options of orch verify, which compares with one"
    " process; the independent oracle is a program of the repository (docs/verify.md):"
    " python -m tests.independent parallel=LAYOUT,LAYOUT [--precision P,P]"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix",
        choices=("quick", "full"),
        help="verify the matrix of techniques, not one layout",
    )
    parser.add_argument(
        "--data",
        metavar="RUN",
        help="read the data of a run again, and compare it with the data of its steps",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="write the matrix as a page (docs/parity.md)",
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="with --out: run only cells that FILE does not have as equal, and add them to it",
    )
    for moved in ("--against", "--precision"):
        parser.add_argument(moved, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.against or args.precision:
        raise OrchError(MOVED)
    if args.data is not None:
        if overrides or args.matrix or args.out:
            raise OrchError(
                "--data RUN takes neither layouts nor other options: the run has its own layout"
            )
        return _data(args)
    if args.out and not args.matrix:
        raise OrchError("--out needs --matrix: it writes the page of a whole matrix")
    if args.missing and not (args.out and args.out.is_file()):
        raise OrchError("--missing needs --out FILE: the page whose missing cells are run")
    if args.matrix and overrides:
        raise OrchError(
            f"{overrides[0]!r}: --matrix takes no overrides, it has its own layouts and models"
        )
    verdicts = _matrix(args) if args.matrix else _layouts(args, overrides)
    return Exit.DONE if all(verdict.equal for verdict in verdicts) else Exit.CONFIG


def _data(args: argparse.Namespace) -> int:
    from orchestrator.cli.session import find_run, plan_of_run
    from orchestrator.cli.terminal import print_json
    from orchestrator.observe.data_replay import replay
    from orchestrator.observe.timeline import lead_steps, nodes_of, read_steps
    from orchestrator.run.state import read_state

    folder = find_run(args.data)
    plan = plan_of_run(folder)
    steps = lead_steps(read_steps(folder, nodes_of(plan, read_state(folder))))
    comparison = replay(folder.plan, steps)
    if args.json:
        print_json({"run_id": folder.run_id, **comparison._asdict()})
    else:
        print(
            "\n".join(
                [
                    *comparison.problems,
                    f"{comparison.equal} of {comparison.steps} steps trained on what is there now",
                ]
            )
        )
    return Exit.CONFIG if comparison.problems else Exit.DONE


def _layouts(args: argparse.Namespace, overrides: list[str]) -> list[Verdict]:
    from orchestrator.verify.cells import cells_of_overrides

    return _show(list(cells_of_overrides(overrides, args.config_dir)), args.json)


def _matrix(args: argparse.Namespace) -> list[Verdict]:
    """Returns the verdicts of a matrix without the refused cells, which are not failures."""
    from orchestrator.verify import matrix
    from orchestrator.verify.cells import cells_of_entries

    entries = matrix.quick() if args.matrix == "quick" else matrix.full()
    measured: dict[str, Verdict] = {}
    if args.missing:
        from orchestrator.verify.page import read_equal

        measured = read_equal(args.out.read_text(), entries, _versions())
    missing = [entry for entry in entries if entry.name not in measured]
    cells = list(cells_of_entries(missing, args.config_dir))
    verdicts = _show(cells, args.json, CELLS_PER_LAUNCH)
    if args.out:
        from orchestrator.cli.terminal import write_file
        from orchestrator.verify.page import document

        page = document(
            entries,
            measured | {verdict.name: verdict for verdict in verdicts},
            _versions(),
        )
        write_file(args.out, page.encode(), "--out")
    return [verdict for verdict in verdicts if not verdict.refused]


def _show(
    cells: Sequence[Cell | Verdict],
    as_json: bool,
    together: int = 1,
) -> list[Verdict]:
    """Judges the cells, and prints each verdict as soon as it is known."""
    from orchestrator.verify.page import summary

    verdicts = []
    if as_json:
        import msgspec

        from orchestrator.cli.terminal import print_json

        for verdict in _judged(cells, together):
            verdicts.append(verdict)
            document = {"verdict": verdict.word, **msgspec.to_builtins(verdict)}
            print_json(document)
        return verdicts
    from orchestrator.cli.terminal import style
    from orchestrator.verify.page import lines

    look = style()
    for verdict in _judged(cells, together):
        verdicts.append(verdict)
        print("\n".join(lines(verdict, look)), flush=True)
    print(f"\n{summary(verdicts)}", file=sys.stdout)
    return verdicts


def _judged(cells: Sequence[Cell | Verdict], together: int) -> Iterator[Verdict]:
    from orchestrator.plan.parity import Verdict
    from orchestrator.verify.run_cells import run_cells

    yield from (cell for cell in cells if isinstance(cell, Verdict))
    yield from run_cells([cell for cell in cells if not isinstance(cell, Verdict)], together)


def _versions() -> str:
    import platform
    from importlib.metadata import version

    from orchestrator import __version__

    return f"orch {__version__}, torch {version('torch')}, Python {platform.python_version()}"
