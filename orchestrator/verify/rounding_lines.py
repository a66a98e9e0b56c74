"""What `orch precision` prints: the errors by kind of linear and by layer, the proposal, and its
price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from orchestrator.plan import Plan
from orchestrator.plan.rounding.measurement import LinearErrors, Measurement
from orchestrator.plan.rounding.proposal import MOST_ERROR
from orchestrator.plan.trained import refusal
from orchestrator.style import GRAY, RED, Style, seconds, si

from .rounding import Prices, prices

PRODUCTS = ("forward", "input_grad", "weight_grad")
_NAME = 14  # columns of the first column


def lines(plan: Plan, measurement: Measurement, look: Style) -> list[str]:
    """Returns the whole page for a terminal."""
    return [
        heading(plan, measurement),
        "",
        *_table("linear", measurement, look, lambda linear: linear.name),
        "",
        *_table("layer", measurement, look, lambda linear: str(linear.layer)),
        "",
        *_losses(measurement),
        "",
        *proposal_lines(plan, measurement, look),
        *(f"note: {problem}" for problem in filter(None, [refusal(plan)])),
    ]


def heading(plan: Plan, measurement: Measurement) -> str:
    """Returns the first line: what was measured on what."""
    weights = "initial weights" if measurement.step is None else f"step {measurement.step}"
    return (
        f"{plan.model.name}, {plan.job.matmul}, {weights}, {measurement.tokens:,} tokens:"
        f" {len(measurement.linears)} linears against {measurement.dtype}"
    )


def _table(
    title: str,
    measurement: Measurement,
    look: Style,
    key: Callable[[LinearErrors], str],
) -> list[str]:
    """Returns the largest error of each product, and the change of the loss, by `key`."""
    names = dict.fromkeys(map(key, measurement.linears))
    header = f"{title:<{_NAME}} {'forward':>9} {'d input':>9} {'d weight':>9} {'d loss':>10}"
    rows = [look.paint(header, GRAY)]
    for name in names:
        linears = [linear for linear in measurement.linears if key(linear) == name]
        cells = [
            _cell(max(getattr(linear, product) for linear in linears), look) for product in PRODUCTS
        ]
        change = measurement.names.get(name, sum(linear.loss for linear in linears))
        rows.append(f"{name:<{_NAME}} {' '.join(cells)} {change / measurement.wide_loss:>+10.3%}")
    return rows


def _cell(error: float, look: Style) -> str:
    return look.paint(f"{error:>9.2%}", RED if error > MOST_ERROR else None)


def _losses(measurement: Measurement) -> Iterable[str]:
    yield f"loss {measurement.wide_loss:.6f}; all linears in 8 bits {_change(measurement, False)}"


def _change(measurement: Measurement, proposed: bool) -> str:
    loss = measurement.proposal_loss if proposed else measurement.narrow_loss
    return f"{(loss - measurement.wide_loss) / measurement.wide_loss:+.3%}"


def proposal_lines(plan: Plan, measurement: Measurement, look: Style) -> list[str]:
    """Returns the proposal, a reason for each of its patterns, and its price."""
    if not measurement.proposals:
        return [
            "proposal: keep nothing more wide; no product exceeds"
            f" {MOST_ERROR:.0%}, and no linear stands out in the loss"
        ]
    patterns = ",".join(proposal.pattern for proposal in measurement.proposals)
    reasons = [
        row
        for proposal in measurement.proposals
        for row in look.fold(f"  {proposal.pattern}: {proposal.reason}", 4)
    ]
    return [
        look.paint(f"proposal: train.matmul_wide=[{patterns}]", bold=True),
        *reasons,
        f"  the loss changes by {_change(measurement, True)} with it,"
        f" {_change(measurement, False)} without",
        *(f"  {row}" for row in price_lines(prices(plan, measurement))),
    ]


def price_lines(costs: Prices | str) -> Sequence[str]:
    """Returns what the proposal costs, by the plan."""
    if isinstance(costs, str):
        return [f"the plan has no price for it: {costs}"]
    more = costs.proposed.step_s / costs.narrow.step_s - 1
    return [
        f"by the plan a step takes {seconds(costs.proposed.step_s)}, {more:+.1%};"
        f" {seconds(costs.narrow.step_s)} with all in 8 bits,"
        f" {seconds(costs.wide.step_s)} with none",
        f"and the fullest rank {si(costs.proposed.memory_bytes, 'B')};"
        f" {si(costs.narrow.memory_bytes, 'B')} with all in 8 bits",
    ]
