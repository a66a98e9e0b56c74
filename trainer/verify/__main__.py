"""`python -m trainer.verify CELLS` reads a file of cells, one JSON object per line, and prints
verdicts in that form.

One process imports torch once and forks the ranks of every cell. `orch verify` starts it. The exit
code is 0 if every cell has a verdict, whatever the verdicts are.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from orchestrator.plan import Exit
from orchestrator.plan.parity import ALWAYS, Cell


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m trainer.verify", description="Layouts against one process."
    )
    parser.add_argument("cells", help="a file of cells, one JSON object per line")
    parser.add_argument("--precisions", default=",".join(ALWAYS), help=f"of {', '.join(ALWAYS)}")
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        help="cells of one size that share a launch of ranks",
    )
    args = parser.parse_args(argv)
    try:
        with open(args.cells, "rb") as file:
            cells = [msgspec.json.decode(line, type=Cell) for line in file]
    except (OSError, msgspec.MsgspecError) as error:
        print(f"trainer.verify: {args.cells}: {error}", file=sys.stderr)
        return Exit.CONFIG

    from .judge import judge  # after the cells: a bad file is refused before a second of imports

    for verdict in judge(cells, args.precisions.split(","), args.together):
        print(msgspec.json.encode(verdict).decode(), flush=True)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
