"""`python docs/make_techniques.py` writes docs/techniques.md: the techniques of the papers, from
the list in `technique_rows.py`, with what docs/parity.md and docs/accuracy.md have measured of each.
`make_reference.py` writes the page too.

tests/docs/test_techniques.py fails when the page is not what this writes, or a row is not true.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
PAGE = HERE / "techniques.md"
NOTE = "<!-- written by docs/make_techniques.py from docs/technique_rows.py -->\n"

if TYPE_CHECKING:
    from technique_rows import Technique

    Papers = dict[str, tuple[str, tuple[Technique, ...]]]


# ------------------------------------------------------------------------------------------------
#     what was measured


class Cell(NamedTuple):
    """A row of docs/parity.md."""

    layout: str
    error: float  # the largest of the four in float64
    verdict: str


def parity() -> list[Cell]:
    """Every row of docs/parity.md."""
    cells = []
    for line in (HERE / "parity.md").read_text().splitlines():
        columns = [column.strip() for column in line.strip("|").split(" | ")]
        if not line.startswith("| ") or columns[0] == "layout":
            continue
        errors = [float(column) for column in columns[7:11] if column]
        cells.append(Cell(columns[0], max(errors, default=0.0), columns[-1]))
    return cells


def cells_with(name: str, cells: list[Cell]) -> list[Cell]:
    """The cells of a layout, and those that combine it with others. Empty if the layout has no cell
    of its own."""
    if not any(cell.layout == name for cell in cells):
        return []
    return [cell for cell in cells if name == cell.layout or name in cell.layout.split(" + ")]


class Stage(NamedTuple):
    """A row of the table of memory in docs/accuracy.md: a pipeline stage of a layout."""

    states: str  # bytes
    states_planned: str  # "equal"
    activations: str  # bytes
    activations_planned: str  # the plan's difference, in per cent


def memory() -> dict[str, list[Stage]]:
    """Layout -> its stages."""
    text = (HERE / "accuracy.md").read_text()
    _, head, rest = text.partition("layout                       stage      states")
    if not head:
        raise ValueError("docs/accuracy.md has no table of memory")
    stages: dict[str, list[Stage]] = {}
    for line in rest.partition("```")[0].splitlines()[1:]:
        layout, *columns = line.rsplit(maxsplit=5)
        stages.setdefault(layout, []).append(Stage(*columns[1:]))
    return stages


def named(path: str, name: str) -> Any:
    """The value of a key of a JSON file, at any depth. Raises KeyError."""

    def values(node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            yield from [node[name]] if name in node else []
            node = list(node.values())
        if isinstance(node, list):
            for value in node:
                yield from values(value)

    for value in values(json.loads((ROOT / path).read_text())):
        return value
    raise KeyError(f"{path} has no {name!r}")


# ------------------------------------------------------------------------------------------------
#     the page


def page(papers: Papers) -> str:
    """The whole page, from the list of techniques by paper."""
    cells = parity()
    stages = memory()
    lines = [NOTE, "# Techniques of the papers", "", HEAD]
    for title, (column, rows) in papers.items():
        lines += [
            f"## {title}",
            "",
            f"| technique | {column} | on the command line | equal to one process"
            " | planned and measured | price | pages |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_row(row, cells, stages) for row in rows]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(row: Technique, cells: list[Cell], stages: dict[str, list[Stage]]) -> str:
    pages = ", ".join(f"[{_label(page)}]({page})" for page in row.pages)
    if row.reason:
        refused = f"; refused: {_words(row)}" if row.words else ""
        columns = ["**not there**", row.reason + refused, "", ""]
    else:
        columns = [_words(row), _equality(row, cells), _bytes(row, stages), _price(row)]
    columns = [row.name, row.section, *columns, pages]
    return f"| {' | '.join(column.replace('|', chr(92) + '|') for column in columns)} |"


def _label(page: str) -> str:
    """The page's name and the beginning of its heading."""
    path, _, anchor = page.partition("#")
    name = path.removesuffix(".md")
    for line in (HERE / path).read_text().splitlines():
        heading = line.lstrip("#").strip()
        slug = re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-")
        if anchor and line.startswith("#") and slug == anchor:
            return f"{name}: {heading.partition(':')[0]}"
    return name


def _words(row: Technique) -> str:
    beside = f"`{row.beside}`"
    if not row.words:
        return f"always on, as in {beside}"
    return f"`{row.words}`" + (f" with {beside}" if row.beside else "")


def _equality(row: Technique, cells: list[Cell]) -> str:
    shown = [_cell(name, cells_with(name, cells)) for name in row.cells]
    if row.verify:
        shown.append(f"`orch verify {row.verify}`")
    shown += [_evidence(name) for name in row.shown_by]
    return "; ".join(shown) + (f". {row.note}" if row.note else "")


def _cell(name: str, cells: list[Cell]) -> str:
    if not cells:
        return f"`{name}` (awaits `make verify`)"
    equal = [cell for cell in cells if cell.verdict == "equal"]
    refused = len(cells) - len(equal)
    error = max(cell.error for cell in equal)
    counted = f"{len(equal)} cell{'s' if len(equal) > 1 else ''}, {error:.0e}"
    return f"`{name}` ({counted}{f', {refused} refused' if refused else ''})"


def _bytes(row: Technique, stages: dict[str, list[Stage]]) -> str:
    shown = [_memory(name, stages[name]) for name in row.memory if name in stages]
    further = [name for name in row.memory if name not in stages]
    for fact, names in (("held", further), ("sent", row.sent)):
        if names:
            shown.append(f"{fact} as planned: " + ", ".join(f"`{name}`" for name in names))
    return "; ".join([*shown, *map(_evidence, row.measured)])


def _memory(name: str, stages: list[Stage]) -> str:
    """The bytes of each stage."""
    states = " / ".join(stage.states for stage in stages)
    activations = " / ".join(
        f"{stage.activations} (plan {stage.activations_planned})" for stage in stages
    )
    equal = {stage.states_planned for stage in stages} == {"equal"}
    planned = "as planned" if equal else "NOT AS PLANNED"
    return f"`{name}`: states {states} {planned}, activations {activations}"


def _evidence(place: str) -> str:
    """A test or a result, with what it holds of planned and measured bytes."""
    path, _, name = place.partition("::")
    if path.endswith(".py"):
        return f"`{place}`"
    total = named(path, name)
    total = total.get("total") if isinstance(total, dict) else None
    shown = f'`{path}`, "{name}"'
    if total:
        shown += f": {total['measured']:,} of {total['planned']:,} planned"
    return shown


def _price(row: Technique) -> str:
    from orchestrator.planner.explain import WORDS

    return "; ".join(WORDS[term] for term in row.price)


HEAD = (
    textwrap.dedent(
        """
    What ZeRO, ZeRO-Offload, ZeRO-Infinity and the Ultra-Scale Playbook (Hugging Face, 2025) describe, and where each
    technique is here. What is not there says so, with the reason. A test holds every row against the code: its words
    give a plan that the bundled trainer runs (or are refused, where the row says so), its cells are equal, its tests,
    results and pages exist.

    - **On the command line**: words of `orch plan`, `orch verify` and `orch submit`; after "with", further words that
      they require, or an example.
    - **Equal to one process**: layouts of [parity.md](parity.md) with the number of cells that contain them, all equal,
      and the largest error of these in float64 (the limit is 1e-10). A layout that "awaits `make verify`" is in the
      matrix, but not yet on that page. `orch verify` with words is a comparison outside the matrix. Tests and results
      show the same numbers in another way.
    - **Planned and measured**: for a layout with numbers, the bytes of a rank's parameters, gradients and optimizer
      state, on the device and on the host, which equal the plan's, and those of its activations, with the plan's difference; one number per pipeline
      stage ([the model and the method](accuracy.md#memory-against-the-trainers-own)). "Held as planned" are further
      layouts of the same test, `tests/trainer/test_planned_memory.py`, without numbers on a page. "Sent as planned" are
      layouts in which the bytes that ranks send, by axis, equal the plan's (`tests/trainer/test_planned_bytes.py`).
      Tests and results compare more.
    - **Price**: the lines of `orch plan --explain` in which the technique's time is.
    """
    ).strip()
    + "\n"
)


def main() -> None:
    from technique_rows import PAPERS

    PAGE.write_text(page(PAPERS))


if __name__ == "__main__":
    main()
