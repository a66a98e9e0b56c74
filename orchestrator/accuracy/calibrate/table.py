"""Fits a profile to a table of measured runs, and measures how well it predicts sources that it has
not seen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from orchestrator.cost.numpy_import import np
from orchestrator.cost.parameters import NAMES, PRIOR_VALUES
from orchestrator.cost.profile import FittedOn, LeftOut, Profile, make_profile
from orchestrator.cost.time.fabric import Floats
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit

from .fit import Observation, by_source, fit, leave_one_source_out, linearised
from .observations import observations

MOST_ROWS = 10_000  # The most rows that are fitted, which takes minutes.
UNIT = 15.0  # A step that differs from its prediction by a larger factor is in another unit.

Tell = Callable[[int, int, str], None]


class TableFit(NamedTuple):
    profile: Profile
    refused: list[str]  # The rows that were left out, each with the reason.


def fit_table(
    rows: Iterable[Mapping[str, str]],
    name: str,
    sha256: str,
    date: str,
    tell: Tell,
) -> TableFit:
    """Returns the profile that best explains a table's step times. `tell` receives the progress.

    Raises an OrchError (65) that names the row if the table cannot be used.
    """
    refused: list[str] = []
    observed_steps = observations(_limited(rows), refused)
    observed_steps, prior_residuals = _plausible(observed_steps, refused)
    _require_usable(observed_steps, refused)
    tell(0, 1, f"{len(observed_steps)} rows")
    fitted = fit(observed_steps)
    errors = {
        "prior": error(prior_residuals),
        "fitted": error(fitted.residuals),
        "left_out": error(_unseen_residuals(observed_steps, fitted.values, tell)),
    }
    left_out = [
        _left_out(source, {kind: values[indices] for kind, values in errors.items()})
        for source, indices in by_source(observed_steps).items()
    ]
    fitted_on = FittedOn(
        what="table",
        sha256=sha256,
        date=date,
        rows={source_error.source: source_error.rows for source_error in left_out},
    )
    profile = make_profile(
        name,
        fitted.values,
        fitted.covariance,
        fitted_on,
        left_out,
    )
    return TableFit(profile, refused)


def _require_usable(observed_steps: list[Observation], refused: list[str]) -> None:
    """Raises an OrchError unless two rows can be fitted, and as many as are refused."""
    if len(observed_steps) < 2:
        reason = f": {refused[0]}" if refused else ""
        raise OrchError(f"no rows with a step_time_s to fit{reason}", Exit.CONFIG)
    if len(refused) > len(observed_steps):
        raise OrchError(
            f"{len(refused)} of {len(refused) + len(observed_steps)} rows cannot be used;"
            f" {refused[0]}",
            Exit.CONFIG,
        )


def _unseen_residuals(
    observed_steps: list[Observation],
    start: Mapping[str, float],
    tell: Tell,
) -> Floats:
    """Returns the residuals of each source in a fit to the others; not a number if there is a
    single source."""
    residuals = np.full(len(observed_steps), np.nan)
    if len(by_source(observed_steps)) > 1:
        for unseen_source in leave_one_source_out(observed_steps, start, tell=tell):
            residuals[unseen_source.at] = unseen_source.residuals
    return residuals


def _left_out(source: str, errors: Mapping[str, Floats]) -> LeftOut:
    """Returns the mean errors of the rows of a source."""
    means = {kind: float(values.mean()) for kind, values in errors.items()}
    rounded_means = {kind: round(mean, 4) for kind, mean in means.items() if np.isfinite(mean)}
    rows = len(errors["fitted"])
    return LeftOut(
        source=source,
        rows=rows,
        **({"left_out": -1.0} | rounded_means),
    )


def error(residuals: Floats) -> Floats:
    """Returns |predicted / measured - 1|, computed from ln(predicted / measured)."""
    return np.abs(np.expm1(residuals))


def _limited(rows: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    limited_rows: list[Mapping[str, str]] = []
    for row in rows:
        if len(limited_rows) == MOST_ROWS:
            raise OrchError(
                f"row {MOST_ROWS + 1}: a fit takes at most {MOST_ROWS:,} rows", Exit.CONFIG
            )
        limited_rows.append(row)
    return limited_rows


def _plausible(
    observed_steps: list[Observation], refused: list[str]
) -> tuple[list[Observation], Floats]:
    """Returns (the observations within a factor of `UNIT` of the prior's prediction, their
    ln(predicted / measured)); the others are added to `refused`."""
    residuals, _ = linearised(observed_steps, PRIOR_VALUES)
    plausible_indices = []
    for index, (observation, miss) in enumerate(zip(observed_steps, residuals, strict=True)):
        if abs(miss) <= np.log(UNIT):
            plausible_indices.append(index)
            continue
        factor = float(np.exp(abs(miss)))
        direction = "less" if miss > 0 else "more"
        refused.append(
            f"row {observation.name}: step_time_s={observation.measured_s:g} is {factor:,.0f} times"
            f" {direction} than predicted; seconds per step?"
        )
    return [observed_steps[index] for index in plausible_indices], residuals[plausible_indices]


# ----------------------------------------------------------------------------------------------
#     Terms of the cost model

#: Term of the cost model -> (prefixes of its parameters, the value that removes the term: 1e-9, or
#: 1 for a factor).
TERMS: dict[str, tuple[tuple[str, ...], float]] = {
    "bytes of matrix products": (("gemm_bytes",), 1e-9),
    "memory-bound kernels": (("elementwise.",), 1e-9),
    "casts to fp8": (("cast",), 1e-9),
    "fp32 sum of weight gradients": (("accumulate",), 1e-9),
    "loss": (("logits",), 1e-9),
    "unfused attention's scores": (("attention.scores",), 1e-9),
    "packed samples": (("attention.packed",), 1.0),
    "CPU time of layers and steps": (("host.",), 1e-9),
    "optimizer": (("optimizer",), 1e-9),
    "latencies and launches": (("latency", "tp.launch"), 1e-9),
    "tensor-parallel communication": (("tp.exposed",), 1e-9),
    "transfers between stages": (("pp.exposed",), 1e-9),
    "context-parallel communication": (("cp.exposed",), 1e-9),
    "expert all-to-all": (("ep.exposed",), 1e-9),
    "permuting routed tokens": (("moe.permute",), 1e-9),
    "gradients that are always exposed": (("dp.",), 1e-9),
    "jitter of nodes": (("nodes",), 1e-9),
    "what is left of a family": (("family.",), 1.0),
}


class Ablation(NamedTuple):
    """The mean over sources of the mean absolute error without one term, after a fit of the other
    parameters."""

    term: str
    fitted: float
    left_out: float


def ablate(observed_steps: list[Observation], tell: Tell) -> list[Ablation]:
    """Returns the errors of the whole model, of the model without each term (the largest error
    first), and of the priors with nothing fitted."""
    start = fit(observed_steps).values
    ablations = [_ablation("the whole model", observed_steps, start, {})]
    for done, (term, (stems, value)) in enumerate(TERMS.items()):
        tell(done, len(TERMS), term)
        fixed = {name: value for name in NAMES if name.startswith(stems)}
        ablations.append(_ablation(f"without: {term}", observed_steps, start, fixed))
    tell(len(TERMS), len(TERMS), "")
    prior, _ = linearised(observed_steps, PRIOR_VALUES)
    prior_error = mean_of_sources(observed_steps, prior)
    unfitted = Ablation("nothing fitted: the priors", prior_error, prior_error)
    return [
        ablations[0],
        *sorted(ablations[1:], key=lambda ablation: -ablation.left_out),
        unfitted,
    ]


def _ablation(
    term: str,
    observed_steps: list[Observation],
    start: Mapping[str, float],
    fixed: Mapping[str, float],
) -> Ablation:
    fitted = fit(observed_steps, start, fixed)
    unseen_residuals = np.empty(len(observed_steps))
    for unseen_source in leave_one_source_out(observed_steps, fitted.values, fixed):
        unseen_residuals[unseen_source.at] = unseen_source.residuals
    return Ablation(
        term,
        mean_of_sources(observed_steps, fitted.residuals),
        mean_of_sources(observed_steps, unseen_residuals),
    )


def mean_of_sources(observed_steps: list[Observation], residuals: Floats) -> float:
    errors = error(residuals)
    return float(
        np.mean([errors[indices].mean() for indices in by_source(observed_steps).values()])
    )
