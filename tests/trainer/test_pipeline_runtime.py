"""The runtime itself: what it holds, what it records, what it refuses, and what it says when a peer
is gone."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from orchestrator.plan.schedules import Kind, build, peak_in_flight, read_table, simulate
from tests.beds.plans import make_plan
from tests.trainer.together import run_together, told
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.comm.timers import PhaseTimer
from trainer.errors import LayoutError, is_peer_loss
from trainer.metrics.memory import StorageTracker
from trainer.model.linear import Linear
from trainer.pipeline.runtime import Pipeline
from trainer.pipeline.transfer import MOST_SENDS
from trainer.verify.ranks import RankError, run_ranks

WIDTH = 128
SHAPE = (1, 512, 128)
UNIT = 512 * 128 * 4  # bytes of one hidden state; a weight gradient is a quarter of it


class Toy(nn.Module):
    """Two matrices: holds its input and one hidden state for backward, and makes a third for its
    output."""

    def __init__(self, seconds: float = 0.0, width: int = WIDTH):
        super().__init__()
        self.seconds = seconds
        torch.manual_seed(0)
        self.first = Linear(WIDTH, WIDTH)
        self.second = Linear(WIDTH, width)
        for param in self.parameters():
            nn.init.normal_(param, std=WIDTH**-0.5)

    def forward(self, x, batch):
        time.sleep(self.seconds)
        return self.second(self.first(torch.ones(SHAPE) if x is None else x))


def pipeline(rank, schedule, toy=Toy, gloo=True, **options):
    mesh = (
        Mesh.from_plan(make_plan(pp=schedule.pp), rank)
        if schedule.pp > 1
        else Mesh.alone(make_plan())
    )
    stages = [toy() for _ in schedule.stages_of(rank)]
    options = {"shape": SHAPE, "dtype": torch.float32} | options
    return Pipeline(
        schedule, stages, lambda out, targets: out.sum(), mesh, CommCounter(gloo=gloo), **options
    )


def batches(schedule):
    return [SimpleNamespace(targets=None)] * schedule.micro_batches


# ------------------------------------------------------------------------------------------- memory


def peaks(schedule):
    def rank_main(rank):
        pipe = pipeline(rank, schedule)
        tracker = StorageTracker()
        for param in (p for stage in pipe.stages.values() for p in stage.parameters()):
            param.grad = torch.zeros_like(param)  # so that gradients are not new storages
        with tracker:
            pipe.run(batches(schedule))
        return [tracker.peak / UNIT, tracker.live / UNIT]

    return run_ranks(rank_main, schedule.pp)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "vpp"), [("1f1b", 1), ("afab", 1), ("zb_h1", 1), ("interleaved", 2)]
)
def test_a_rank_holds_what_the_schedule_says(name, vpp):
    """Two hidden states a micro-batch in flight (split backward: and two gradients), and a few of
    the moment."""
    schedule = build(name, 3, 12, vpp)
    states_per_batch = 4 if name == "zb_h1" else 2
    for (peak, remaining), in_flight in zip(peaks(schedule), peak_in_flight(schedule), strict=True):
        assert in_flight <= peak <= states_per_batch * in_flight + MOST_SENDS + 8
        assert remaining < 0.1


@pytest.mark.process
def test_outputs_are_let_go_when_sent():
    """When the first backward begins under AFAB, the first rank keeps inputs and hidden states of
    all micro-batches, but only the latest outputs, though the graph that made them lives."""
    schedule = build("afab", 2, 12)

    def rank_main(rank):
        pipe = pipeline(rank, schedule)
        tracker = StorageTracker()
        seen = []
        take = pipe.transfers.take
        pipe.transfers.take = lambda action: [take(action), seen.append(tracker.live / UNIT)][0]
        with tracker:
            pipe.run(batches(schedule))
        return seen

    first_backward = run_ranks(rank_main, 2)[0][0]
    assert (
        24 <= first_backward <= 24 + MOST_SENDS + 3.5
    )  # three gradients are on their way; with outputs 36


# -------------------------------------------------------------------------------------------
#     transfers on a GPU


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "vpp"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipe", 1)]
)
def test_batches_as_on_a_gpu_give_the_same_gradients(name, vpp):
    """All point-to-point of a moment in one call, on one group: gradients as with single messages
    matched by tags."""
    schedule = build(name, 2, 6, vpp)

    def rank_main(rank, gloo):
        calls = []
        real = dist.batch_isend_irecv
        dist.batch_isend_irecv = lambda operations: [
            calls.append(len(operations)),
            real(operations),
        ][1]
        pipe = pipeline(rank, schedule, gloo=gloo)
        total = pipe.run(batches(schedule))
        grads = [param.grad for stage in pipe.stages.values() for param in stage.parameters()]
        return {
            "total": total,
            "grads": grads,
            "calls": calls,
            "batched": max(map(len, pipe.program)),
        }

    single, batched = ([*run_ranks(rank_main, 2, gloo)] for gloo in (True, False))
    for single_answer, batched_answer in zip(single, batched, strict=True):
        torch.testing.assert_close(batched_answer["grads"], single_answer["grads"], rtol=0, atol=0)
        assert torch.equal(single_answer["total"], batched_answer["total"])
        assert sum(single_answer["calls"]) == sum(batched_answer["calls"]) and set(
            single_answer["calls"]
        ) == {1}
        assert max(batched_answer["calls"]) == batched_answer["batched"] > 1, (
            "transfers in both directions start together"
        )


# -------------------------------------------------------------------------------------------
#     records


SIZES = [
    *[("1f1b", pp, m, 1) for pp in (2, 4) for m in (1, 3, 4, 5, 6, 7)],
    ("afab", 2, 3, 1),
    ("afab", 4, 5, 1),
    ("afab", 2, 3, 2),
    ("interleaved", 2, 6, 2),
    ("interleaved", 4, 6, 2),
    ("interleaved", 2, 3, 2),
    ("zb_h1", 2, 5, 1),
    ("zb_h1", 4, 3, 1),
    ("zb_h1", 4, 8, 1),
    ("zb_h2", 2, 5, 1),
    ("zb_h2", 4, 8, 1),
    ("zbv", 2, 2, 2),
    ("zbv", 2, 6, 2),
    ("zbv", 4, 8, 2),
    ("dualpipe", 2, 4, 1),
    ("dualpipev", 2, 6, 2),
    ("dualpipev", 4, 9, 2),
    ("dualpipev", 2, 1, 2),
]


@pytest.mark.process
@pytest.mark.parametrize("pp", [2, 4])
def test_measured_order_is_the_simulated_one_and_nothing_is_left(pp):
    """Each rank keeps the order, and between ranks every action follows its inputs, on one
    clock."""
    schedules = {str(size): build(*size) for size in SIZES if size[1] == pp}

    def rank_main(rank, schedule):
        pipe = pipeline(rank, schedule)
        pipe.run(batches(schedule))
        times = pipe.action_times.step
        spans = [
            [str(a), times.began + start, times.began + end] for a, start, end in times.spans()
        ]
        unfinished = len(pipe._saved) + len(pipe._deferred) + len(pipe.transfers._inbox)
        return {
            "spans": spans,
            "idle": times.idle_seconds(),
            "left": unfinished,
            "sent": pipe.transfers.counter.bytes["pp"],
        }

    for name, answers in run_together(
        rank_main, pp, {name: (schedule,) for name, schedule in schedules.items()}
    ).items():
        ends = {action: end for result in answers for action, _, end in result["spans"]}
        with told(name):
            for result, simulated in zip(answers, simulate(schedules[name]).spans, strict=True):
                assert [action for action, _, _ in result["spans"]] == [
                    str(span.action) for span in simulated
                ]
                for span, (_, start, _) in zip(simulated, result["spans"], strict=True):
                    assert all(
                        ends[str(source)] <= start for source in schedules[name].needs(span.action)
                    )
                assert result["idle"] > 0 == result["left"]
            if name == str(
                ("1f1b", 4, 5, 1)
            ):  # each border once forward and once backward, and nothing else travels
                assert [result["sent"] / UNIT for result in answers] == [5, 10, 10, 5]


@pytest.mark.process
def test_a_slow_stage_leaves_bubbles_on_the_others():
    schedule = build("1f1b", 2, 6)

    def rank_main(rank):
        timer = PhaseTimer()
        pipe = pipeline(rank, schedule, lambda: Toy(0.02 if rank else 0.0), timer=timer)
        pipe.run(batches(schedule))
        times = pipe.action_times.step
        busy = sum(span.end - span.start for span in times.spans())
        return {"bubble": times.idle_seconds() / busy, "phases": timer.take()}

    fast, slow = run_ranks(rank_main, 2)
    assert fast["bubble"] > 1 > slow["bubble"]
    assert fast["phases"].keys() == {"forward", "backward", "pipeline_wait"}
    assert fast["phases"]["pipeline_wait"] > fast["phases"]["forward"]
    assert slow["phases"]["forward"] >= 6 * 0.02


def test_one_rank_needs_no_process_group_and_a_table_runs():
    """The user's own order of work: two micro-batches at a time, the second of each pair backward
    first."""
    schedule = read_table("0F0,0F1,0B1,0B0,0F2,0F3,0B3,0I2,0W2")
    pipe = pipeline(0, schedule)
    plain = Toy()
    total = pipe.run(batches(schedule), loss_scale=0.5)
    loss = 4 * plain(None, None).sum()
    (0.5 * loss).backward()
    assert [str(action) for action in pipe.action_times.step.order()] == [
        str(action) for action in schedule.orders[0]
    ]
    torch.testing.assert_close(total, loss.detach())
    for name, param in pipe.stages[0].named_parameters():
        torch.testing.assert_close(param.grad, dict(plain.named_parameters())[name].grad)


def test_loss_scale_may_be_a_tensor_of_another_dtype():
    schedule = build("1f1b", 1, 2)
    by_number = pipeline(0, schedule)
    by_tensor = pipeline(0, schedule)
    by_number.run(batches(schedule), 0.25)
    by_tensor.run(batches(schedule), torch.tensor(0.25, dtype=torch.float64))
    torch.testing.assert_close(
        by_tensor.stages[0].first.weight.grad, by_number.stages[0].first.weight.grad
    )


# -------------------------------------------------------------------------------------------
#     refusals


def test_wrong_counts_are_refused():
    schedule = build("1f1b", 1, 2)
    with pytest.raises(ValueError, match="1 micro-batches, the schedule is for 2"):
        pipeline(0, schedule).run(batches(schedule)[:1])
    with pytest.raises(ValueError, match=r"holds stages \[0\] in 1f1b, got 2"):
        Pipeline(
            schedule,
            [Toy(), Toy()],
            None,
            Mesh.alone(make_plan()),
            CommCounter(),
            shape=SHAPE,
            dtype=torch.float32,
        )


@pytest.mark.process
def test_a_hidden_state_of_another_shape_is_refused_before_it_travels():
    """gloo would take a short message and leave the rest of the buffer stale."""
    schedule = build("1f1b", 2, 2)

    def rank_main(rank):
        pipeline(rank, schedule, lambda: Toy(width=WIDTH - 1)).run(batches(schedule))

    with pytest.raises(RankError) as caught:
        run_ranks(rank_main, 2)
    assert caught.value.rank == 0
    message = (
        "stage 0 wants to send [1, 512, 127] torch.float32, the plan says [1, 512, 128]"
        " torch.float32"
    )
    assert LayoutError.__name__ in str(caught.value) and message in str(caught.value)


@pytest.mark.process
@pytest.mark.parametrize("dying", [0, 1])
def test_a_lost_peer_is_a_peer_loss(dying, tmp_path):
    """Killed in the middle of a step, its neighbour's error is one that leads to exit code 75."""
    schedule = build("1f1b", 2, 8)

    class Dies(Toy):
        calls = 0

        def forward(self, x, batch):
            self.calls += 1
            if self.calls == 4:
                os._exit(9)
            return super().forward(x, batch)

    def rank_main(rank):
        try:
            pipeline(rank, schedule, Dies if rank == dying else Toy).run(batches(schedule))
        except RuntimeError as error:
            (tmp_path / "verdict").write_text(f"{is_peer_loss(error)} {error}")
            raise

    with pytest.raises(RankError):
        run_ranks(rank_main, 2)
    assert (tmp_path / "verdict").read_text().startswith("True")


@pytest.mark.slow
def test_orders_are_those_of_torch():
    """The third oracle, where torch has the schedule: same order of F, B and I on every rank."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")

    def flat(action):
        return (
            [inner for sub in action.sub_actions for inner in flat(sub)]
            if action.sub_actions
            else [str(action)]
        )

    for ours, theirs in (
        ("interleaved", "Interleaved1F1B"),
        ("zbv", "ZBVZeroBubble"),
        ("dualpipev", "DualPipeV"),
    ):
        for pp, many in ((2, 4), (4, 8), (4, 16)):
            for rank, row in enumerate(visualizer.get_schedule_ops(theirs, pp, many, 2)):
                action_names = [
                    action_name
                    for action in row
                    if action is not None
                    for action_name in flat(action)
                ]
                action_names = [
                    action_name
                    for action_name in action_names
                    if "GRAD" not in action_name and "W" not in action_name
                ]
                order = build(ours, pp, many, 2).orders[rank]
                assert [
                    str(action) for action in order if action.kind is not Kind.W
                ] == action_names
