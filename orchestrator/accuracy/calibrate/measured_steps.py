"""Steps that a benchmark has measured, each beside the plan of its job: a file whose rows update a
profile as runs do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from orchestrator.cost.of_plan import context_of, step_of
from orchestrator.cost.profile import Profile
from orchestrator.errors import OrchError
from orchestrator.plan import Plan, PlanError
from orchestrator.plan.codec import UNREADABLE, from_json, read_file
from orchestrator.plan.document import Cluster
from orchestrator.plan.exits import Exit

from .update import Update, site_profile, then, update_with_step

#: A result file of a hundred rows has less than a megabyte.
MOST_BYTES = 32 << 20
#: A step further from its prediction than this is in another unit, or another job's.
MOST_FACTOR = 100.0
SHOWN = 40  # characters of a value that is refused
ABSENT = msgspec.Raw()  # a field that a row lacks


class MeasuredStep(NamedTuple):
    """A row: `step_s` is the measured seconds of the plan's step."""

    name: str
    plan: Plan
    step_s: float
    path: Path

    @property
    def label(self) -> str:
        return f"{self.path}: row {self.name!r}"

    @property
    def source(self) -> str:
        """What a profile remembers of this row, wherever its file lies and whatever is added to
        it."""
        return f"row {self.name} {self.plan.hash[:12]} {self.step_s!r}"


class StepFacts(NamedTuple):
    """Seconds of a step: measured, and predicted before and after the update."""

    measured_s: float
    before_s: float
    after_s: float


class _Document(msgspec.Struct, frozen=True):
    rows: dict[str, msgspec.Raw] | None = None


class _Row(msgspec.Struct, frozen=True):
    plan: msgspec.Raw = ABSENT
    step_s: msgspec.Raw = ABSENT


def read_measured_steps(path: Path) -> list[MeasuredStep]:
    """Returns the rows of a result file that have `plan` and `step_s`.

    The file is JSON with `rows`, objects by name. Raises OrchError (65) if it cannot be read, or
    has no such row or one that cannot be used.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB, so no result of a benchmark")
        document = msgspec.json.decode(read_file(path), type=_Document)
        if document.rows is None:
            raise ValueError(
                "it has no `rows`: an older program wrote it, whose results have no plans; measure"
                " again with benchmarks.gpu_single or gpu_node"
            )
        steps = [
            step
            for name, content in document.rows.items()
            if (step := _measured_step(path, name, content)) is not None
        ]
        if not steps:
            raise ValueError("no row has both plan and step_s")
    except OSError as error:
        raise OrchError(f"{path}: {error.strerror}", Exit.CONFIG) from None
    except UNREADABLE as error:
        raise OrchError(f"{path}: {error}", Exit.CONFIG) from None
    return steps


def _measured_step(path: Path, name: str, content: msgspec.Raw) -> MeasuredStep | None:
    """Returns None for a row without a measured step. Raises ValueError, which names the row."""
    if not bytes(content).lstrip().startswith(b"{"):
        return None
    row = msgspec.json.decode(content, type=_Row)
    if ABSENT in (row.plan, row.step_s):
        return None
    try:
        step_s = msgspec.json.decode(row.step_s, type=float)
    except msgspec.ValidationError:  # a Boolean, text, or beyond every float
        step_s = 0.0
    if step_s <= 0:
        value = bytes(row.step_s).decode()
        shown = value if len(value) <= SHOWN else f"{value[:SHOWN]}..."
        raise ValueError(f"row {name!r}: step_s is {shown}, not a positive number of seconds")
    try:
        plan = from_json(bytes(row.plan))
    except PlanError as error:
        raise ValueError(f"row {name!r}: {error}") from None
    return MeasuredStep(name, plan, step_s, path)


def update_with_steps(
    base: Profile,
    steps: list[MeasuredStep],
    cluster_of: Callable[[Plan], Cluster],
) -> tuple[Update, dict[str, StepFacts]]:
    """Updates the parameters by one step after another. Returns (update, facts by row).

    `cluster_of` returns the cluster with the rates that later plans will use. Raises OrchError (65)
    if a step is too far from its prediction to be one.
    """
    profile = base
    update: Update | None = None
    predictions = {}
    for step in steps:
        predict_step = step_of(step.plan, context_of(step.plan, base, cluster_of(step.plan)))
        _check_seconds(step, float(predict_step(base.values)))  # type: ignore[arg-type]
        predictions[step.name] = predict_step
        next_update, _ = update_with_step(profile, predict_step, step.step_s)
        update = next_update if update is None else then(update, next_update)
        profile = site_profile(base, update, "rows", [step.name], date="", name=base.name)
    assert update is not None, "a file has at least one row"
    after = update.values(base)
    facts = {
        step.name: StepFacts(
            step.step_s,
            float(predictions[step.name](base.values)),  # type: ignore[arg-type]
            float(predictions[step.name](after)),  # type: ignore[arg-type]
        )
        for step in steps
    }
    return update, facts


def _check_seconds(step: MeasuredStep, predicted_s: float) -> None:
    if not 1 / MOST_FACTOR <= step.step_s / predicted_s <= MOST_FACTOR:
        raise OrchError(
            f"{step.label}: {step.step_s:.3g} s measured and {predicted_s:.3g} s predicted are"
            f" more than {MOST_FACTOR:.0f} times apart; step_s is in seconds",
            Exit.CONFIG,
        )
