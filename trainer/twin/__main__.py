"""`python -m trainer.twin PLAN --ranks 0,8` runs these ranks one by one and prints one line of JSON
per rank."""

from __future__ import annotations

import argparse
import sys

import msgspec

from orchestrator.plan import Exit, PlanError, load_plan
from trainer.errors import TrainerError, exit_code


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m trainer.twin", description="Ranks of a plan, run without data."
    )
    parser.add_argument("plan", help="path of plan.json")
    parser.add_argument("--ranks", required=True, help="global ranks, separated by commas")
    args = parser.parse_args(argv)
    try:
        plan = load_plan(args.plan)

        # After the plan: an invalid one is refused before seconds of imports.
        from .run import run_rank

        for rank in map(int, args.ranks.split(",")):
            print(msgspec.json.encode(run_rank(plan, rank)).decode(), flush=True)
    except (TrainerError, PlanError) as error:
        print(f"trainer.twin: {error}", file=sys.stderr)
        return exit_code(error)
    return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
