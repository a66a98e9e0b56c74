"""Reads a run's data once more and compares the fingerprint of each step's samples with the one
that the run reported."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from orchestrator import start
from orchestrator.errors import OrchError
from orchestrator.observe.goodput.ledger import ledger
from orchestrator.observe.timeline import Step
from orchestrator.plan.exits import Exit


class DataVerdict(NamedTuple):
    steps: int  # steps that the run's weights come from
    equal: int
    #: one per step or gap in the record; empty if the run trained on today's data
    problems: list[str]


def replay(plan: Path, steps: Iterable[Step]) -> DataVerdict:
    """Compares the steps of a run with the data of its plan. Raises OrchError (65) if the data
    cannot be opened."""
    book = ledger(steps)
    if not book.entries:
        raise OrchError("the run has reported no steps to compare", Exit.CONFIG)
    problems = [*book.problems]
    problems += [
        f"step {entry.step}: no fingerprint in the run's record"
        for entry in book.entries
        if not entry.fingerprint
    ]
    entries = [entry for entry in book.entries if entry.fingerprint]
    requests = [
        json.dumps(
            {
                "step": entry.step,
                "first": entry.first,
                "last": entry.last,
            }
        )
        + "\n"
        for entry in entries
    ]
    output = start.output(
        "trainer.data.replay",
        str(plan),
        stdin="".join(requests),
    )
    equal = 0
    for entry, line in zip(entries, output.splitlines(), strict=True):
        answer = json.loads(line)
        if answer["problem"]:
            problems.append(f"step {entry.step}: {answer['problem']}")
        elif answer["fingerprint"] != entry.fingerprint:
            problems.append(
                f"step {entry.step} of epoch {entry.epoch} trained on other tokens than samples"
                f" {entry.first} to {entry.last - 1} have now ({entry.fingerprint} then,"
                f" {answer['fingerprint']} now)"
            )
        else:
            equal += 1
    return DataVerdict(len(book.entries), equal, problems)
