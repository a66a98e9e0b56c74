"""Renders the report of a run as a page: planned and measured numbers, and the formula of each
ratio.

`render` takes the report of `orchestrator.observe.report.make_report`. Pure text; colour and width
come with the style.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.observe.colours import CATEGORY, COMPUTE
from orchestrator.observe.expert_loads import Loads
from orchestrator.observe.rank_trace import Timeline
from orchestrator.plan import Plan
from orchestrator.plan.flops import (
    attention_core_flops,
    hardware_flops_per_token,
    model_flops_per_token,
)
from orchestrator.style import (
    GRAY,
    YELLOW,
    Style,
    binary,
    percent,
    seconds,
    si,
    three,
)

from . import expert_page
from .goodput_page import goodput
from .plan_page import CATEGORIES

Pair = Mapping[
    str, float | None
]  # "planned" and "measured"; of some also "low", "high", "inside", "z"


def render(
    report: dict[str, Any],
    plan: Plan,
    style: Style,
    timeline: Timeline | None = None,
    loads: Loads | None = None,
) -> str:
    """The page, without a final newline. `timeline`: that of a rank's first steps, if recorded;
    `loads`: those of the experts, if steps were sampled."""
    sections = [_run(report, style), goodput(report, style)]
    if report["step_s"]["measured"] is not None or not plan.program:
        sections.append(_speed(report, style))
    if report["memory"]:
        sections.append(_memory(report["memory"], style))
    if timeline is not None and timeline.steps:
        sections.append(_first_steps(timeline, style))
    if plan.program:
        return "\n\n".join(sections)
    if plan.parallel.world_size > 1:
        sections.append(_communication(report, style))
    if loads:
        sections.append(expert_page.render(plan, loads, style))
    sections.append(_formulas(report, plan, style))
    return "\n\n".join(sections)


def _run(report: dict[str, Any], style: Style) -> str:
    steps = report["steps"]
    loss = report["loss"]
    replayed = f", {steps['replayed']} recomputed after a restart" if steps["replayed"] else ""
    rows = [
        (
            "run",
            f"{report['run_id']}: {report['state']}"
            + (f", {report['reason']}" if report["reason"] else ""),
        ),
        ("plan", report["plan_hash"][:16]),
        ("steps", _steps(steps) + replayed),
    ]
    if report["wall_s"] is not None:
        epochs = len(report["epochs"])
        rows.append(
            ("wall time", f"{seconds(report['wall_s'])} in {epochs} epoch{'s' * (epochs > 1)}")
        )
    if loss["last"] is not None:
        rows.append(("loss", f"{loss['first']:.4f} at first, {loss['last']:.4f} at last"))
    return "\n".join(
        [
            style.title("Report"),
            *style.rows(rows, 11),
        ]
    )


def _steps(steps: Mapping[str, Any]) -> str:
    if steps["planned"] is not None:
        return f"{steps['completed']} of {steps['planned']}, {si(steps['tokens'])} tokens"
    return (
        f"{steps['completed']}, {si(steps['tokens'])} tokens"
        if steps["completed"]
        else "none reported"
    )


def _speed(report: dict[str, Any], style: Style) -> str:
    step = report["step_s"]
    rows = [
        ("step", step, seconds),
        ("tokens/s per GPU", report["tokens_per_s_per_gpu"], three),
        ("MFU", report["mfu"], _share),
        ("HFU", report["hfu"], _share),
        ("pipeline bubble", report["bubble_ratio"], _share),
    ]
    lines = [style.title("Speed: median of the steady steps"), _head(style)]
    lines += [_row(name, pair, show) for name, pair, show in rows]
    lines += _verdict(step, seconds, style)
    if step["p95"] is not None:
        lines.append(f"{'step, 95th percentile':<22}{'':>14}{seconds(step['p95']):>14}")
    spent = [(name, value) for name, value in step["phases"].items() if value]
    if spent:
        longest = max(value for _, value in spent)
        lines += ["", style.paint("phases of the first rank", GRAY)]
        lines += [
            f"{name:<22}{seconds(value):>14}  {style.bar(value / longest, 30, COMPUTE)}"
            for name, value in spent
        ]
    return "\n".join(lines)


def _memory(memory: Mapping[str, Pair], style: Style) -> str:
    lines = [style.title("Memory at a step's peak: the most of any rank"), _head(style)]
    lines += [_row(name, pair, binary) for name, pair in memory.items()]
    return "\n".join(lines + _verdict(memory["total"], binary, style))


def _verdict(
    pair: Mapping[str, Any],
    show: Callable[[float], str],
    style: Style,
) -> list[str]:
    """States whether a measurement lies in its prediction's interval, and the causes of the
    difference."""
    if pair.get("inside") is None:
        return []
    position = "inside" if pair["inside"] else style.paint("outside", YELLOW, bold=True)
    interval = f"{show(pair['low'])} to {show(pair['high'])}"
    lines = style.fold(f"{position} the interval of the prediction, {interval}", 2)
    for cause in pair.get("drift", []):
        lines += style.fold(f"  {cause}", 4)
    return lines


def _first_steps(timeline: Timeline, style: Style) -> str:
    """The peak of each recorded step by category, drawn relative to the largest peak."""
    peaks = [(step, timeline.peak(step)) for step in timeline.steps]
    largest = max(sum(peak.values()) for _, peak in peaks) or 1
    cells = max(10, style.width - 40)
    lines = [style.title(f"First steps of rank {timeline.rank}: memory at the peak")]
    for step, peak in peaks:
        bar = "".join(
            style.paint(
                (name[0].upper() if not style.colour else "█")
                * round(peak[name] / largest * cells),
                code,
            )
            for name, code in ((name, CATEGORY[name]) for name in CATEGORIES if name in peak)
        )
        total = sum(peak.values())
        lines.append(f"{step.name:<8}{seconds(step.end - step.start):>9}{binary(total):>10}  {bar}")
    legend = "  ".join(style.paint(name, CATEGORY[name]) for name in CATEGORIES)
    return "\n".join([*lines, f"{style.paint('of', GRAY)} {legend}"])


def _communication(report: dict[str, Any], style: Style) -> str:
    lines = [
        style.title("Communication of a step: bytes that the busiest rank sends"),
        _head(style),
    ]
    used = [
        (axis, pair) for axis, pair in report["comm_bytes_per_step"].items() if any(pair.values())
    ]
    lines += [_row(axis, pair, binary) for axis, pair in used]
    waits = {axis: value for axis, value in report["comm_s_per_step"]["measured"].items() if value}
    if waits:
        waited = ", ".join(f"{axis} {seconds(value)}" for axis, value in waits.items())
        lines += style.fold(f"waited for, in the median step: {waited}")
    if report["expert_bytes_per_step"]:
        spent = report["expert_s_per_step"]
        sent = [
            f"{level} {binary(size)}" + (f" in {seconds(spent[level])}" if level in spent else "")
            for level, size in report["expert_bytes_per_step"].items()
        ]
        lines += style.fold(f"to experts of other ranks: {', '.join(sent)}")
    return "\n".join(lines)


def formulas(report: dict[str, Any], plan: Plan) -> list[str]:
    """The formulas of MFU and HFU with the numbers of this run."""
    if plan.program:
        return []
    train = plan.job.train
    gpu = plan.cluster.gpu
    model = model_flops_per_token(plan.model, train.seq_len)
    attention = 3 * attention_core_flops(plan.model, train.seq_len)
    hardware = hardware_flops_per_token(
        plan.model,
        train.seq_len,
        train.recompute,
        recompute_layers=train.recompute_layers,
        latents=bool(train.recompute_latents),
    )
    peak_rate = f"not known in {train.precision}"
    if peak := gpu.peak_flops.get(train.precision):
        peak_rate = f"{si(peak, 'FLOP/s')} ({gpu.name}, {train.precision})"
    return [
        f"MFU = tokens/s per GPU x {si(model, 'FLOP')} per token / peak; the peak is {peak_rate}",
        (
            f"per token: 6 x {si((model - attention) / 6)} weights that multiply it, and"
            f" {si(attention, 'FLOP')} for attention scores (3 x 4 x seq_len/2 x heads x head_dim"
            " per layer: causal, so half of seq_len)"
        ),
        (
            f"HFU = the same with {si(hardware, 'FLOP')} per token: recompute {train.recompute}"
            f" repeats {si(hardware - model, 'FLOP')}"
        ),
    ]


def _formulas(report: dict[str, Any], plan: Plan, style: Style) -> str:
    lines = [style.title("How it is counted")]
    for formula in formulas(report, plan):
        lines += style.fold(formula, 2)
    return "\n".join(lines)


def _head(style: Style) -> str:
    return style.paint(f"{'':<22}{'planned':>14}{'measured':>14}{'difference':>12}", GRAY)


def _row(name: str, pair: Pair, show: Callable[[float], str]) -> str:
    planned = pair.get("planned")
    measured = pair.get("measured")
    cells = [show(value) if value is not None else "-" for value in (planned, measured)]
    apart = f"{measured / planned - 1:+.0%}" if planned and measured is not None else ""
    return f"{name:<22}{cells[0]:>14}{cells[1]:>14}{apart:>12}".rstrip()


def _share(value: float) -> str:
    return f"{value:.1%}" if value < 0.995 else percent(value)
