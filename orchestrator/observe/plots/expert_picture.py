"""Draws the load of each expert over steps: one panel per layer, with steps from left to right and
experts from top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.observe.expert_loads import Loads

from .panels import MUTED, RC
from .plan_picture import matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 4
_MOST = 3.0  # load over the mean at the end of the colour scale


def figure(loads: Loads, title: str) -> Figure:
    """Draws cells that show an expert's tokens over the mean of its layer and step."""
    with matplotlib().rc_context(RC):
        from matplotlib.figure import Figure

        columns = min(_COLUMNS, len(loads))
        rows = -(-len(loads) // columns)
        result = Figure(figsize=(12, 1.2 + 2.4 * rows), layout="constrained")
        result.suptitle(
            title,
            x=0.01,
            ha="left",
            fontsize=15,
            fontweight="bold",
        )
        drawn = None
        for position, (layer, steps) in enumerate(loads.items(), start=1):
            ax = result.add_subplot(rows, columns, position)
            cells = [
                [count * len(x.tokens) / max(1, sum(x.tokens)) for count in x.tokens]
                for _, x in steps
            ]
            shape = [list(column) for column in zip(*cells, strict=True)]
            drawn = ax.imshow(
                shape,
                aspect="auto",
                vmin=0.0,
                vmax=_MOST,
                cmap="viridis",
                interpolation="nearest",
            )
            ax.set_title(f"layer {layer}")
            first_step = steps[0][0]
            last_step = steps[-1][0]
            ax.set_xticks([0, len(steps) - 1], [str(first_step), str(last_step)])
            ax.set_xlabel("step", color=MUTED)
            ax.set_ylabel("expert", color=MUTED)
        assert drawn is not None
        result.colorbar(
            drawn,
            ax=result.axes,
            label="tokens over the mean",
            extend="max",
        )
        return result
