"""Cases of the independent oracle with ranks that are forked from the test, so that a test's
patches are in them."""

from __future__ import annotations

from pathlib import Path

from orchestrator.plan import Plan
from tests.trainer.workers import running

from . import cases, runner
from .oracle.__main__ import answer
from .oracle.judge import prepare


def verdict(
    layouts: tuple[str, str], precision: str, home: Path, number: int = 0, **changes: object
) -> runner.Verdict:
    """The verdict on a case that begins in the first layout and is resumed in the second. `number`
    chooses what else varies; `changes`: fields of `Case`."""
    cases.write_corpus(home / "text")
    case = cases.make(" -> ".join(layouts), layouts, precision, number, home)._replace(**changes)
    return judged(case, home)


def judged(case: cases.Case, home: Path) -> runner.Verdict:
    folders = runner.write_runs(case, home / "case")
    if case.start == "harsh":
        prepare(folders[0], *case.scale)
    for number, (plan, run) in enumerate(zip(case.plans, folders, strict=True)):
        if failure := (runner.hand_over(*folders) if number else "") or failed(plan, run):
            return runner.Verdict(name=case.name, precision=case.precision, failed=failure)
    return runner.read_answer(case, answer(list(folders), case.start))


def failed(plan: Plan, run: Path) -> str:
    """Train; empty, or what a rank said that did not end well."""
    with running(plan, run) as workers:
        codes = workers.wait()
        bad = [rank for rank, code in enumerate(codes) if code]
        return f"{codes}: {workers.log(bad[0])}" if bad else ""


def reasons(judgement: runner.Verdict) -> list[str]:
    """What is wrong: names of quantities beyond their bounds, and problems."""
    return [
        name for name, worst in judgement.worst.items() if not worst.error <= worst.bound
    ] + judgement.problems
