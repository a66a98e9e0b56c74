"""Rows of a table as observations: what was measured, and the cost model's prediction of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.planner.cost.profile import Profile
from orchestrator.planner.placement.axis_order import PathCache
from orchestrator.planner.predict.cells import RowError, number_of
from orchestrator.planner.predict.job_memory import job_memory
from orchestrator.planner.predict.predict import step_of
from orchestrator.planner.predict.rows import group_of, read_row

from .fit import Observation, linearised
from .update import site_profile, update

LEAST_S, MOST_S = 1e-4, 1e5  # of a step that can be


def observations(rows: Iterable[Mapping[str, str]], refused: list[str] | None = None) -> list[Observation]:
    """Of the rows that have a step time and can be read. `refused`: gets a line for each other row that has one."""
    paths: dict[int, PathCache] = {}
    found = []
    for number, cells in enumerate(rows, 1):
        name = (cells.get("id") or "").strip() or str(number)
        try:
            measured = measured_s(cells)
            if measured is not None:
                job = read_row(cells)
                step_s = step_of(job, job_memory(job).train, paths)
                found.append(Observation(name, group_of(cells), measured, step_s, number - 1))
        except RowError as error:
            if refused is not None:
                refused.append(f"row {number} ({name}): {error}")
    return found


def measured_s(cells: Mapping[str, str]) -> float | None:
    """Seconds of a row's step, None where it has none. RowError for one that cannot be."""
    value = number_of("step_time_s", cells.get("step_time_s") or "")
    if value is None:
        return None
    if not LEAST_S <= value <= MOST_S:
        raise RowError(f"step_time_s={value:g}: a step takes from {LEAST_S:g} to {MOST_S:g} s")
    return value


def after_row(profile: Profile, cells: Mapping[str, str]) -> Profile:
    """The profile of the machines of one row, after its step was measured. RowError where it has none."""
    measured = measured_s(cells)
    if measured is None:
        raise RowError("step_time_s is empty: nothing was measured")
    name = (cells.get("id") or "").strip() or "1"
    job = read_row(cells)
    one = Observation(name, group_of(cells), measured, step_of(job, job_memory(job).train, {}))
    residuals, jacobian = linearised([one], profile.values)
    return site_profile(profile, update(profile, residuals, jacobian), "row", name, "", profile.name)
