"""Load by expert over steps, as text: the layer that is least even, and numbers of all layers."""

from __future__ import annotations

from orchestrator.observe.expert_loads import Loads, rank_load, summary
from orchestrator.plan import Plan
from orchestrator.plan.expert_load import ExpertLoad
from orchestrator.style import GRAY, Style, fold, three

_STEPS = 10
_HEIGHTS = " ▁▂▃▄▅▆▇█"
_LETTERS = " .:-=+*#@"


def render(plan: Plan, loads: Loads, style: Style) -> str:
    """The section, without a final newline; empty where nothing was sampled."""
    numbers = summary(plan, loads)
    if not numbers:
        return ""
    lines = [style.title("Experts: load of the sampled steps")]
    head = f"{'layer':<8}{'balance':>16}{'most/mean':>11}{'of a rank':>11}{'entropy':>9}{'dropped':>9}{'bias':>18}"
    lines.append(style.paint(head, GRAY))
    for layer, found in numbers.items():
        balance = f"{found['balance']['first']:.2f} to {found['balance']['last']:.2f}"
        bias = "-" if found["bias"] is None else " to ".join(f"{one:+.3g}" for one in found["bias"])
        ratios = f"{three(found['load_ratio']):>11}{three(found['rank_load_ratio']):>11}"
        lines.append(
            f"{layer:<8}{balance:>16}{ratios}{found['router_entropy']:>9.2f}{found['dropped']:>9.1%}{bias:>18}"
        )
    if ranks := rank_load(plan, loads):
        told = (
            f"fullest rank: {ranks['measured']:.3f} times the mean load, {ranks['planned']:.3f} was"
            " planned"
        )
        lines += fold(
            f"{told} (cost.expert_imbalance; orch calibrate --from RUN learns it)", style.width, 2
        )
    worst = min(numbers, key=lambda layer: numbers[layer]["balance"]["last"])
    lines += [
        "",
        style.paint(
            f"tokens by expert over steps, layer {worst}: full height is twice the mean", GRAY
        ),
    ]
    return "\n".join(lines + _picture(loads[int(worst)], style))


def _picture(steps: list[tuple[int, ExpertLoad]], style: Style) -> list[str]:
    """A line a step, a character an expert, or several neighbours where the line is too short."""
    count = min(_STEPS, len(steps))
    shown = [steps[round(at * (len(steps) - 1) / max(1, count - 1))] for at in range(count)]
    ramp = _HEIGHTS if style.unicode else _LETTERS
    lines = []
    for step, load in shown:
        each = -(-len(load.tokens) // max(8, style.width - 24))
        runs = [load.tokens[at : at + each] for at in range(0, len(load.tokens), each)]
        mean = sum(load.tokens) / len(load.tokens) or 1.0
        cells = (min(1.0, sum(run) / len(run) / mean / 2) for run in runs)
        drawn = "".join(
            ramp[min(len(ramp) - 1, -(-round(cell * 1000) * (len(ramp) - 1) // 1000))]
            for cell in cells
        )
        lines.append(f"step {step:<8} |{drawn}| {three(load.ratio)}x")
    return lines
