"""The host of a GPU reads a step's numbers when the next one is enqueued: reports, messages and
states are the same."""

from __future__ import annotations

import pytest
from msgspec import structs

from orchestrator.plan import Exit
from tests.trainer.test_loop import assert_same_state, changed, finish, job, refused, saved_state
from trainer.train import LAG

pytestmark = pytest.mark.process

TIMES = {
    "step_s",
    "phase_s",
    "own_s",
    "comm_s",
    "mfu",
    "hfu",
    "bubble_ratio",
    "memory_bytes",
    "epoch",
}


def test_reading_late_changes_neither_reports_nor_states(cache, tmp_path, monkeypatch):
    """fp16, whose first steps overflow: what is skipped, the scales, losses and checkpoints,
    resumed in between."""
    plan = changed(
        job(cache, steps=8, every=3, dp=2, zero=1, precision="fp16"), "train", log_every_steps=2
    )
    records = []
    for lag in (0, 1):
        monkeypatch.setitem(LAG, "cpu", lag)
        folder = tmp_path / str(lag)
        codes, workers = finish(plan, folder)
        assert codes == [0, 0], workers.log(0)
        steps = [
            {k: v for k, v in structs.asdict(step).items() if k not in TIMES}
            for step in workers.steps(1)
        ]
        skipped = [(event.step, event.fields) for event in workers.events("step_skipped", 1)]
        records.append((steps, skipped, saved_state(folder, plan, 6), saved_state(folder, plan, 8)))
    early, late = records
    assert early[:2] == late[:2] and len(early[0]) == 8
    for before, after in zip(early[2:], late[2:], strict=True):
        assert_same_state(before, after)


def test_an_explosion_read_late_stops_the_run_at_the_same_step(cache, tmp_path, monkeypatch):
    monkeypatch.setitem(LAG, "cpu", 1)
    plan = changed(job(cache, dp=2), "optim", lr=1e38, warmup_steps=0)
    plan = changed(plan, "train", skip_non_finite_steps=1)
    says = (
        "step 3: the gradient norm is nan; the loss is not finite on rank 0, 1, whose samples are"
        " 8, 10; 9, 11 in"
    )
    refused(plan, tmp_path, Exit.USER, says)
    assert list((tmp_path / "checkpoints").glob("step-*")) == [], "what has exploded is not saved"
