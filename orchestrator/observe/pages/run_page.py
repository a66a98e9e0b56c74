"""Pages for people: a request, a run, a list of runs. Pure text; colour and width come with the
style."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.plan.exits import Exit, meaning
from orchestrator.run.bad_nodes import BadNode
from orchestrator.run.left_out import describe_left_out
from orchestrator.run.request import LaunchRequest
from orchestrator.run.state import Cause, RunState
from orchestrator.style import GRAY, GREEN, RED, YELLOW, Style, fold, seconds, si, three

if TYPE_CHECKING:  # what is measured of a run: a job that is only to be submitted has nothing of it
    from orchestrator.observe.goodput.account import Account
    from orchestrator.observe.live import Live

COLOUR = {
    "done": GREEN,
    "running": GREEN,
    "failed": RED,
    "stopping": YELLOW,
    "restarting": YELLOW,
    "cancelled": YELLOW,
    "stopped": YELLOW,
}


def request_page(request: LaunchRequest, style: Style) -> str:
    """What submitting sends, for reading. The whole of it is `--dry-run --json`."""
    env = request.environment
    code = request.code
    source = {
        "git": (
            f"{code.root} at {(code.commit or 'no commit')[:12]}, tracked and uncommitted, copied"
        ),
        "folder": f"{code.root}, copied",
        "none": "as installed, nothing is copied",
    }[code.kind]
    first, *others = request.agents
    rows = [
        ("handle", request.handle),
        ("run folder", f"{request.run_dir} (0700)"),
        ("plan", request.plan_hash[:16]),
        ("code", source),
        *[("", line) for line in describe_left_out(code)],
        (
            "agents",
            f"{request.nodes}, one a node, from {first.node}"
            + (f" to {others[-1].node}" if others else ""),
        ),
        ("", shlex.join(first.argv)),
        ("workers", f"{request.summary['world_size']}, one a rank"),
        ("", shlex.join(request.worker.argv)),
        ("", f"in {request.worker.cwd}"),
        ("variables", ", ".join(env.names) or "none of this shell's"),
        *[("", f"{name}={value}") for name, value in sorted((env.defaults | env.values).items())],
        (
            "restarts",
            f"{request.policy.max_restarts} after failures; {request.policy.grace_s:g} s to save",
        ),
        ("files", ", ".join(f"{file.path} ({si(file.size, 'B')})" for file in request.files)),
    ]
    return "\n".join([style.title("Request"), *_table(rows, style)])


def run_page(state: RunState, live: Live, style: Style, spent: Account | None = None) -> str:
    """One run: where it is, how fast, what it uses, where its time went, and what went wrong."""
    s = state.summary
    what = s.get("model") or s.get("program")
    layout = str(s.get("parallel") or ("one GPU" if "model" in s else ""))
    where = ", ".join(
        filter(None, (f"{what} on {s.get('cluster')}", layout, f"{s.get('world_size')} workers"))
    )
    where += f" on {len(state.nodes)} nodes" if len(state.nodes) > 1 else ""
    head = style.paint(state.state, COLOUR.get(state.state), bold=True)
    reason = state.reason if state.reason and state.state != "done" else None
    rows: list[tuple[str, str]] = [
        ("run", f"{state.backend}://{state.run_id}"),
        ("job", where),
        ("state", head),
    ]
    if sweep := s.get("sweep"):
        rows.insert(2, ("of a sweep", str(sweep)))
    if state.exit_code:
        rows.append(("exit code", f"{state.exit_code} ({_meaning(state, state.exit_code)})"))
    if reason:
        rows.append(("reason", reason))
    elif (last := state.epochs[-2:-1]) and last[0].cause and not state.is_final:
        rows.append(("last fault", last[0].cause.text))
    if state.slow and not state.is_final:
        rows.append(
            (
                "slow",
                ", ".join(f"{node} ({ratio:g}x its peers)" for node, ratio in state.slow.items()),
            )
        )
    if state.excluded:
        rows.append(
            ("left out", "; ".join(f"{node}: {why}" for node, why in state.excluded.items()))
        )
    if live.step is not None and live.steps:
        bar = style.bar(live.step / live.steps, 30, GREEN)
        left = f", {seconds(live.left_s)} left" if live.left_s and state.state == "running" else ""
        rows.append(("step", f"{live.step} of {live.steps} {bar}{left}"))
    elif live.step is not None:
        rows.append(("step", ", ".join(filter(None, (str(live.step), str(s.get("progress", "")))))))
    elif "model" not in s and state.state in ("running", "done"):
        why = (
            "metrics.pattern has found no step in what is printed"
            if "progress" in s
            else "the program reports none"
        )
        rows.append(("progress", f"unknown: {why} (docs/programs.md)"))
    elif live.doing and not state.is_final:
        rows.append(("doing", live.doing))
    if live.loss is not None:
        rows.append(
            ("loss", "  ".join([f"{live.loss:.4g}", *_known(norm=live.grad_norm, lr=live.lr)]))
        )
    if live.tokens_per_s:
        rows.append(("speed", speed_of(live)))
    if live.phase_s:
        rows.append(
            (
                "phases",
                "  ".join(
                    f"{name} {seconds(value)}" for name, value in live.phase_s.items() if value
                ),
            )
        )
    if live.saved:
        age = f", {seconds(live.saved.age_s)} ago" if not state.is_final else ""
        rows.append(("saved", f"step {live.saved.step}{age}"))
    if spent and spent.ettr is not None:
        lost = sum(fault.lost_steps or 0 for fault in spent.faults)
        faults = sum(not fault.planned for fault in spent.faults)
        many = (
            f"; {faults} fault{'s' * (faults != 1)}, {lost} step{'s' * (lost != 1)} done again"
            if faults
            else ""
        )
        rows.append(("goodput", f"ETTR {spent.ettr:.1%} of {seconds(spent.wall_s)}{many}"))
        from .goodput_page import strip

        since = [
            (start - state.created_at, end - state.created_at, what)
            for start, end, what in spent.intervals
        ]
        rows.append(("", strip(since, spent.wall_s, style, max(20, style.width - 12))))
    rows.append(("epoch", f"{state.epoch}; {state.restarts} of {state.max_restarts} restarts used"))
    lines = [style.title("Run"), *_table(rows, style)]
    if state.nodes:
        lines += ["", style.title("Nodes"), *_nodes(state, live, style)]
    earlier = [epoch.cause for epoch in state.epochs if epoch.cause and epoch.outcome == "restart"]
    for cause in earlier[-3:]:
        lines += ["", *_cause(f"Restarted after epoch {cause.epoch}", cause, style, tail=3)]
    if state.cause:
        lines += ["", *_cause("First cause", state.cause, style, tail=12)]
    return "\n".join(lines)


def speed_of(live: Live) -> str:
    parts = [f"{three(live.tokens_per_s or 0.0)} tokens/s", f"step {seconds(live.step_s or 0.0)}"]
    if live.mfu is not None:
        parts.append(f"MFU {live.mfu:.1%}")
    if live.hfu is not None and live.hfu != live.mfu:
        parts.append(f"HFU {live.hfu:.1%}")
    return "  ".join(parts)


def progress_line(state: RunState, live: Live, style: Style) -> str:
    """One line that fits the terminal: what `submit --follow` shows."""
    name = style.paint(state.state, COLOUR.get(state.state))
    if live.step is None:
        return f"{name}  {live.doing or state.reason or ''}"
    width = 20 if style.width >= 100 else 10
    bar = style.bar(live.step / live.steps, width, GREEN) if live.steps else ""
    parts = [
        f"step {live.step}/{live.steps}" if live.steps else f"step {live.step}",
        bar,
        *_known(loss=live.loss),
    ]
    if live.tokens_per_s:
        parts.append(f"{three(live.tokens_per_s)} tok/s")
    if live.mfu is not None and style.width >= 100:
        parts.append(f"MFU {live.mfu:.1%}")
    if live.left_s and style.width >= 100:
        parts.append(f"{seconds(live.left_s)} left")
    return f"{name}  " + "  ".join(filter(None, parts))


def _meaning(state: RunState, code: int) -> str:
    """Of an exit code. A run that has saved has no cause: one with a cause wants a restart without
    a whole save."""
    return "wants restart" if code == Exit.RESTART and state.cause else meaning(code)


def end_lines(state: RunState, style: Style) -> list[str]:
    """What is said when a run has ended."""
    code = (
        f", exit code {state.exit_code} ({_meaning(state, state.exit_code)})"
        if state.exit_code
        else ""
    )
    first, *more = fold(f"{state.state}: {state.reason}{code}", style.width, 2)
    lines = [
        style.paint(state.state, COLOUR.get(state.state), bold=True)
        + first.removeprefix(state.state),
        *more,
    ]
    return lines + (_cause("First cause", state.cause, style, tail=12) if state.cause else [])


def list_row(state: RunState, live: Live, now: float) -> tuple[str, ...]:
    """One run of `list_page`. `now`: Unix seconds."""
    s = state.summary
    job = " ".join(
        filter(
            None,
            (
                str(s.get("model") or _short(s)),
                str(s.get("parallel", "")),
                f"on {s.get('cluster')}",
            ),
        )
    )
    job += f", {sweep}" if (sweep := state.summary.get("sweep")) else ""
    total = f"/{live.steps or '?'}" if "model" in state.summary or live.steps else ""
    step = f"{live.step if live.step is not None else '-'}{total}"
    loss = three(live.loss) if live.loss is not None else "-"
    return state.run_id, state.state, job, step, loss, seconds(max(0.0, now - state.created_at))


def _short(summary: Mapping[str, str | int]) -> str:
    """A program's command in a few words."""
    first, _, rest = str(summary.get("program", "")).partition(" ")
    return textwrap.shorten(f"{first.rpartition('/')[2]} {rest}", 40, placeholder="...")


def list_page(rows: list[tuple[str, ...]], style: Style) -> str:
    table = [("run", "state", "job", "step", "loss", "age"), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    narrow = sum(widths) + 2 * len(widths) - 2 > style.width  # what it runs gets a line of its own
    lines = []
    for index, row in enumerate(table):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        if index:
            cells[1] = style.paint(cells[1], COLOUR.get(row[1]))
        below = fold(f"  {cells.pop(2).rstrip()}", style.width, 4) if narrow else []
        text = ["  ".join(cells).rstrip(), *below]
        lines += [style.paint(line, GRAY) for line in text] if index == 0 else text
    return "\n".join(lines)


def nodes_page(nodes: list[BadNode], now: float, style: Style) -> str:
    """What the user's node memory holds."""
    if not nodes:
        return "no node is left out"
    table = [("node", "cluster", "left out for", "run", "why")]
    table += [(one.node, one.cluster, seconds(one.until - now), one.run, one.why) for one in nodes]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    return "\n".join([style.paint(lines[0], GRAY), *lines[1:]])


def _known(**values: float | None) -> list[str]:
    return [f"{name} {value:.4g}" for name, value in values.items() if value is not None]


def _nodes(state: RunState, live: Live, style: Style) -> list[str]:
    from orchestrator.observe.live import NodeLive

    table = [("node", "state", "ranks", "step", "memory", "metrics")]
    for name, node in list(state.nodes.items())[:64]:
        now = live.nodes.get(name) or NodeLive()
        total = now.memory_bytes.get("total")
        metrics = f"http://{node.metrics}/metrics" if node.metrics and not state.is_final else "-"
        ranks = (
            f"{node.ranks[0]}-{node.ranks[-1]}"
            if len(node.ranks) > 1
            else "".join(map(str, node.ranks))
        )
        step = "-" if now.step is None else str(now.step)
        table.append((name, node.state, ranks, step, si(total, "B") if total else "-", metrics))
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table
    ]
    more = [f"... {len(state.nodes) - 64} more"] if len(state.nodes) > 64 else []
    return [style.paint(lines[0], GRAY), *lines[1:], *more]


def _cause(title: str, cause: Cause, style: Style, tail: int) -> list[str]:
    lines = [style.title(title), style.paint(cause.text, RED)]
    if cause.stack:
        lines.append(style.paint(f"where it stood: {cause.stack}", GRAY))
    if cause.log:
        lines.append(style.paint(f"{cause.log}:", GRAY))
    return lines + [f"  {line}" for line in cause.tail[-tail:]]


def _table(rows: list[tuple[str, str]], style: Style) -> list[str]:
    lines = []
    for name, text in rows:
        indent = " " * 12
        first, *rest = textwrap.wrap(
            text, max(30, style.width - 12), break_on_hyphens=False, break_long_words=False
        ) or [""]
        lines.append(f"{style.paint(f'{name:<11}', GRAY)} {first}")
        lines += [indent + line for line in rest]
    return lines
