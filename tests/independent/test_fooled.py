"""The independent oracle catches seeded bugs of the loop, among them those that the trainer's own
tests let live."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.plan import seal

from . import cases
from .balance_mutations import MUTATIONS as OF_BALANCE
from .expert_mutations import MUTATIONS as OF_EXPERTS
from .mutations import MUTATIONS, Mutation, live
from .runs import judged, reasons, verdict

pytestmark = pytest.mark.process


def marked(bug: Mutation):
    return pytest.param(bug, id=bug.name, marks=[] if bug.first else [pytest.mark.full])


@pytest.mark.parametrize("bug", [marked(bug) for bug in MUTATIONS + OF_EXPERTS + OF_BALANCE])
def test_a_seeded_bug_is_caught(bug: Mutation, tmp_path, monkeypatch):
    bug.patch(monkeypatch)
    judgement = verdict(bug.layouts, bug.precision, tmp_path, bug.number)
    assert judgement.word == "DIFFERENT", judgement
    assert any(bug.by in reason for reason in reasons(judgement)), reasons(judgement)


@pytest.mark.parametrize("layouts", [("dp4_zero3", "tp2_pp2"), ("cp2_dp2", "pp2_zero1")])
@pytest.mark.parametrize("precision", cases.PRECISIONS)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.full
def test_it_passes_what_is_right(layouts, precision, number, tmp_path):
    judgement = verdict(layouts, precision, tmp_path, number)
    assert judgement.word == "equal", (judgement.failed, reasons(judgement))
    assert judgement.steps == 9 and set(judgement.worst) >= {
        "loss",
        "gradient",
        "norm",
        "clipping",
        "second moment",
        "weight",
    }


@pytest.mark.full
def test_a_gradient_that_is_rounded_by_little_by_luck_is_no_measure(tmp_path):
    """Here the oracle's own rounding of one layer's norm is a third of that of the other layers."""
    judgement = verdict(("dp1", "dp1"), "bf16", tmp_path, 3)
    assert judgement.word == "equal", (judgement.failed, reasons(judgement))


def slow_to_save(home) -> cases.Case:
    """Small batches of a wide vocabulary: a step takes less time than its state takes to the
    disk."""
    cases.write_corpus(home / "text")
    case = cases.make(
        "wide",
        ("dp1", "dp1"),
        "fp32",
        0,
        home,
        overrides=["model=tiny", "model.vocab=12000"],
        own_model=True,
    )
    plans = []
    for plan in case.plans:
        train = structs.replace(plan.job.train, batch_ramp=None)
        par = structs.replace(
            plan.parallel,
            micro_batch_size=1,
            micro_batches=1,
            accumulation=1,
            global_batch_samples=1,
        )
        plan = structs.replace(plan, parallel=par, job=structs.replace(plan.job, train=train))
        plans.append(seal(plan))
    return case._replace(plans=tuple(plans))


@pytest.mark.full
@pytest.mark.parametrize("bug", [False, True], ids=["copies", "live tensors"])
def test_a_background_save_of_live_tensors_is_caught(bug, tmp_path, monkeypatch):
    if bug:
        live(monkeypatch)
    judgement = judged(slow_to_save(tmp_path), tmp_path)
    if not bug:
        assert judgement.word == "equal", (judgement.failed, reasons(judgement))
    else:
        # another step's state was saved, or a file that changed while it was hashed was refused and
        # is not there
        assert judgement.word == "DIFFERENT" or "was not saved" in judgement.failed, judgement
