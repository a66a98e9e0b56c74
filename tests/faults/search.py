"""`python -m tests.faults.search`: plays many fault schedules against real local runs, and shrinks
what fails.

What was mended stays in `REGRESSIONS` of test_search.py; docs/reliability.md says what was played.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .play import failure
from .schedule import Schedule, make, shrunk


def played(schedule: Schedule) -> str:
    """What it breaks, in a folder of its own."""
    home = Path(tempfile.mkdtemp(prefix="orch-faults-"))
    try:
        (home / "runs").mkdir(mode=0o700)
        return failure(home / "runs", schedule)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.search", description=__doc__)
    parser.add_argument("--first", type=int, default=1, help="seed of the first schedule")
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument(
        "--shrink", action="store_true", help="find the least schedule of each failure"
    )
    parser.add_argument("--out", type=Path, help="the result, as JSON")
    args = parser.parse_args()
    schedules = [make(seed) for seed in range(args.first, args.first + args.schedules)]
    failures: dict[int, str] = {}
    began = time.monotonic()
    with concurrent.futures.ProcessPoolExecutor(args.jobs) as pool:
        for schedule, broke in zip(schedules, pool.map(played, schedules), strict=True):
            if broke:
                failures[schedule.seed] = broke
                print(f"{schedule}\n  {broke}\n", flush=True)
    for seed in failures if args.shrink else ():
        print(
            f"least of {seed}: {shrunk(make(seed), lambda candidate: bool(played(candidate)))}",
            flush=True,
        )
    deeds = Counter(
        f"{a.deed} {a.victim.rstrip('012')}".strip() for drawn in schedules for a in drawn.actions
    )
    result = {"schedules": len(schedules), "failures": failures, "deeds": dict(deeds.most_common())}
    result["minutes"] = round((time.monotonic() - began) / 60, 1)
    print(json.dumps({**result, "failures": sorted(failures)}))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
