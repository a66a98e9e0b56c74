"""The ledger: each sample once, and whatever breaks that is named."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.observe.goodput.ledger import ledger, uneven
from orchestrator.observe.timeline import Step, StepFollower
from orchestrator.run.folder import RunFolder

BATCH = 12


def walk(seed: int, lives: int) -> list[Step]:
    """Lives that each go on from some step that is done already, as after faults."""
    draw = random.Random(seed)
    done = 0
    steps = []
    for epoch in range(lives):
        done = draw.randint(max(0, done - 4), done)
        for _ in range(draw.randint(0, 6)):
            done += 1
            steps.append(Step(epoch, done, 0.0, 0.1, 0.0, done * BATCH))
    return steps


@given(st.integers(0, 10**6), st.integers(1, 12), st.randoms())
def test_a_run_that_loses_nothing_has_each_sample_once(seed, lives, order):
    steps = walk(seed, lives)
    order.shuffle(steps)
    run_ledger = ledger(steps)
    assert run_ledger.problems == [] and uneven(run_ledger.entries, BATCH) == []
    sample_indices = [
        index for entry in run_ledger.entries for index in range(entry.first, entry.last)
    ]
    assert sample_indices == list(range(run_ledger.samples))
    assert [entry.step for entry in run_ledger.entries] == list(
        range(1, len(run_ledger.entries) + 1)
    )
    assert len(run_ledger.entries) + run_ledger.undone == len(steps)


@given(st.integers(0, 10**6), st.sampled_from(["skip", "repeat", "shrink"]))
def test_samples_that_are_skipped_repeated_or_lost_with_a_node_are_found(seed, fault):
    steps = walk(seed, 6)
    last = max((step.epoch for step in steps), default=0)
    at = ledger(steps).samples // BATCH
    samples = {
        "skip": (at + 2) * BATCH,
        "repeat": max(0, at) * BATCH,
        "shrink": at * BATCH + BATCH // 2,
    }[fault]
    run_ledger = ledger([*steps, Step(last + 1, at + 1, 0.0, 0.1, 0.0, samples)])
    assert run_ledger.problems or uneven(run_ledger.entries, BATCH), fault


def test_a_life_that_begins_beyond_what_was_done_is_named():
    steps = [Step(0, 1, 0, 0.1, 0, 4), Step(0, 2, 0, 0.1, 0, 8), Step(1, 5, 0, 0.1, 0, 20)]
    assert ledger(steps).problems == [
        "epoch 1 begins with step 5, and step 2 is the last known before"
    ]


def test_a_report_that_was_lost_is_no_sample_that_was():
    steps = [Step(0, n, 0, 0.1, 0, n * 4) for n in (1, 2, 4, 5)]
    run_ledger = ledger(steps)
    assert (
        run_ledger.problems == []
        and run_ledger.samples == 20
        and uneven(run_ledger.entries, 4) == []
    )


def test_steps_that_rank_0_could_not_report_any_more_are_known_from_others(tmp_path):
    """Found by a soak: an agent was killed with its worker's last reports unread; that worker had
    saved by then."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    line = '{{"at":{at},"kind":"step","rank":{rank},"epoch":{epoch},"step":{step},"step_s":0.1,"samples":{samples}}}\n'
    reported_steps = {
        "a": [(0, 0, 1), (0, 0, 2)],
        "b": [(1, 0, 1), (1, 0, 2), (1, 0, 3), (1, 0, 4), (0, 1, 4), (0, 1, 5)],
    }
    for node, steps in reported_steps.items():
        report_lines = [
            line.format(at=n, rank=r, epoch=e, step=s, samples=4 * s)
            for n, (r, e, s) in enumerate(steps)
        ]
        folder.metrics(node).write_text("".join(report_lines))
    run_ledger = ledger(StepFollower(folder).read(["a", "b"]))
    assert run_ledger.problems == [] and run_ledger.samples == 20 and run_ledger.undone == 1
    assert ledger(StepFollower(folder).read(["a"])).samples == 8
