"""Steps that a benchmark has measured, each beside the plan of its job: a file whose rows update a
profile as runs do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from orchestrator.cost.of_plan import context_of, step_of
from orchestrator.cost.profile import Profile
from orchestrator.errors import OrchError
from orchestrator.plan import Plan, PlanError
from orchestrator.plan.codec import from_json, read_file
from orchestrator.plan.document import Cluster
from orchestrator.plan.exits import Exit

from .update import Update, site_profile, then, update_with_step


class MeasuredStep(NamedTuple):
    """A row: `step_s` is the measured seconds of the plan's step."""

    name: str
    plan: Plan
    step_s: float


class StepFacts(NamedTuple):
    """Seconds of a step: measured, and predicted before and after the update."""

    measured_s: float
    before_s: float
    after_s: float


class _Document(msgspec.Struct, frozen=True):
    rows: dict[str, Any]


def read_measured_steps(path: Path) -> list[MeasuredStep]:
    """Returns the rows of a result file that have `plan` and `step_s`.

    The file is JSON with `rows`, objects by name. Raises OrchError (65) if it cannot be read or has
    no such row.
    """
    try:
        document = msgspec.json.decode(read_file(path), type=_Document)
        steps = [
            _measured_step(name, row) for name, row in document.rows.items() if _is_measured(row)
        ]
    except OSError as error:
        raise OrchError(f"{path}: {error.strerror}", Exit.CONFIG) from None
    except (ValueError, PlanError) as error:
        raise OrchError(f"{path}: {error}", Exit.CONFIG) from None
    if not steps:
        raise OrchError(f"{path}: no row has both plan and step_s", Exit.CONFIG)
    return steps


def _is_measured(row: Any) -> bool:
    return isinstance(row, dict) and "plan" in row and "step_s" in row


def _measured_step(name: str, row: dict[str, Any]) -> MeasuredStep:
    step_s = row["step_s"]
    if not isinstance(step_s, int | float) or not 0 < step_s < float("inf"):
        raise ValueError(f"row {name!r}: step_s is {step_s!r}, not a positive number of seconds")
    return MeasuredStep(name, from_json(msgspec.json.encode(row["plan"])), step_s)


def update_with_steps(
    base: Profile,
    steps: list[MeasuredStep],
    cluster_of: Callable[[Plan], Cluster],
) -> tuple[Update, dict[str, StepFacts]]:
    """Updates the parameters by one step after another. Returns (update, facts by row).

    `cluster_of` returns the cluster with the rates that later plans will use.
    """
    profile = base
    update: Update | None = None
    predictions = {}
    for step in steps:
        predict_step = step_of(step.plan, context_of(step.plan, base, cluster_of(step.plan)))
        predictions[step.name] = predict_step
        next_update, _ = update_with_step(profile, predict_step, step.step_s)
        update = next_update if update is None else then(update, next_update)
        profile = site_profile(base, update, "rows", step.name, date="", name=base.name)
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
