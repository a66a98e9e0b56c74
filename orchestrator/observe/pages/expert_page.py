"""Renders the load of each expert over steps as text: numbers of all layers, and a picture of the
least balanced layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.observe.expert_loads import Loads, rank_load, summary
from orchestrator.plan import Plan
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.style import GRAY, Style, three

_STEPS = 10
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_LETTERS = " .:-=+*#@"


def render(plan: Plan, loads: Loads, style: Style) -> str:
    """The section of `orch report`, without a final newline; empty if no steps were sampled."""
    numbers = summary(plan, loads)
    if not numbers:
        return ""
    lines = [style.title("Experts: load of the sampled steps")]
    head = (
        f"{'layer':<8}{'balance':>16}{'most/mean':>11}{'of a rank':>11}{'entropy':>9}"
        f"{'dropped':>9}{'bias':>16}"
    )
    lines.append(style.paint(head, GRAY))
    lines += [_layer_line(layer, statistics) for layer, statistics in numbers.items()]
    if ranks := rank_load(plan, loads):
        comparison = (
            f"fullest rank: {ranks['measured']:.3f} times the mean load, planned:"
            f" {ranks['planned']:.3f} (cost.expert_imbalance; orch calibrate --from RUN fits it)"
        )
        lines += style.fold(comparison, 2)
    worst = min(numbers, key=lambda layer: numbers[layer]["balance"]["last"])
    head = f"tokens by expert over steps, layer {worst}: full height is twice the mean"
    lines += ["", style.paint(head, GRAY)]
    return "\n".join(lines + _picture(loads[int(worst)], style))


def _layer_line(layer: str, statistics: Mapping[str, Any]) -> str:
    first = statistics["balance"]["first"]
    last = statistics["balance"]["last"]
    balance = f"{first:.2f} to {last:.2f}"
    bias = "-"
    if statistics["bias"] is not None:
        bias = " to ".join(f"{bound:+.3g}" for bound in statistics["bias"])
    return (
        f"{layer:<8}{balance:>16}{three(statistics['load_ratio']):>11}"
        f"{three(statistics['rank_load_ratio']):>11}{statistics['router_entropy']:>9.2f}"
        f"{statistics['dropped']:>9.1%}{bias:>16}"
    )


def _picture(steps: list[tuple[int, ExpertLoad]], style: Style) -> list[str]:
    """Draws a line per step with a character per expert, or per group of neighbouring experts if
    the line is too short."""
    count = min(_STEPS, len(steps))
    last_step = len(steps) - 1
    last_line = max(1, count - 1)
    shown = [steps[round(index * last_step / last_line)] for index in range(count)]
    ramp = _HEIGHTS if style.unicode else _LETTERS
    highest = len(ramp) - 1
    lines = []
    for step, load in shown:
        experts_per_cell = -(-len(load.tokens) // max(8, style.width - 24))
        runs = [
            load.tokens[index : index + experts_per_cell]
            for index in range(0, len(load.tokens), experts_per_cell)
        ]
        mean = sum(load.tokens) / len(load.tokens) or 1.0
        cells = (min(1.0, sum(run) / len(run) / mean / 2) for run in runs)
        drawn = "".join(
            ramp[min(highest, -(-round(cell * 1000) * highest // 1000))] for cell in cells
        )
        lines.append(f"step {step:<8} |{drawn}| {three(load.ratio)}x")
    return lines
