"""`orch reproduce`: the headline results of the papers, published figures beside the planner's, as
a page."""

from __future__ import annotations

import argparse
from pathlib import Path

PAGE = Path("docs/reproduce.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = f"write the page here ({PAGE}, where there is such a folder; else it is printed)"
    parser.add_argument("--out", metavar="FILE", type=Path, help=about)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.cli.terminal import print_json, write_file
    from orchestrator.config.compose import load
    from orchestrator.config.groups import OPTIONAL, Library, shipped
    from orchestrator.plan.exits import Exit
    from orchestrator.planner.reproduce.page import as_json, markdown, reproduce

    sections = reproduce(
        lambda overrides_of_row: load(overrides_of_row, shipped()),
        Library([shipped()]).files(OPTIONAL),
    )
    out = args.out or (PAGE if PAGE.parent.is_dir() and not args.json else None)
    if out:
        write_file(out, markdown(sections).encode(), "--out")
    if args.json:
        print_json({"sections": as_json(sections)})
        return Exit.DONE
    if out is None:
        print(markdown(sections), end="")
        return Exit.DONE
    rows = [row for section in sections for row in section.rows]
    far = [f"{row.what} {row.column}".strip() for row in rows if not row.holds]
    print(
        f"{out}: {len(rows)} figures in {len(sections)} sections, {len(far)} further from the"
        " published than allowed"
    )
    for line in far:
        print(f"  {line}")
    return Exit.DONE
