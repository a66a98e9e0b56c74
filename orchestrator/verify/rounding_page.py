"""The page of `orch precision --out FILE.html`: one file, a heat map of layers and linears."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from orchestrator.plan import Plan
from orchestrator.plan.rounding.measurement import LinearErrors, Measurement
from orchestrator.style import Style

from .rounding_lines import heading, proposal_lines

CSS = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0"
    " 1em;color:#222}table{border-collapse:collapse;margin:.5em 0 1.5em}"
    "td,th{padding:.15em .5em;text-align:right;font-weight:normal;font-size:13px}"
    "th{color:#666}td.wide{outline:2px solid #222}"
)
#: Errors and changes of the loss with the strongest colour.
STRONGEST = {"forward": 0.2, "input_grad": 0.2, "weight_grad": 0.2, "loss": 0.01}
TITLES = {
    "forward": "Forward product, relative error",
    "input_grad": "Gradient of the input, relative error",
    "weight_grad": "Gradient of the weight, relative error",
    "loss": "Change of the loss with this linear alone in 8 bits",
}


def page(plan: Plan, measurement: Measurement, is_proposed: Callable[[LinearErrors], bool]) -> str:
    """Returns the page. `is_proposed` tells which linears the proposal keeps wide; they have a
    frame."""
    title = html.escape(heading(plan, measurement))
    maps = "".join(
        f"<h2>{title_of_map}</h2>{_map(measurement, figure, is_proposed)}"
        for figure, title_of_map in TITLES.items()
    )
    proposal = "".join(
        f"<p>{html.escape(line)}</p>"
        for line in proposal_lines(plan, measurement, Style(width=400))
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<style>{CSS}</style><h1>{title}</h1>{proposal}{maps}</html>\n"
    )


def _map(
    measurement: Measurement,
    figure: str,
    is_proposed: Callable[[LinearErrors], bool],
) -> str:
    """Returns a table of layers and linears, coloured by a figure."""
    names = list(dict.fromkeys(linear.name for linear in measurement.linears))
    by_place = {(linear.layer, linear.name): linear for linear in measurement.linears}
    layers = sorted({linear.layer for linear in measurement.linears})
    head = "".join(f"<th>{html.escape(name)}" for name in names)
    rows = "".join(
        f"<tr><th>{layer}" + _row(measurement, figure, is_proposed, _of(by_place, layer, names))
        for layer in layers
    )
    return f"<table><tr><th>layer{head}{rows}</table>"


def _of(
    by_place: dict[tuple[int, str], LinearErrors],
    layer: int,
    names: Sequence[str],
) -> list[LinearErrors | None]:
    return [by_place.get((layer, name)) for name in names]


def _row(
    measurement: Measurement,
    figure: str,
    is_proposed: Callable[[LinearErrors], bool],
    linears: Sequence[LinearErrors | None],
) -> str:
    cells = []
    for linear in linears:
        if linear is None:
            cells.append("<td>")
            continue
        value = getattr(linear, figure)
        if figure == "loss":
            value = value / measurement.wide_loss
        frame = " class=wide" if is_proposed(linear) else ""
        shade = min(1.0, abs(value) / STRONGEST[figure])
        sign = "+" if figure == "loss" else ""
        cells.append(f"<td{frame} style='background:rgba(214,69,45,{shade:.2f})'>{value:{sign}.2%}")
    return "".join(cells)
