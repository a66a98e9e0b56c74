"""`python -m tests.independent parallel=LAYOUT,LAYOUT [--precision P,P] [--json]` trains small jobs
and has the independent oracle judge them (docs/verify.md).

Exit code 0: every case is equal. 65: a case is different, refused or failed. 64: the command is
wrong, or `transformers` is not installed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from orchestrator.cli.terminal import print_json, style
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from orchestrator.style import GRAY, GREEN, RED, YELLOW, Style

from . import cases, runner
from .runner import Verdict

COLOUR = {"equal": GREEN, "DIFFERENT": RED, "failed": RED, "refused": YELLOW}
#: Problems of one case that are printed; the rest are counted.
MOST_PROBLEMS = 5


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise OrchError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; an error is one line on stderr."""
    parser = _Parser(prog="python -m tests.independent", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help=f"parallel=LAYOUT,LAYOUT, and words of {', '.join(cases.OPEN[1:])}",
    )
    parser.add_argument(
        "--precision", metavar="P,P", help=f"of {', '.join(cases.PRECISIONS)}; default: all"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per case")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder of your own group files")
    try:
        options = parser.parse_intermixed_args(arguments)
        return judge_layouts(options)
    except OrchError as error:
        print(f"tests.independent: error: {error.message}", file=sys.stderr)
        return int(error.exit)


def judge_layouts(options: argparse.Namespace) -> int:
    """Prints the verdict of each case as soon as it is known."""
    runner.check_installed()
    precisions = _precisions(options.precision)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="orch-independent-") as folder:
        home = Path(folder)
        planned = list(cases.cases(options.overrides, precisions, options.config_dir, home))
        for verdict in runner.judged(planned, home):
            verdicts.append(verdict)
            if options.json:
                print_json({"verdict": verdict.word, **msgspec.to_builtins(verdict)})
            else:
                print("\n".join(lines(verdict, style())), flush=True)
    return Exit.DONE if all(verdict.equal for verdict in verdicts) else Exit.CONFIG


def _precisions(option: str | None) -> Sequence[cases.Precision]:
    if option is None:
        return cases.PRECISIONS
    precisions = []
    for precision in option.split(","):
        if precision not in cases.PRECISIONS:
            raise OrchError(f"--precision {precision}; legal: {', '.join(cases.PRECISIONS)}")
        precisions.append(precision)
    return precisions


def lines(verdict: Verdict, look: Style) -> list[str]:
    """The verdict of one case: the worst error of each quantity against its bound, and problems."""
    painted_word = look.paint(f"{verdict.word:<9}", COLOUR[verdict.word], bold=True)
    steps = f"{verdict.steps} steps" + (f", {verdict.skipped} skipped" if verdict.skipped else "")
    heading = f"{painted_word} {look.paint(verdict.name, bold=True)}  {verdict.precision}, {steps}"
    if verdict.refused or verdict.failed:
        return [heading, f"          {verdict.refused or verdict.failed}"]
    rows = [heading]
    for quantity, worst in verdict.worst.items():
        within = worst.error <= worst.bound
        sign = "<=" if within else "> "
        row = f"  {quantity:<14} {worst.error:7.1e} {sign} {worst.bound:7.1e}  {worst.where}"
        rows.append(look.paint(row, GRAY if within else RED))
    rows += [f"  {look.paint(problem, RED)}" for problem in verdict.problems[:MOST_PROBLEMS]]
    unlisted = len(verdict.problems) - MOST_PROBLEMS
    if unlisted > 0:
        rows.append(f"  {look.paint(f'and {unlisted} more', RED)}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
