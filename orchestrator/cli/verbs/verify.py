"""`orch verify`: compares a layout's training arithmetic with that of one process, by running
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
TOGETHER = 4
#: The answer to options that are no longer there.
MOVED = (
    "--against and --precision are no longer options of orch verify, which compares with one"
    " process; the independent oracle is a program of the repository (docs/verify.md):"
    " python -m tests.independent parallel=LAYOUT,LAYOUT [--precision P,P]"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--matrix", choices=("quick", "full"), help="the techniques' matrix instead of one layout"
    )
    parser.add_argument(
        "--data",
        metavar="RUN",
        help="read the data of a run's steps once more, and compare with what it trained on",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write the matrix as a page (docs/parity.md)"
    )
    for moved in ("--against", "--precision"):
        parser.add_argument(moved, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    if args.against or args.precision:
        raise OrchError(MOVED)
    if args.data is not None:
        if overrides or args.matrix or args.out:
            raise OrchError(
                "--data RUN takes neither layouts nor other options: the run says what there is"
            )
        return _data(args)
    if args.out and not args.matrix:
        raise OrchError("--out is for --matrix: the page of a whole matrix")
    if args.matrix and overrides:
        raise OrchError(
            f"--matrix brings its own layouts and models: {overrides[0]!r} cannot be combined"
            " with it"
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
    found = replay(folder.plan, steps)
    if args.json:
        print_json({"run_id": folder.run_id, **found._asdict()})
    else:
        print(
            "\n".join(
                [
                    *found.problems,
                    f"{found.equal} of {found.steps} steps trained on what is there now",
                ]
            )
        )
    return Exit.CONFIG if found.problems else Exit.DONE


def _layouts(args: argparse.Namespace, overrides: list[str]) -> list[Verdict]:
    from orchestrator.verify.cells import of_words

    return _show(list(of_words(overrides, args.config_dir)), args.json)


def _matrix(args: argparse.Namespace) -> list[Verdict]:
    """Refused cells are part of a matrix, not a failure of it."""
    from orchestrator.verify import matrix
    from orchestrator.verify.cells import of_entries

    entries = getattr(matrix, args.matrix)()
    verdicts = _show(list(of_entries(entries, args.config_dir)), args.json, TOGETHER)
    if args.out:
        from orchestrator.cli.terminal import write_file
        from orchestrator.verify.page import document

        page = document(entries, {verdict.name: verdict for verdict in verdicts}, _versions())
        write_file(args.out, page.encode(), "--out")
    return [verdict for verdict in verdicts if not verdict.refused]


def _show(cells: Sequence[Cell | Verdict], as_json: bool, together: int = 1) -> list[Verdict]:
    """Judge, printing each verdict as it becomes known."""
    from orchestrator.verify.page import summary

    found = []
    if as_json:
        import msgspec

        from orchestrator.cli.terminal import print_json

        for verdict in _judged(cells, together):
            found.append(verdict)
            more = {"verdict": verdict.word, **msgspec.to_builtins(verdict)}
            print_json(more)
        return found
    from orchestrator.cli.terminal import style
    from orchestrator.verify.page import lines

    look = style()
    for verdict in _judged(cells, together):
        found.append(verdict)
        print("\n".join(lines(verdict, look)), flush=True)
    print(f"\n{summary(found)}", file=sys.stdout)
    return found


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
