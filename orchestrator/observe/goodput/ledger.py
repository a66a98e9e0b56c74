"""Sample ledger: records the samples of each step, and checks that the run trained on each sample
exactly once.

Every step report has the number of samples that the run has consumed after it, so a step covers the
range of positions in the data order between two such numbers (trainer/data/order.py maps a position
to its sample). Steps beyond the one from which the next epoch continued were undone with their
weights; all other steps are in the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.observe.timeline import Step


class Entry(NamedTuple):
    """Step `step` of `epoch` trained on positions `first` to `last` - 1 of the data order."""

    step: int
    epoch: int
    first: int
    last: int
    #: fingerprint of the samples' tokens; "" if the report has none or an earlier one is missing
    fingerprint: str = ""


class Ledger(NamedTuple):
    entries: list[Entry]
    undone: int  # step executions that a later epoch has replaced
    problems: list[str]  # empty: each sample was trained on exactly once

    @property
    def samples(self) -> int:
        return self.entries[-1].last if self.entries else 0


def ledger(steps: Iterable[Step]) -> Ledger:
    """Builds the ledger from a run's steps, which have each step of each epoch once
    (`timeline.lead_steps`). Pure.

    An epoch replaces the steps of earlier epochs from its own first step on. A missing report is a
    gap in the record: inside an epoch, the next entry covers both steps; between two epochs, the
    samples are unknown, and the gap is a problem.
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
    """Lists the steps whose number of samples is not the constant global batch `batch`."""
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
