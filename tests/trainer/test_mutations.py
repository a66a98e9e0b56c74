"""Does verify see a bug? Dozens of seeded ones, each on the smallest layout that shows it; every
one must be caught."""

from __future__ import annotations

import pytest

from orchestrator.plan.parity import Cell, Verdict
from tests.beds.plans import make_plan
from tests.mutations import pieces
from tests.mutations.data import DATA
from tests.mutations.experts import EXPERTS
from tests.mutations.model import MODEL
from tests.mutations.pieces import PIECES
from tests.mutations.pipeline import PIPELINE
from tests.mutations.precision import PRECISION
from tests.mutations.prediction import PREDICTION
from trainer.verify.judge import judge
from trainer.verify.ranks import RankError

MUTATIONS = [*DATA, *MODEL, *PIPELINE, *EXPERTS, *PREDICTION, *PRECISION]


def cell_of(layout: dict, name: str = "cell") -> Cell:
    options = dict(layout)
    cell_options = {
        key: options.pop(key) for key in ("packed", "empty", "cell_precision") if key in options
    }
    return Cell(
        name=name,
        packed=cell_options.get("packed", False),
        empty=cell_options.get("empty", False),
        precision=cell_options.get("cell_precision", ""),
        plan=make_plan(**options),
    )


def verdicts(cells: list[Cell], together: int = 1) -> list[Verdict]:
    return list(judge(cells, ["fp64"], together))


#: The field's recurring bugs: always here.
ALWAYS = (
    "stale bucket",
    "sequence parallel: norm weights",
    "wrong ring order",
    "the last micro-batch is dropped",
    "mean of means over micro-batches",
)
#: `make test` takes those and every second one, so some of every kind.
CASES = [
    pytest.param(
        case, marks=[pytest.mark.full] if at % 2 and not case.name.startswith(ALWAYS) else []
    )
    for at, case in enumerate(MUTATIONS)
]


@pytest.mark.process
@pytest.mark.parametrize("mutation", CASES, ids=[mutation.name for mutation in MUTATIONS])
def test_verify_catches(mutation, monkeypatch):
    mutation.patch(monkeypatch)
    (verdict,) = verdicts([cell_of(mutation.layout)])
    assert verdict.word == mutation.caught, verdict


@pytest.mark.process
def test_the_same_layouts_are_equal_without_a_bug():
    """Else the test above would prove nothing."""
    layouts = {repr(sorted(mutation.layout.items())): mutation for mutation in MUTATIONS}
    cells = [cell_of(mutation.layout, mutation.name) for mutation in layouts.values()]
    wrong = [verdict for verdict in verdicts(cells, together=len(cells)) if not verdict.equal]
    assert wrong == []


@pytest.mark.process
@pytest.mark.parametrize("piece", PIECES, ids=[piece.name for piece in PIECES])
def test_a_check_catches(piece, monkeypatch, tmp_path):
    """It passes without the bug, and fails with it at the statement that was written to notice
    it."""
    piece.check(tmp_path)
    piece.patch(monkeypatch)
    with pytest.raises((AssertionError, RankError)) as caught:
        piece.check(tmp_path)
    statements = [
        str(entry.statement) for entry in caught.traceback if entry.path.samefile(pieces.__file__)
    ]
    assert piece.by in (statements[-1] if caught.type is AssertionError else str(caught.value))


def test_there_are_enough_of_them():
    assert len({mutation.name for mutation in MUTATIONS}) >= 15
