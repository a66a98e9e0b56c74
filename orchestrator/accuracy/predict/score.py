"""Scores predictions against a table's measurements: errors by group, the order of layouts, and
whether jobs fit in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import log
from operator import mul
from typing import Any, NamedTuple

from orchestrator.plan.interval import SIGMAS

from .cells import RowError, number_of
from .predict import Prediction
from .rows import group_of, row_id

#: Rows that agree in these columns differ only in their layout.
SWEEP = (
    "model",
    "layers",
    "hidden",
    "seq_len",
    "gpu",
    "num_gpus",
    "global_batch",
    "precision",
    "framework",
    "task",
)
#: Columns of a row's layout. Rows that agree in these too count as their mean: another release or
#: repetition is not another layout.
LAYOUT = (
    "tp",
    "sp",
    "cp",
    "pp",
    "vpp",
    "pp_schedule",
    "dp",
    "ep",
    "zero_stage",
    "micro_batch",
    "recompute",
)
#: Columns of a row that a score reads.
COMPARED = (*SWEEP, *LAYOUT, "id", "step_time_s", "peak_mem_gib", "status")
#: Measured column -> (lowest plausible number, highest, what the column holds).
MEASURED: dict[str, tuple[float, float, str]] = {
    "step_time_s": (1e-4, 1e5, "a step takes seconds"),
    "peak_mem_gib": (1e-3, 1e4, "a GPU has GiB"),
}


class Errors(NamedTuple):
    """Errors of one group of rows. An error is (predicted - measured) / measured."""

    group: str
    rows: int
    mean: float  # Mean of the absolute error.
    p90: float
    bias: float  # Mean of the error with its sign.
    #: Share of the measurements inside the 68 % and the 95 % interval. None without intervals.
    inside68: float | None = None
    inside95: float | None = None
    fitted: float | None = None  # Mean error of a fit that has seen these rows.
    #: Mean error after one row of the group was measured, averaged over every choice of that row.
    after_one: float | None = None


class Order(NamedTuple):
    group: str
    sweeps: int  # Number of sweeps with at least three layouts.
    layouts: int
    spearman: float  # Mean over sweeps.
    regret: float  # Mean over sweeps of `regret`.
    worst: float  # Largest regret of a sweep.


class Score(NamedTuple):
    time: list[Errors]
    memory: list[Errors]
    order: list[Order]
    fits: dict[tuple[str, str], int]  # (measured status, predicted status) -> number of rows.


class Miss(NamedTuple):
    """The error of one prediction."""

    error: float  # predicted / measured - 1.
    z: float | None  # ln(predicted / measured) / standard deviation. None without an interval.


class Point(NamedTuple):
    """The step of one layout, in seconds."""

    measured_s: float
    predicted_s: float


ALL = "all"
MEAN = "mean of groups"


def score(rows: Sequence[Mapping[str, str]], predictions: Sequence[Prediction]) -> Score:
    time: dict[str, list[Miss]] = defaultdict(list)
    memory: dict[str, list[Miss]] = defaultdict(list)
    sweeps: dict[tuple[str, ...], dict[tuple[str, ...], list[Point]]]
    sweeps = defaultdict(lambda: defaultdict(list))
    fits: dict[tuple[str, str], int] = defaultdict(int)
    for row, prediction in zip(rows, predictions, strict=True):
        if prediction.step_time_s is None or prediction.peak_mem_gib is None:
            continue
        group = group_of(row)
        measured = _number(row, "step_time_s")
        peak = _number(row, "peak_mem_gib")
        if measured:
            time[group].append(miss(prediction.step_time_s, measured, prediction.step_sd))
            sweep = tuple(row.get(name, "") for name in SWEEP)
            layout = tuple(row.get(name, "") for name in LAYOUT)
            sweeps[group, *sweep][layout].append(Point(measured, prediction.step_time_s))
        if peak:
            memory[group].append(miss(prediction.peak_mem_gib, peak, prediction.mem_sd))
        if row.get("status") in ("ok", "oom"):
            fits[row["status"], prediction.status] += 1
    return Score(_errors(time), _errors(memory), _orders(sweeps), dict(fits))


def miss(predicted: float, measured: float, sd: float) -> Miss:
    return Miss(predicted / measured - 1, log(predicted / measured) / sd if sd > 0 else None)


def unread(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a line for each measured cell that a score leaves out, because it is not a number,
    not above 0, or in another unit."""
    problems = []
    for number, row in enumerate(rows, 1):
        for name in MEASURED:
            try:
                measured_in(row, name)
            except RowError as error:
                problems.append(f"row {number} ({row_id(row) or number}): {error}")
    return problems


def _number(row: Mapping[str, str], name: str) -> float | None:
    try:
        return measured_in(row, name)
    except RowError:
        return None


def measured_in(row: Mapping[str, str], name: str) -> float | None:
    """Returns the number in a measured cell, or None if it is blank. Raises RowError for a number
    that is not plausible."""
    value = number_of(name, row.get(name) or "")
    minimum, maximum, expectation = MEASURED[name]
    if value is not None and not minimum <= value <= maximum:
        raise RowError(f"{name}={value:g}: {expectation} from {minimum:g} to {maximum:g}")
    return value


def _errors(misses_by_group: Mapping[str, list[Miss]]) -> list[Errors]:
    """Returns the errors of each group, then those of all rows and the mean of groups."""
    group_errors = [_summary(group, misses) for group, misses in sorted(misses_by_group.items())]
    if not group_errors:
        return []
    all_misses = [miss for misses in misses_by_group.values() for miss in misses]
    return [*group_errors, _summary(ALL, all_misses), mean_of_groups(group_errors)]


def mean_of_groups(groups: Sequence[Errors]) -> Errors:
    """Returns the mean over groups. Each group counts once, however many rows it has; the bias is
    the mean of their biases."""
    means = {name: _mean([getattr(group, name) for group in groups]) for name in Errors._fields[2:]}
    return Errors(MEAN, len(groups), **means)


def _mean(values: Sequence[float | None]) -> Any:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _summary(group: str, misses: Sequence[Miss]) -> Errors:
    absolute_errors = sorted(abs(miss.error) for miss in misses)
    p90 = absolute_errors[min(len(absolute_errors) - 1, int(0.9 * len(absolute_errors)))]
    bias = sum(miss.error for miss in misses) / len(misses)
    deviations = [abs(miss.z) for miss in misses if miss.z is not None]
    return Errors(
        group=group,
        rows=len(misses),
        mean=sum(absolute_errors) / len(absolute_errors),
        p90=p90,
        bias=bias,
        inside68=_mean([z <= 1.0 for z in deviations]),
        inside95=_mean([z <= SIGMAS for z in deviations]),
    )


def _orders(sweeps: Mapping[tuple[str, ...], Mapping[tuple[str, ...], list[Point]]]) -> list[Order]:
    """Returns the order of each group, then the mean of groups. `sweeps` maps a group and a sweep
    to the runs of each of its layouts."""
    by_group: dict[str, list[list[Point]]] = defaultdict(list)
    for (group, *_), layouts in sweeps.items():
        points = [_mean_point(runs) for runs in layouts.values()]
        if len(points) >= 3 and len({measured for measured, _ in points}) > 1:
            by_group[group].append(points)
    orders = [_order(group, group_sweeps) for group, group_sweeps in sorted(by_group.items())]
    if not orders:
        return []
    mean_order = Order(
        group=MEAN,
        sweeps=len(orders),
        layouts=sum(order.layouts for order in orders),
        spearman=_mean([order.spearman for order in orders]),
        regret=_mean([order.regret for order in orders]),
        worst=max(order.worst for order in orders),
    )
    return [*orders, mean_order]


def _mean_point(runs: Sequence[Point]) -> Point:
    return Point(_mean([run.measured_s for run in runs]), _mean([run.predicted_s for run in runs]))


def _order(group: str, sweeps: Sequence[Sequence[Point]]) -> Order:
    regrets = [regret(points) for points in sweeps]
    return Order(
        group=group,
        sweeps=len(sweeps),
        layouts=sum(map(len, sweeps)),
        spearman=_mean([spearman(points) for points in sweeps]),
        regret=_mean(regrets),
        worst=max(regrets),
    )


def spearman(points: Sequence[tuple[float, float]]) -> float:
    """Returns the rank correlation, with ties at their mean rank; 0 if one side is constant."""
    mean_rank = (len(points) + 1) / 2
    measured = [rank - mean_rank for rank in _ranks([point[0] for point in points])]
    predicted = [rank - mean_rank for rank in _ranks([point[1] for point in points])]
    covariance = sum(map(mul, measured, predicted))
    variances = sum(rank**2 for rank in measured) * sum(rank**2 for rank in predicted)
    return covariance / variances**0.5 if variances else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def regret(points: Sequence[tuple[float, float]]) -> float:
    """Returns how much slower the layout that was predicted fastest is than the fastest one:
    the ratio of their measured times, minus 1."""
    chosen_s = min(points, key=lambda point: point[1])[0]
    return chosen_s / min(measured for measured, _ in points) - 1
