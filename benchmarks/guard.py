"""The numbers that users feel, measured now and held against the committed ones, so that a slower
one is noticed.

    .venv/bin/python -m benchmarks.guard [--only NAME ...] [--write] [--json]

A number is how many canaries it costs: fixed work of the same kind that takes turns with it
(`benchmarks.guarded`), so that another machine, or a busy one, changes it little. One that costs
over 20 % more than the committed one, beyond the spread of both, is named as worse. Nothing fails:
a change that makes a number worse says so in its commit and renews the committed ones with
`--write` (benchmarks/results/guard.json), as does a change of a number's work or canary.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.guarded import NUMBERS, ROOT, Turn

RESULT = ROOT / "benchmarks" / "results" / "guard.json"
TOLERANCE = 0.2


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Canaries that a number costs: the median of the rounds and its quartiles; with the
    conditions."""

    ratio: float
    low: float
    high: float
    seconds: float
    canary_seconds: float
    rounds: int
    commit: str
    date: str
    hardware: str
    load_average: float


def row_of(turns: list[Turn], conditions: dict[str, object]) -> Row:
    ratios = [turn.ratio for turn in turns]
    low, middle, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    seconds = statistics.median(turn.work for turn in turns)
    canary = statistics.median(turn.canary for turn in turns)
    numbers = {
        "ratio": middle,
        "low": low,
        "high": high,
        "seconds": seconds,
        "canary_seconds": canary,
    }
    return Row(
        **{name: float(f"{value:.4g}") for name, value in numbers.items()},
        rounds=len(turns),
        **conditions,
    )


@dataclass(frozen=True)
class Comparison:
    """Of a number as it is with the committed one. Either may be missing."""

    name: str
    now: Row | None
    was: Row | None

    @property
    def change(self) -> float:
        """By how much more it costs: 0.25 is a quarter more."""
        return self.now.ratio / self.was.ratio - 1 if self.now and self.was else 0.0

    @property
    def verdict(self) -> str:
        if self.was is None:
            return "not committed"
        if self.now is None:
            return "unknown"
        if self.change > TOLERANCE:
            return "worse" if self.now.low > self.was.high else "unsure"
        if 1 / (1 + self.change) > 1 + TOLERANCE:
            return "better" if self.now.high < self.was.low else "unsure"
        return "as before"

    @property
    def line(self) -> str:
        was = f"{_cost(self.was)} at {self.was.commit} of {self.was.date}" if self.was else ""
        now = f"{_cost(self.now)}, {self.now.seconds:.2g} s" if self.now else ""
        title = f"{self.verdict:<13} {self.name}: "
        if self.was is None:
            return f"{title}{now}; {RESULT.name} has no such number (--write adds it)"
        if self.now is None:
            return (
                f"{title}{RESULT.name} has it ({was}), the guard has no such number (--write"
                " removes it)"
            )
        spread = "" if self.verdict != "unsure" else "; the rounds differ as much: measure it again"
        return f"{title}{self.change:+.0%}: was {was}, is {now}{spread}"


def _cost(row: Row) -> str:
    return f"{row.ratio:.3g} canaries ({row.low:.3g} to {row.high:.3g})"


def comparisons(now: dict[str, Row], was: dict[str, Row]) -> list[Comparison]:
    """Of what is measured now, and of what is committed and no number any more."""
    gone = [name for name in was if name not in NUMBERS]
    return [Comparison(name, now.get(name), was.get(name)) for name in [*now, *gone]]


def summary(found: list[Comparison]) -> str:
    counts = Counter(one.verdict for one in found)
    return f"guard: {', '.join(f'{number} {verdict}' for verdict, number in counts.items())}"


def committed(path: Path) -> dict[str, Row]:
    """Raises SystemExit with one line where the file is none of ours."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Row])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise SystemExit(f"{path}: {error} (--write makes it anew once it is removed)") from None


def conditions() -> dict[str, object]:
    words = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": commit or "no commit",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} CPUs {models[0] if models else platform.machine()}",
        "load_average": round(os.getloadavg()[0], 1),
    }


def measured(name: str, rounds: int | None) -> Row:
    """Raises SystemExit with one line where the number's work fails."""
    number = NUMBERS[name]
    try:
        return row_of(number.measure(rounds or number.rounds), conditions())
    except (Exception, SystemExit) as error:
        raise SystemExit(f"not measured  {name}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [
        f"  {name:<14} {number.what}; canary: {number.canary}" for name, number in NUMBERS.items()
    ]
    parser.epilog = "\n".join(["numbers:", *names])
    parser.add_argument("--only", nargs="+", choices=NUMBERS, default=list(NUMBERS), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="of each number; default: what its spread needs")
    parser.add_argument(
        "--write", action="store_true", help=f"what is measured now goes to {RESULT.name}"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    was = committed(RESULT)
    now: dict[str, Row] = {}
    failures = []
    for name in args.only:
        try:
            now[name] = measured(name, args.rounds)
        except SystemExit as error:
            failures.append(str(error))
            print(error, file=sys.stderr, flush=True)
            continue
        if not args.json:
            print(Comparison(name, now[name], was.get(name)).line, flush=True)
    found = comparisons(now, was)
    if args.json:
        page = {
            one.name: {"verdict": one.verdict, "change": one.change, "now": one.now, "was": one.was}
            for one in found
        }
        print(
            msgspec.json.format(
                msgspec.json.encode({"numbers": page, "failures": failures}), indent=1
            ).decode()
        )
    else:
        print("\n".join([one.line for one in found if one.now is None] + [summary(found)]))
    if args.write:
        rows = {name: row for name, row in (was | now).items() if name in NUMBERS}
        RESULT.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
