"""Renders a run and lists of runs and nodes as text. Colour and width come with the
style."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from orchestrator.plan.exits import Exit, meaning
from orchestrator.run.bad_nodes import BadNode
from orchestrator.run.state import Cause, RunState
from orchestrator.style import GRAY, GREEN, RED, YELLOW, Style, seconds, si, three

if TYPE_CHECKING:  # measurements of a run, which a job that is only submitted does not have
    from orchestrator.observe.goodput.account import Account
    from orchestrator.observe.live import Live

INDENT = 12  # columns of a row's name
_MOST_NODES = 64  # that are listed
COLOUR = {
    "done": GREEN,
    "running": GREEN,
    "failed": RED,
    "stopping": YELLOW,
    "restarting": YELLOW,
    "cancelled": YELLOW,
    "stopped": YELLOW,
}


Row = tuple[str, str]  # name, content


def run_page(
    state: RunState,
    live: Live,
    style: Style,
    spent: Account | None = None,
) -> str:
    """The page of one run: its state, progress, speed, memory, goodput and faults."""
    rows = [
        *_job_rows(state, style),
        *_ending_rows(state),
        *_node_rows(state),
        *_progress_rows(state, live, style),
        *_metric_rows(state, live),
        *(_goodput_rows(state, spent, style) if spent else []),
        ("epoch", f"{state.epoch}; {state.restarts} of {state.max_restarts} restarts used"),
    ]
    lines = [style.title("Run"), *style.rows(rows, INDENT)]
    if state.nodes:
        lines += ["", style.title("Nodes"), *_nodes(state, live, style)]
    earlier = [epoch.cause for epoch in state.epochs if epoch.cause and epoch.outcome == "restart"]
    for cause in earlier[-3:]:
        lines += ["", *_cause(f"Restarted after epoch {cause.epoch}", cause, style, tail=3)]
    if state.cause:
        lines += ["", *_cause("First cause", state.cause, style, tail=12)]
    return "\n".join(lines)


def _job_rows(state: RunState, style: Style) -> list[Row]:
    summary = state.summary
    program = summary.get("model") or summary.get("program")
    default_layout = "one GPU" if "model" in summary else ""
    layout = str(summary.get("parallel") or default_layout)
    workers = f"{summary.get('world_size')} workers"
    if len(state.nodes) > 1:
        workers += f" on {len(state.nodes)} nodes"
    job = [f"{program} on {summary.get('cluster')}", layout, workers]
    rows = [("run", f"{state.backend}://{state.run_id}"), ("job", ", ".join(filter(None, job)))]
    if python := summary.get("python"):
        rows.append(("python", str(python)))
    if sweep := summary.get("sweep"):
        rows.append(("of a sweep", str(sweep)))
    rows.append(("state", style.paint(state.state, COLOUR.get(state.state), bold=True)))
    return rows


def _ending_rows(state: RunState) -> list[Row]:
    """Why the run has ended, or why it last restarted."""
    rows = []
    if state.exit_code:
        rows.append(("exit code", f"{state.exit_code} ({_meaning(state, state.exit_code)})"))
    previous_epoch = state.epochs[-2:-1]
    if state.reason and state.state != "done":
        rows.append(("reason", state.reason))
    elif previous_epoch and previous_epoch[0].cause and not state.is_final:
        rows.append(("last fault", previous_epoch[0].cause.text))
    return rows


def _node_rows(state: RunState) -> list[Row]:
    rows = []
    if state.slow and not state.is_final:
        slow = [f"{node} ({ratio:g}x its peers)" for node, ratio in state.slow.items()]
        rows.append(("slow", ", ".join(slow)))
    if state.excluded:
        excluded = [f"{node}: {reason}" for node, reason in state.excluded.items()]
        rows.append(("left out", "; ".join(excluded)))
    return rows


def _progress_rows(state: RunState, live: Live, style: Style) -> list[Row]:
    """The step that the run is at; before the first step, what its workers are doing."""
    summary = state.summary
    if live.step is not None and live.steps:
        bar = style.bar(live.step / live.steps, 30, GREEN)
        is_running = live.left_s and state.state == "running"
        left_time = f", {seconds(live.left_s or 0.0)} left" if is_running else ""
        return [("step", f"{live.step} of {live.steps} {bar}{left_time}")]
    if live.step is not None:
        cells = [str(live.step), str(summary.get("progress", ""))]
        return [("step", ", ".join(filter(None, cells)))]
    if "model" not in summary and state.state in ("running", "done"):
        reason = "the program reports none"
        if "progress" in summary:
            reason = "metrics.pattern has found no step in what is printed"
        return [("progress", f"unknown: {reason} (docs/programs.md)")]
    return [("doing", live.doing)] if live.doing and not state.is_final else []


def _metric_rows(state: RunState, live: Live) -> list[Row]:
    rows = []
    if live.loss is not None:
        numbers = [f"{live.loss:.4g}", *_known(norm=live.grad_norm, lr=live.lr)]
        rows.append(("loss", "  ".join(numbers)))
    if live.tokens_per_s:
        rows.append(("speed", speed_of(live)))
    if live.phase_s:
        phases = [f"{name} {seconds(spent)}" for name, spent in live.phase_s.items() if spent]
        rows.append(("phases", "  ".join(phases)))
    if live.saved:
        age = "" if state.is_final else f", {seconds(live.saved.age_s)} ago"
        rows.append(("saved", f"step {live.saved.step}{age}"))
    return rows


def _goodput_rows(state: RunState, spent: Account, style: Style) -> list[Row]:
    if spent.ettr is None:
        return []
    from .goodput_page import strip

    steps = sum(fault.lost_steps or 0 for fault in spent.faults)
    faults = sum(not fault.planned for fault in spent.faults)
    loss = ""
    if faults:
        loss = f"; {_count(faults, 'fault')}, {_count(steps, 'step')} recomputed"
    intervals = [
        (start - state.created_at, end - state.created_at, wall_state)
        for start, end, wall_state in spent.intervals
    ]
    cells = max(20, style.width - INDENT)
    return [
        ("goodput", f"ETTR {spent.ettr:.1%} of {seconds(spent.wall_s)}{loss}"),
        ("", strip(intervals, spent.wall_s, style, cells)),
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def speed_of(live: Live) -> str:
    rates = [f"{three(live.tokens_per_s or 0.0)} tokens/s", f"step {seconds(live.step_s or 0.0)}"]
    if live.mfu is not None:
        rates.append(f"MFU {live.mfu:.1%}")
    if live.hfu is not None and live.hfu != live.mfu:
        rates.append(f"HFU {live.hfu:.1%}")
    return "  ".join(rates)


def progress_line(state: RunState, live: Live, style: Style) -> str:
    """The line of progress that `submit --follow` shows; it fits the terminal."""
    name = style.paint(state.state, COLOUR.get(state.state))
    if live.step is None:
        return f"{name}  {live.doing or state.reason or ''}"
    is_wide = style.width >= 100
    cells = [f"step {live.step}"]
    if live.steps:
        bar = style.bar(live.step / live.steps, 20 if is_wide else 10, GREEN)
        cells = [f"step {live.step}/{live.steps}", bar]
    cells += _known(loss=live.loss)
    if live.tokens_per_s:
        cells.append(f"{three(live.tokens_per_s)} tok/s")
    if live.mfu is not None and is_wide:
        cells.append(f"MFU {live.mfu:.1%}")
    if live.left_s and is_wide:
        cells.append(f"{seconds(live.left_s)} left")
    return f"{name}  " + "  ".join(filter(None, cells))


def _meaning(state: RunState, code: int) -> str:
    """The meaning of an exit code. A run that has saved has no cause; one with a cause wants a
    restart although its save is not complete."""
    return "wants restart" if code == Exit.RESTART and state.cause else meaning(code)


def end_lines(state: RunState, style: Style) -> list[str]:
    """The lines that are printed when a run has ended."""
    ending = f"{state.state}: {state.reason}"
    if state.exit_code:
        ending += f", exit code {state.exit_code} ({_meaning(state, state.exit_code)})"
    first, *continuation = style.fold(ending, 2)
    name = style.paint(state.state, COLOUR.get(state.state), bold=True)
    lines = [name + first.removeprefix(state.state), *continuation]
    if state.cause:
        lines += _cause("First cause", state.cause, style, tail=12)
    return lines


def list_row(state: RunState, live: Live, now: float) -> tuple[str, ...]:
    """The cells of one run in `list_page`. `now`: Unix seconds."""
    summary = state.summary
    program = str(summary.get("model") or _short(summary))
    layout = str(summary.get("parallel", ""))
    job = " ".join(filter(None, (program, layout, f"on {summary.get('cluster')}")))
    if sweep := summary.get("sweep"):
        job += f", {sweep}"
    step = "-" if live.step is None else str(live.step)
    if "model" in summary or live.steps:
        step += f"/{live.steps or '?'}"
    loss = "-" if live.loss is None else three(live.loss)
    age = seconds(max(0.0, now - state.created_at))
    return state.run_id, state.state, job, step, loss, age


def _short(summary: Mapping[str, str | int]) -> str:
    """A program's command, shortened to 40 characters."""
    first, _, rest = str(summary.get("program", "")).partition(" ")
    return textwrap.shorten(f"{first.rpartition('/')[2]} {rest}", 40, placeholder="...")


def list_page(rows: list[tuple[str, ...]], style: Style) -> str:
    table = [("run", "state", "job", "step", "loss", "age"), *rows]
    widths = _widths(table)
    is_narrow = sum(widths) + 2 * len(widths) - 2 > style.width
    lines: list[str] = []
    for index, row in enumerate(table):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if index:
            cells[1] = style.paint(cells[1], COLOUR.get(row[1]))
        job_lines = []
        if is_narrow:  # the job gets its own line
            job_lines = style.fold(f"  {cells.pop(2).rstrip()}", 4)
        row_lines = ["  ".join(cells).rstrip(), *job_lines]
        if index == 0:
            row_lines = [style.paint(line, GRAY) for line in row_lines]
        lines += row_lines
    return "\n".join(lines)


def nodes_page(nodes: list[BadNode], now: float, style: Style) -> str:
    """The table of the nodes that the user's runs leave out."""
    if not nodes:
        return "no node is left out"
    table = [("node", "cluster", "left out for", "run", "why")]
    for node in nodes:
        left_s = seconds(node.until - now)
        table.append((node.node, node.cluster, left_s, node.run, node.why))
    return "\n".join(_aligned(table, style))


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _aligned(table: Sequence[Sequence[str]], style: Style) -> list[str]:
    """The rows of a table as aligned lines; the first row is its head, and long rows are folded."""
    widths = _widths(table)
    lines: list[str] = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        line = "  ".join(cells).rstrip()
        lines += style.fold(line if lines else style.paint(line, GRAY), 4)
    return lines


def _known(**values: float | None) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items() if value is not None]


def _nodes(state: RunState, live: Live, style: Style) -> list[str]:
    table: list[tuple[str, ...]] = [("node", "state", "ranks", "step", "memory", "metrics")]
    for name in list(state.nodes)[:_MOST_NODES]:
        table.append(_node_row(name, state, live))
    lines = _aligned(table, style)
    if len(state.nodes) > _MOST_NODES:
        lines.append(f"... {len(state.nodes) - _MOST_NODES} more")
    return lines


def _node_row(name: str, state: RunState, live: Live) -> tuple[str, ...]:
    from orchestrator.observe.live import NodeLive

    node = state.nodes[name]
    measured = live.nodes.get(name) or NodeLive()
    ranks = "".join(map(str, node.ranks))
    if len(node.ranks) > 1:
        ranks = f"{node.ranks[0]}-{node.ranks[-1]}"
    step = "-" if measured.step is None else str(measured.step)
    memory = "-"
    if total := measured.memory_bytes.get("total"):
        memory = si(total, "B")
    metrics = "-"
    if node.metrics and not state.is_final:
        metrics = f"http://{node.metrics}/metrics"
    return name, node.state, ranks, step, memory, metrics


def _cause(title: str, cause: Cause, style: Style, tail: int) -> list[str]:
    lines = [style.title(title), *style.fold(style.paint(cause.text, RED), 2)]
    if cause.stack:
        lines += style.fold(style.paint(f"stack: {cause.stack}", GRAY), 2)
    if cause.log:
        lines.append(style.paint(f"{cause.log}:", GRAY))
    return lines + [f"  {line}" for line in cause.tail[-tail:]]
