"""The timeline of the first steps: what the file says is what happened."""

from __future__ import annotations

import json

import pytest
import torch

from orchestrator.plan.schedules import Kind, runs_pairs, schedule_of
from orchestrator.plan.worker import trace_file
from tests.beds.plans import tiny_model
from tests.trainer.test_loop import finish, job
from trainer.metrics.memory import CATEGORIES, Point, StorageTracker, downsample

KIB = 1024


def kept(running, function) -> dict[str, int]:
    """The most bytes of each category while `function` runs."""
    with StorageTracker(running=running) as tracker:
        function()
    return {
        name: max((point.held[name] for point in tracker.points()), default=0)
        for name in CATEGORIES
    }


def test_what_outlives_its_forward_is_an_activation_and_the_rest_is_not():
    now = [(0, True)]
    alive = []

    def work():
        with torch.no_grad():  # so that autograd saves nothing
            alive.append(torch.zeros(KIB, dtype=torch.uint8))
            torch.zeros(2 * KIB, dtype=torch.uint8)
            now[0] = None
            torch.zeros(4 * KIB, dtype=torch.uint8)
            alive.clear()

    assert kept(lambda: now[0], work) == dict.fromkeys(CATEGORIES, 0) | {
        "activations": KIB,
        "buffers": 4 * KIB,
    }


def test_what_recomputation_makes_for_backward_is_an_activation():
    alive = []

    def work():
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: x, lambda x: x
        ):  # as recomputation has
            alive.append(torch.zeros(KIB, dtype=torch.uint8))
            torch.zeros(4 * KIB, dtype=torch.uint8)  # backward never sees it
        alive.clear()
        torch.zeros(2 * KIB, dtype=torch.uint8)

    held_bytes = kept(lambda: (1, False), work)
    assert (held_bytes["activations"], held_bytes["buffers"]) == (KIB, 4 * KIB)


def test_what_becomes_a_gradient_is_one_from_its_birth():
    grads: list[torch.Tensor] = []
    with StorageTracker({"grads": lambda: grads}) as tracker:
        grads.append(torch.zeros(KIB, dtype=torch.uint8))
    assert tracker.points()[-1].held["grads"] == KIB


def test_a_storage_that_is_filled_and_emptied_counts_while_it_is_full():
    weight = torch.zeros(KIB, dtype=torch.uint8)
    weight.untyped_storage().resize_(0)
    with StorageTracker() as tracker:
        for size in (KIB, 0, KIB, 0):
            weight.untyped_storage().resize_(size)
    assert [point.held["params"] for point in tracker.points()] == [KIB, 0, KIB, 0]


def test_thinning_keeps_the_peak_and_the_end():
    points = [Point(0.001 * i, {"buffers": (i * 7919) % 1000}) for i in range(5000)]
    points[1234] = Point(1.234, {"buffers": 10**6})
    few = downsample(points, 100)
    assert len(few) <= 200 and few == sorted(few, key=lambda point: point.at)
    assert points[1234] in few and few[-1] == points[-1]


# ------------------------------------------------------------------------------------------- whole
#     workers


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(plan, events of each rank, workers) of two recorded steps of three, on pp2 x dp2 with many
    buckets."""
    folder = tmp_path_factory.mktemp("run")
    plan = job(
        str(folder),
        3,
        pp=2,
        dp=2,
        micro_batches=4,
        bucket_bytes=1 << 12,
        trace_steps=2,
        model=tiny_model(),
    )
    codes, workers = finish(plan, folder / "run")
    assert codes == [0] * 4, workers.log(0)
    files = [json.loads(trace_file(folder / "run", rank).read_bytes()) for rank in range(4)]
    assert all(file["otherData"]["plan"] == plan.hash for file in files)
    return plan, [file["traceEvents"] for file in files], workers


def spans(events: list[dict], row: int) -> list[dict]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == row]


@pytest.mark.process
def test_actions_are_those_of_the_schedule_in_its_order(run):
    plan, ranks, _ = run
    schedule = schedule_of(plan.parallel)
    for rank, events in enumerate(ranks):
        actions = [
            (e["name"], e["args"]["stage"], e["args"]["micro_batch"]) for e in spans(events, 0)
        ]
        program = [
            (a.kind.name, a.stage, a.micro_batch)
            for a in schedule.orders[plan.ranks[rank].coord.pp]
        ]
        assert actions == 2 * program and Kind.F.name == program[0][0]
        assert [event["name"] for event in spans(events, 2)] == ["step 1", "step 2"]
        assert spans(events, 2)[0]["ts"] == 0, "a file's time begins with its first step"


@pytest.mark.process
def test_the_first_collective_of_a_step_starts_before_backward_ends(run):
    """Overlap is what happened, not what was meant. The first step learns how many gradients there
    are, and waits."""
    _, ranks, _ = run
    for events in ranks:
        steps = {event["name"]: event["ts"] for event in spans(events, 2)}
        backward_end = max(e["ts"] + e["dur"] for e in spans(events, 0) if e["name"] == "B")
        sums = [e for e in events if e["ph"] == "b" and e["name"].startswith("all-reduce bucket")]
        sums = [e for e in sums if e["ts"] > steps["step 2"]]
        assert [e["name"] for e in sums] == [
            f"all-reduce bucket {number}" for number in range(len(sums))
        ]
        early = [e for e in sums if e["ts"] < backward_end]
        assert len(sums) > 2 and len(early) >= len(sums) - 1, "all but the last wait for nothing"
        ends = {e["id"]: e for e in events if e["ph"] == "e"}
        assert all(ends[e["id"]]["ts"] >= e["ts"] for e in sums)
        assert {ends[e["id"]]["args"]["end"] for e in sums} == {"measured"}


@pytest.mark.process
def test_memory_over_time_ends_where_the_step_report_does(run):
    plan, ranks, workers = run
    for rank, events in enumerate(ranks):
        held = [event["args"] for event in events if event["ph"] == "C"]
        assert all(set(sample) == set(CATEGORIES) for sample in held)
        report = workers.steps(rank)[1].memory_bytes
        assert max(sum(sample.values()) for sample in held) >= report["total"]
        assert {sample["params"] for sample in held} == {report["params"]}
        assert max(sample["activations"] for sample in held) > 0
        assert held[-1]["activations"] == 0, "nothing is kept between steps"
    first, last = (
        max(e["args"]["activations"] for e in ranks[r] if e["ph"] == "C") for r in (0, 3)
    )
    assert plan.ranks[0].coord.pp == 0 and first > 0 and last > 0


@pytest.mark.process
def test_a_rank_whose_trace_fails_runs_its_steps_in_the_order_of_its_peers(tmp_path):
    """Collectives start in another order when a forward and a backward run as one: all ranks of a
    group run them so in a step, or none, whatever happens to one rank's file."""
    plan = job(
        str(tmp_path),
        3,
        pp=2,
        tp=2,
        schedule="dualpipe",
        micro_batches=8,
        trace_steps=3,
        model=tiny_model(),
    )
    trace_file(tmp_path / "run", 1).mkdir(parents=True)
    codes, workers = finish(plan, tmp_path / "run")
    assert codes == [0] * 4, workers.log(1)
    assert workers.events("trace_failed", 1) and len(workers.steps(1)) == 3
    assert runs_pairs(plan.parallel) and trace_file(tmp_path / "run", 0).is_file()
