"""Sample ledger: the samples that each step trained on, and whether the whole run has each exactly
once.

Every step report says how many samples the run has consumed after it, so a step is the range of
places in the data order between two such numbers (which sample lies at a place is a pure function,
trainer/data/order.py). What an epoch did beyond the step from which the next one went on was undone
with its weights; the rest is the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.observe.timeline import Step


class Entry(NamedTuple):
    """Step `step`, as `epoch` did it, took the places `first` to `last` - 1 of the data order."""

    step: int
    epoch: int
    first: int
    last: int
    fingerprint: str = (
        ""  # of those samples' tokens; "" where a report between is missing, or it has none
    )


class Ledger(NamedTuple):
    entries: list[Entry]
    undone: int  # step executions that a later epoch has replaced
    problems: list[str]  # empty: each sample was trained on exactly once

    @property
    def samples(self) -> int:
        return self.entries[-1].last if self.entries else 0


def ledger(steps: Iterable[Step]) -> Ledger:
    """From a run's reports, each step of each epoch once (`timeline.lead_steps`). Pure.

    An epoch goes on from the step before its first one, and replaces what earlier epochs had done
    from there on. A report that nobody has made is a gap in the record: inside an epoch the entry
    after it spans both steps; between two epochs nobody can know, and it is a problem.
    """
    kept_steps: list[Step] = []
    undone = 0
    problems = []
    ordered = sorted(steps, key=lambda report: (report.epoch, report.step, report.at))
    epoch: int | None = None
    for step in ordered:
        if step.epoch != epoch:
            epoch = step.epoch
            while kept_steps and kept_steps[-1].step >= step.step:
                kept_steps.pop()
                undone += 1
            done = kept_steps[-1].step if kept_steps else 0
            if step.step != done + 1:
                problems.append(
                    f"epoch {epoch} begins with step {step.step}, and step {done} is the last known"
                    " before"
                )
        elif kept_steps and step.step <= kept_steps[-1].step:
            problems.append(f"epoch {epoch} reports step {step.step} twice")
            continue
        kept_steps.append(step)
    entries = []
    consumed = 0
    previous_step = 0
    for step in kept_steps:
        if step.samples <= consumed:
            problems.append(
                f"step {step.step} of epoch {step.epoch} ends at sample {step.samples}, not after"
                f" {consumed}"
            )
        fingerprint = step.fingerprint if step.step == previous_step + 1 else ""
        entries.append(Entry(step.step, step.epoch, consumed, step.samples, fingerprint))
        consumed = step.samples
        previous_step = step.step
    return Ledger(entries, undone, problems)


def uneven(entries: Iterable[Entry], batch: int) -> list[str]:
    """Steps that took another number of samples than the global batch, where that is constant."""
    previous = 0
    problems = []
    for entry in entries:
        steps = entry.step - previous
        if entry.last - entry.first != batch * steps:
            problems.append(
                f"step {entry.step} of epoch {entry.epoch} took samples {entry.first} to"
                f" {entry.last - 1}"
            )
        previous = entry.step
    return problems
