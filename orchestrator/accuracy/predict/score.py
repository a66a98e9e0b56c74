"""Scores predictions against a table's measurements: errors by group, the order of layouts, and
whether jobs fit in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import log
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


ALL = "all"
MEAN = "mean of groups"


def score(rows: Sequence[Mapping[str, str]], predictions: Sequence[Prediction]) -> Score:
    time: dict[str, list[Miss]] = defaultdict(list)
    memory: dict[str, list[Miss]] = defaultdict(list)
    sweeps: dict[tuple[str, ...], dict[tuple[str, ...], list[tuple[float, float]]]]
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
            sweep, layout = (
                tuple(row.get(name, "") for name in names) for names in (SWEEP, LAYOUT)
            )
            sweeps[group, *sweep][layout].append((measured, prediction.step_time_s))
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
    value, (minimum, maximum, expectation) = number_of(name, row.get(name) or ""), MEASURED[name]
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
    inside_shares = [
        _mean([abs(miss.z) <= sigmas for miss in misses if miss.z is not None])
        for sigmas in (1.0, SIGMAS)
    ]
    return Errors(
        group, len(misses), sum(absolute_errors) / len(absolute_errors), p90, bias, *inside_shares
    )


def _orders(
    sweeps: Mapping[tuple[str, ...], Mapping[tuple[str, ...], list[tuple[float, float]]]],
) -> list[Order]:
    by_group: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for key, layouts in sweeps.items():
        points = [
            (
                _mean([measured_s for measured_s, _ in runs]),
                _mean([predicted_s for _, predicted_s in runs]),
            )
            for runs in layouts.values()
        ]
        if len(points) >= 3 and len({measured for measured, _ in points}) > 1:
            by_group[key[0]].append(points)
    orders = []
    for group, group_sweeps in sorted(by_group.items()):
        ranks = [spearman(points) for points in group_sweeps]
        regrets = [regret(points) for points in group_sweeps]
        orders.append(
            Order(
                group,
                len(group_sweeps),
                sum(map(len, group_sweeps)),
                _mean(ranks),
                _mean(regrets),
                max(regrets),
            )
        )
    if orders:
        mean_spearman, mean_regret = (
            _mean([getattr(group_order, name) for group_order in orders])
            for name in ("spearman", "regret")
        )
        layout_count = sum(group_order.layouts for group_order in orders)
        worst = max(group_order.worst for group_order in orders)
        orders.append(Order(MEAN, len(orders), layout_count, mean_spearman, mean_regret, worst))
    return orders


def spearman(points: Sequence[tuple[float, float]]) -> float:
    """Returns the rank correlation, with ties at their mean rank; 0 if one side is constant."""
    measured_ranks, predicted_ranks = (_ranks([point[side] for point in points]) for side in (0, 1))
    mean_rank = (len(points) + 1) / 2
    covariance = sum(
        (measured_rank - mean_rank) * (predicted_rank - mean_rank)
        for measured_rank, predicted_rank in zip(measured_ranks, predicted_ranks, strict=True)
    )
    variance_product = sum(
        (measured_rank - mean_rank) ** 2 for measured_rank in measured_ranks
    ) * sum((predicted_rank - mean_rank) ** 2 for predicted_rank in predicted_ranks)
    return covariance / variance_product**0.5 if variance_product else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]


def regret(points: Sequence[tuple[float, float]]) -> float:
    """Returns how much slower the layout that was predicted fastest is than the fastest one:
    the ratio of their measured times, minus 1."""
    chosen_s = min(points, key=lambda point: point[1])[0]
    return chosen_s / min(measured for measured, _ in points) - 1
