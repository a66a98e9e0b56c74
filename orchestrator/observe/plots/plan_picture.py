"""Draws a plan as one picture: placement on the topology, memory against capacity, time of a step
and the pipeline's timeline.

`save(plan, path)` writes .png, .svg, .pdf or .html (one file that contains its picture). Only this
module imports matplotlib.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import OrchError, not_installed
from orchestrator.plan import Exit, Plan
from orchestrator.plan.interval import plus_minus
from orchestrator.style import seconds, si

from . import panels
from .topology_panel import Topology

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf", ".html")
CSS = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0"
    " 1em;color:#222}svg{width:100%;height:auto}"
)


def save(plan: Plan, path: Path) -> None:
    """Writes the picture. Raises OrchError for an unknown suffix (64), a missing matplotlib (65) or
    a bad path (64)."""
    ending(path)
    write(
        figure(plan),
        path,
        f"{_title(plan)}: plan {plan.hash[:12]}",
        [f"limited by {plan.time.limited_by}", *plan.warnings],
    )


def ending(path: Path, option: str = "--plot") -> str:
    """Returns the suffix of a file, which is its format. Raises OrchError (64) for an unknown
    one."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise OrchError(f"{option} {path}: the file must end in {', '.join(FORMATS)}", Exit.USAGE)
    return suffix


def write(
    drawn: Figure,
    path: Path,
    title: str,
    notes: Sequence[str],
    option: str = "--plot",
) -> None:
    """Writes the picture in the format of the file's suffix. An .html page also has the title and
    the notes."""
    kind = ending(path, option)
    data = _html(drawn, title, notes) if kind == ".html" else _image(drawn, kind[1:])
    try:
        path.write_bytes(data)
    except OSError as error:
        raise OrchError(f"{option} {path}: {error.strerror}", Exit.USAGE) from None


def figure(plan: Plan) -> Figure:
    """Draws the matplotlib figure, which needs no display."""
    with matplotlib().rc_context(panels.RC):
        from matplotlib.figure import Figure

        topology = Topology(plan)
        heights = [topology.inches, 2.6] + (
            [panels.timeline_inches(plan)] if plan.parallel.pp > 1 else []
        )
        gap = 1.05  # inches between rows: an axis label and a title
        total = sum(heights) + gap * (len(heights) - 1) + 1.9
        result = Figure(figsize=(12, total))
        spec = result.add_gridspec(
            len(heights),
            2,
            height_ratios=heights,
            width_ratios=[1.25, 1],
            hspace=gap / (sum(heights) / len(heights)),
            wspace=0.16,
            left=0.06,
            right=0.975,
            top=1 - 1.3 / total,
            bottom=0.6 / total,
        )
        result.text(
            0.06,
            1 - 0.3 / total,
            _title(plan),
            fontsize=15,
            fontweight="bold",
            va="center",
        )
        result.text(
            0.06,
            1 - 0.56 / total,
            _subtitle(plan),
            fontsize=10,
            color=panels.MUTED,
            va="center",
        )
        topology.draw(result.add_subplot(spec[0, :]))
        panels.memory(result.add_subplot(spec[1, 0]), plan)
        panels.time(result.add_subplot(spec[1, 1]), plan)
        if plan.parallel.pp > 1:
            panels.pipeline(result.add_subplot(spec[2, :]), plan)
        return result


def _title(plan: Plan) -> str:
    return f"{plan.model.name} on {plan.cluster.name}"


def _subtitle(plan: Plan) -> str:
    par = plan.parallel
    degrees = (
        "  ".join(f"{a}={getattr(par, a)}" for a in par.order if getattr(par, a) > 1) or "one GPU"
    )
    return (
        f"{degrees}  zero={par.zero}  |  {si(par.global_batch_tokens)} tokens per step  |  "
        f"predicted {seconds(plan.time.step_s)}{plus_minus(plan.time.sd)} per step,"
        f" {plan.tokens_per_s_per_gpu:,.0f} tokens/s per GPU,"
        f" MFU {plan.mfu:.1%}  |  plan {plan.hash[:12]}"
    )


def matplotlib() -> Any:
    """Imports matplotlib. Raises OrchError (65) if it is not installed."""
    try:
        import matplotlib as module
    except ImportError:
        raise not_installed("matplotlib", "--plot") from None
    return module


def _image(drawn: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Without a date and with fixed ids, the same plan gives the same bytes.
    with matplotlib().rc_context({**panels.RC, "svg.hashsalt": "orch"}):
        metadata = {
            "svg": {"Date": None},
            "png": {"Software": None},
            "pdf": {"CreationDate": None, "Producer": None},
        }
        drawn.savefig(
            buffer,
            format=kind,
            dpi=160,
            metadata=metadata[kind],
        )
    return buffer.getvalue()


def _html(drawn: Figure, title: str, notes: Sequence[str]) -> bytes:
    svg = _image(drawn, "svg").decode()
    svg = svg[svg.index("<svg") :]
    rows = "".join(f"<li>{html.escape(line)}</li>" for line in notes)
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{html.escape(title)}</title>"
    )
    return f"{page}<style>{CSS}</style><body>{svg}<ul>{rows}</ul></body></html>\n".encode()
