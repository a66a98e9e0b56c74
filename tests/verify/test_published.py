"""docs/parity.md is of this matrix, and no cell in it differs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from orchestrator.verify import matrix

PAGE = Path(__file__).resolve().parents[2] / "docs" / "parity.md"


def rows() -> list[list[str]]:
    lines = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and "fp64 loss" not in line
    ]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_cell_of_the_matrix_is_published_once():
    planned_layouts = Counter()
    for entry in matrix.full():
        layout = (
            " + ".join(technique.name for technique in entry.techniques)
            or "one process, our engine"
        )
        planned_layouts[layout] += 1
    assert Counter(row[0] for row in rows()) == planned_layouts, "run `make verify` again"


def test_every_cell_is_equal_or_refused_for_a_reason():
    for row in rows():
        verdict = row[-1]
        assert verdict == "equal" or verdict.startswith("refused: "), row
        refused = {technique_name for pair in matrix.REFUSED for technique_name in pair}
        techniques = {technique.split(" hybrid")[0] for technique in row[0].split(" + ")}
        assert verdict == "equal" or techniques & refused, row
