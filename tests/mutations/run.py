"""`python -m tests.mutations.run`: how many small changes of the source do the tests notice?

A recording says which tests run which lines (`reach.py`); each mutant is judged by those that run
its line (`judge.py`), and what was found is kept, so that a run that was ended goes on where it
was. The page is written from what is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from .judge import BY_TEST, LIVES, UNCOUNTED, UNSEEN, Judge, Result
from .lived import REASONS
from .reach import ROOT, Reach, collected, record
from .sites import Site, sites

BUILD = ROOT / "build" / "mutations"
UNPROVEN = "its test fails without it"


class Subject(NamedTuple):
    """Code to be changed, and the tests that may notice: folders below the root."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


SUBJECTS = {
    "trainer": Subject(
        ("trainer",),
        tuple(f"tests/{room}" for room in ("trainer", "bench", "house", "independent", "verify")),
    ),
    "orchestrator": Subject(
        ("orchestrator/agent", "orchestrator/plan", "orchestrator/backends"),
        tuple(
            f"tests/{room}"
            for room in ("agent", "backends", "cli", "config", "golden", "planner", "run", "verify")
        ),
    ),
}


def every_site(subject: Subject) -> list[Site]:
    files = [file for source in subject.sources for file in sorted((ROOT / source).rglob("*.py"))]
    return [site for file in files for site in sites(str(file.relative_to(ROOT)), file.read_text())]


def sample(subject: Subject, count: int, seed: int, only: str = "*") -> list[Site]:
    """`count` sites of the files that `only` matches, the same for the same seed; all of them for
    0."""
    matching = [site for site in every_site(subject) if fnmatch(site.path, only)]
    return random.Random(seed).sample(matching, min(count, len(matching))) if count else matching


# --------------------------------------------------------------------------------------------- what
#     is kept


class Kept:
    """Results in a file, a line each: of a source file that has changed since, none."""

    def __init__(self, path: Path, digests: dict[str, str]):
        self._path = path
        self._digests = digests

    def add(self, result: Result) -> None:
        """One write, so that lines of several processes do not mix."""
        site = result.site
        row = {"path": site.path, "number": site.number, "digest": self._digests[site.path]}
        row |= {"killed": result.killed, "by": result.by, "seconds": round(result.seconds, 1)}
        with self._path.open("ab", buffering=0) as file:
            file.write((json.dumps(row) + "\n").encode())

    def of(self, chosen: Sequence[Site]) -> list[Result]:
        """The last result of each site that has one."""
        rows = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            row = json.loads(line)
            rows[row["path"], row["number"], row["digest"]] = row
        results = []
        for site in chosen:
            row = rows.get((site.path, site.number, self._digests[site.path]))
            if row is not None:
                results.append(Result(site, row["killed"], row["by"], row["seconds"]))
        return results


def judge_all(
    chosen: Sequence[Site], reach: Reach, store: Kept, workers: int, minutes: float
) -> None:
    """Judges in forked processes, which share the sites; no new mutant after `minutes`."""
    deadline = time.monotonic() + 60 * minutes
    processes = []
    for worker in range(workers):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _judge_some(chosen[worker::workers], reach, store, deadline)
                code = 0
            finally:
                os._exit(code)
        processes.append(pid)
    for pid in processes:
        os.waitpid(pid, 0)


def _judge_some(chosen: Sequence[Site], reach: Reach, store: Kept, deadline: float) -> None:
    judge = Judge(reach)
    try:
        for site in chosen:
            if time.monotonic() > deadline:
                return
            result = judge.judged(site)
            store.add(result)
            outcome = f"by {result.killed}" if result.killed else "LIVES"
            print(
                f"{result.seconds:6.1f} s  {outcome:<14} {site.path}:{site.line} {site.what}",
                flush=True,
            )
    finally:
        judge.end()


def proven(results: Sequence[Result], reach: Reach) -> list[Result]:
    """The results, less what is said by a test that fails without a mutant too."""
    witnesses = sorted({result.by for result in results if result.killed == BY_TEST})
    paths = sorted({result.site.path for result in results})
    judge = Judge(reach)
    try:
        green = judge.green(witnesses, paths)
    finally:
        judge.end()
    return [
        (
            result._replace(killed=UNPROVEN)
            if result.killed == BY_TEST and result.by not in green
            else result
        )
        for result in results
    ]


# -------------------------------------------------------------------------------------------
#     docs/mutations.md


def page(
    results_by_subject: dict[str, Sequence[Result]], site_counts: dict[str, int], seed: int
) -> str:
    """The published page: `found` and the number of all sites, by subject."""
    lines = [
        "# Mutations: which small changes of the source are noticed\n",
        (
            "Operators, constants, names of groups, orders, removed statements and negated"
            " conditions are changed, one at a time, in a copy of the tree, and the quick tests"
            " that run the changed line are asked (`tests/mutations`). Sites are drawn with seed"
            f" {seed}. Each test that noticed a change has passed without it in the same copy."
            " Written by `make mutations`; do not edit.\n"
        ),
    ]
    for name, results in results_by_subject.items():
        lines += _section(name, results, site_counts[name])
    return "\n".join(lines) + "\n"


def _section(name: str, drawn: Sequence[Result], site_count: int) -> list[str]:
    uncounted = [r for r in drawn if r.killed in (*UNCOUNTED, UNPROVEN)]
    results = [r for r in drawn if r not in uncounted]
    equivalent = [r for r in results if r.killed == LIVES and r.site.key in REASONS]
    lived = [r for r in results if r.killed == LIVES and r.site.key not in REASONS]
    noticed = [r for r in results if r.killed != LIVES]
    counted = len(noticed) + len(lived)
    share = 100 * len(noticed) / max(counted, 1)
    rooms = Counter(_room(r.site) for r in results)
    of_room = Counter(_room(r.site) for r in noticed)
    return [
        f"## {name}\n",
        (
            f"**{len(noticed)} of {counted} noticed ({share:.1f} %)**; {len(drawn)} of"
            f" {site_count:,} sites were drawn. Of all sites at least"
            f" {100 * at_least(len(noticed), counted):.0f}"
            f" % are noticed, at 95 % confidence. {len(equivalent)} more change nothing that a run"
            f" could show, and {len(uncounted)} are not counted: they hang, end oddly, or are"
            " noticed by a test that fails without them too.\n"
        ),
        "| room | mutants | noticed |\n|---|--:|--:|",
        *(f"| {room} | {count} | {of_room[room]} |" for room, count in sorted(rooms.items())),
        "\n### Lived\n",
        *(_item(r, f" ({UNSEEN})" if r.by == UNSEEN else "") for r in lived),
        "\n### Change nothing\n",
        *(_item(r, f". {REASONS[r.site.key]}") for r in equivalent),
        "\n### Not counted\n",
        *(_item(r, f": {r.killed}") for r in uncounted),
        "",
    ]


def _item(result: Result, rest: str) -> str:
    return f"- {result.site.path}:{result.site.line}: {result.site.what}{rest}"


def at_least(hits: int, drawn: int) -> float:
    """The share of all that a drawn sample speaks for, with 95 % confidence: Wilson's lower bound
    (JASA 22, 1927)."""
    if not drawn:
        return 0.0
    share = hits / drawn
    z = 1.645
    spread = z * math.sqrt(share * (1 - share) / drawn + z * z / (4 * drawn * drawn))
    return (share + z * z / (2 * drawn) - spread) / (1 + z * z / drawn)


def _room(site: Site) -> str:
    folders = site.path.split("/")
    return "/".join(folders[:2]).removesuffix(".py")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.mutations.run")
    parser.add_argument("subjects", nargs="*", choices=list(SUBJECTS), help="all, if none is named")
    parser.add_argument(
        "--count", type=int, default=0, help="mutants of each subject, drawn by --seed; 0: all"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="*", help="files, as trainer/optim/*")
    parser.add_argument("--minutes", type=float, default=1e9, help="no new mutant after these")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--record",
        nargs="*",
        help="record which lines are run by these tests (all, if none is named)",
    )
    parser.add_argument("--again", action="store_true", help="judge once more what has lived")
    parser.add_argument("--out", type=Path, help="write the page")
    parser.add_argument(
        "--build", type=Path, default=BUILD, help="where recordings and results are kept"
    )
    args = parser.parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = "1"
    results_by_subject = {}
    site_counts = {}
    for name in args.subjects or SUBJECTS:
        subject = SUBJECTS[name]
        folder = args.build / name
        if args.record is not None or not (folder / "digests.json").exists():
            record(folder, subject.sources, args.record or subject.tests, args.workers)
        try:
            reach = Reach(folder, subject.sources, collected(subject.tests))
        except ValueError as error:
            print(f"{error}: run it with --record", file=sys.stderr)
            return 2
        chosen = sample(subject, args.count, args.seed, args.only)
        store = Kept(folder / "results.jsonl", reach.digests)
        judged = {r.site for r in store.of(chosen) if not (args.again and r.killed == LIVES)}
        judge_all(
            [site for site in chosen if site not in judged],
            reach,
            store,
            args.workers,
            args.minutes,
        )
        results_by_subject[name] = store.of(chosen)
        site_counts[name] = len(every_site(subject))
        if args.out:
            results_by_subject[name] = proven(results_by_subject[name], reach)
    if args.out:
        args.out.write_text(page(results_by_subject, site_counts, args.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
