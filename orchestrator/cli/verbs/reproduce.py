"""`orch reproduce`: writes a page that compares the published headline results of papers with the
planner's predictions."""

from __future__ import annotations

import argparse
from pathlib import Path

PAGE = Path("docs/reproduce.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    out_help = f"write the page here (default: {PAGE} if its folder exists, else print it)"
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help=out_help,
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.accuracy.reproduce.page import as_json, markdown, reproduce
    from orchestrator.cli.terminal import print_json, write_file
    from orchestrator.config.compose import load
    from orchestrator.config.groups import OPTIONAL, Library, shipped
    from orchestrator.plan.exits import Exit

    experiments = Library([shipped()]).files(OPTIONAL)
    sections = reproduce(lambda row_overrides: load(row_overrides, shipped()), experiments)
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
        f"{out}: {len(rows)} figures in {len(sections)} sections, {len(far)} of them further from"
        " the published one than allowed"
    )
    for line in far:
        print(f"  {line}")
    return Exit.DONE
