"""`orch resume <run>`: starts an ended run again, in its folder, from its last checkpoint and as
its next epoch."""

from __future__ import annotations

import argparse
import sys

from orchestrator.cli.streams import announce
from orchestrator.plan.exits import Exit
from orchestrator.plan.worker import PINS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="handle, id, or the beginning of one")
    parser.add_argument(
        "--allow",
        action="append",
        choices=tuple(PINS),
        default=[],
        help=(
            "changed-data: continue with other data than before; fresh-start: start at step 0 if"
            " all checkpoints are gone"
        ),
    )
    parser.add_argument(
        "--follow",
        "-f",
        action="store_true",
        help="watch the run, and exit with its exit code",
    )


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    from orchestrator.api import Run
    from orchestrator.run.held_signals import HeldSignals

    job = Run.find(args.run)
    with HeldSignals() as signals:
        handle = job.resume(args.allow)
        for line in job.rate_breaks():
            print(f"orch: {line}", file=sys.stderr)
        if args.follow:
            from orchestrator.cli.terminal import follow_run

            return follow_run(
                handle,
                job.folder,
                job.backend,
                as_json=args.json,
                signals=signals,
            )
        if args.json:
            import json

            handle = json.dumps(
                {
                    "handle": handle,
                    "run_id": job.id,
                    "run_dir": str(job.folder.path),
                }
            )
        announce(handle, sys.stdout)
    return Exit.DONE
