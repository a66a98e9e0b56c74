"""A run's data read once more: the fingerprint of each step's samples against the one that the run
has reported."""

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
    steps: int  # that the run's weights come from
    equal: int
    problems: list[
        str
    ]  # a step each, or a gap in the record; empty: the run trained on what is there now


def replay(plan: Path, steps: Iterable[Step]) -> DataVerdict:
    """The verdict on the steps of a run with this plan. Raises OrchError (65) where its data cannot
    be opened."""
    book = ledger(steps)
    if not book.entries:
        raise OrchError("the run has reported no step: there is nothing to compare", Exit.CONFIG)
    problems = [*book.problems]
    problems += [
        f"step {entry.step}: no fingerprint in the run's record"
        for entry in book.entries
        if not entry.fingerprint
    ]
    known = [entry for entry in book.entries if entry.fingerprint]
    asked = "".join(
        json.dumps({"step": entry.step, "first": entry.first, "last": entry.last}) + "\n"
        for entry in known
    )
    answers = start.output("trainer.data.replay", str(plan), stdin=asked).splitlines()
    equal = 0
    for entry, line in zip(known, answers, strict=True):
        found = json.loads(line)
        if found["problem"]:
            problems.append(f"step {entry.step}: {found['problem']}")
        elif found["fingerprint"] != entry.fingerprint:
            problems.append(
                f"step {entry.step} of epoch {entry.epoch} trained on other tokens than samples"
                f" {entry.first} to {entry.last - 1} have now ({entry.fingerprint} then,"
                f" {found['fingerprint']} now)"
            )
        else:
            equal += 1
    return DataVerdict(len(book.entries), equal, problems)
