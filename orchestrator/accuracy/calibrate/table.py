"""A profile from a table of measured runs, and how well it predicts the sources that it has not
seen."""

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

MOST_ROWS = 10_000  # of a table that is fitted: minutes
UNIT = 15.0  # a step that is so many times off every prediction is in another unit

Tell = Callable[[int, int, str], None]


class TableFit(NamedTuple):
    profile: Profile
    refused: list[str]  # rows that were left out, and why


def fit_table(
    rows: Iterable[Mapping[str, str]], name: str, sha256: str, date: str, tell: Tell
) -> TableFit:
    """The profile that explains a table's step times best. `tell`: progress.

    Raises OrchError (65) naming the row where the table cannot be used.
    """
    refused: list[str] = []
    found = observations(_limited(rows), refused)
    found, prior = _plausible(found, refused)
    if len(found) < 2:
        why = f": {refused[0]}" if refused else ""
        raise OrchError(f"no rows with a step_time_s to fit{why}", Exit.CONFIG)
    if len(refused) > len(found):
        raise OrchError(
            f"{len(refused)} of {len(refused) + len(found)} rows cannot be used; {refused[0]}",
            Exit.CONFIG,
        )
    tell(0, 1, f"{len(found)} rows")
    fitted = fit(found)
    unseen = np.empty(len(found))
    sources = by_source(found)
    if len(sources) > 1:
        for left in leave_one_source_out(found, fitted.values, tell=tell):
            unseen[left.at] = left.residuals
    else:
        unseen[:] = np.nan
    errors = {"prior": error(prior), "fitted": error(fitted.residuals), "left_out": error(unseen)}
    left_out = []
    for source, at in sources.items():
        means = {kind: float(values[at].mean()) for kind, values in errors.items()}
        shown = {kind: round(mean, 4) for kind, mean in means.items() if np.isfinite(mean)}
        left_out.append(LeftOut(source=source, rows=len(at), **({"left_out": -1.0} | shown)))
    fitted_on = FittedOn(
        what="table", sha256=sha256, date=date, rows={one.source: one.rows for one in left_out}
    )
    return TableFit(
        make_profile(name, fitted.values, fitted.covariance, fitted_on, left_out), refused
    )


def error(residuals: Floats) -> Floats:
    """|predicted / measured - 1| of ln(predicted / measured)."""
    return np.abs(np.expm1(residuals))


def _limited(rows: Iterable[Mapping[str, str]]) -> list[Mapping[str, str]]:
    kept: list[Mapping[str, str]] = []
    for row in rows:
        if len(kept) == MOST_ROWS:
            raise OrchError(
                f"row {MOST_ROWS + 1}: a fit takes at most {MOST_ROWS:,} rows", Exit.CONFIG
            )
        kept.append(row)
    return kept


def _plausible(found: list[Observation], refused: list[str]) -> tuple[list[Observation], Floats]:
    """(rows within a factor of `UNIT` of what the prior predicts, ln(predicted / measured) of
    them)."""
    residuals, _ = linearised(found, PRIOR_VALUES)
    kept = []
    for index, (one, miss) in enumerate(zip(found, residuals, strict=True)):
        if abs(miss) <= np.log(UNIT):
            kept.append(index)
            continue
        times = float(np.exp(abs(miss)))
        what = (
            f"{times:,.0f} times {'less' if miss > 0 else 'more'} than predicted; seconds a step?"
        )
        refused.append(f"row {one.name}: step_time_s={one.measured_s:g} is {what}")
    return [found[index] for index in kept], residuals[kept]


# ----------------------------------------------------------------------------------------------
#     terms

#: What the cost model is made of, and the parameters without which a term is not there: 1e-9, or 1
#: for a factor.
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
    """Mean over sources of the mean absolute error without one term; everything else fitted
    again."""

    term: str
    fitted: float
    left_out: float


def ablate(found: list[Observation], tell: Tell) -> list[Ablation]:
    """The whole model, each term left out, and nothing fitted; the worst loss first."""
    start = fit(found).values
    results = [_ablation("the whole model", found, start, {})]
    for done, (term, (stems, value)) in enumerate(TERMS.items()):
        tell(done, len(TERMS), term)
        fixed = {name: value for name in NAMES if name.startswith(stems)}
        results.append(_ablation(f"without: {term}", found, start, fixed))
    tell(len(TERMS), len(TERMS), "")
    prior, _ = linearised(found, PRIOR_VALUES)
    missed = mean_of_sources(found, prior)
    nothing = Ablation("nothing fitted: the priors", missed, missed)
    return [results[0], *sorted(results[1:], key=lambda one: -one.left_out), nothing]


def _ablation(
    term: str, found: list[Observation], start: Mapping[str, float], fixed: Mapping[str, float]
) -> Ablation:
    fitted = fit(found, start, fixed)
    unseen = np.empty(len(found))
    for left in leave_one_source_out(found, fitted.values, fixed):
        unseen[left.at] = left.residuals
    return Ablation(term, mean_of_sources(found, fitted.residuals), mean_of_sources(found, unseen))


def mean_of_sources(found: list[Observation], residuals: Floats) -> float:
    errors = error(residuals)
    return float(np.mean([errors[at].mean() for at in by_source(found).values()]))
