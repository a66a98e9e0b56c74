"""A forward and a backward that run as one: they take turns at their transfers, and give what they
give one by one."""

from __future__ import annotations

import random
import threading
import time
from itertools import pairwise

import pytest
import torch

from orchestrator.plan.schedules import (
    Kind,
    costs_of,
    lower,
    lower_to_batches,
    program_problem,
    receive_early,
    run_on_device,
    runs_pairs,
    schedule_of,
    simulate,
)
from orchestrator.verify.expert_models import DEEPSEEK
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import engine_of
from trainer.pipeline.turns import Turns
from trainer.precision import FP64
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

CPU = torch.device("cpu")


def work(turns, seen, name, pieces):
    def run():
        for piece in range(pieces):
            seen.append(f"{name}{piece}")
            if piece + 1 < pieces:
                turns.pass_on()

    return run


@pytest.mark.parametrize(("first", "second"), [(3, 3), (1, 4), (4, 1)])
def test_two_take_turns_until_one_has_ended(first, second):
    turns = Turns(CPU)
    seen = []
    turns.together(work(turns, seen, "a", first), work(turns, seen, "b", second))
    expected = []
    for piece in range(max(first, second)):
        expected += [f"a{piece}"] * (piece < first) + [f"b{piece}"] * (piece < second)
    assert seen == expected
    turns.pass_on()  # alone: nothing to wait for
    turns.together(work(turns, seen, "c", 2), work(turns, seen, "d", 2))
    assert seen[len(expected) :] == ["c0", "d0", "c1", "d1"]


def test_seconds_are_those_of_whoever_had_the_turn():
    turns = Turns(CPU)
    first, second = turns.together(lambda: time.sleep(0.05), lambda: time.sleep(0.15))
    assert 0.05 <= first < second >= 0.15


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("at", ["first", "second"])
def test_what_one_raises_is_raised_and_the_other_ends_at_its_next_transfer(at, after):
    turns = Turns(CPU)
    seen = []

    def fails():
        for _ in range(after):
            turns.pass_on()
        raise ValueError("this one")

    pieces = {"first": work(turns, seen, "a", 9), "second": work(turns, seen, "b", 9)} | {at: fails}
    earlier_threads = set(
        threading.enumerate()
    )  # other tests of this process may have left the compiler's
    with pytest.raises(ValueError, match="this one"):
        turns.together(pieces["first"], pieces["second"])
    assert len(seen) <= 2 and set(threading.enumerate()) <= earlier_threads
    turns.pass_on()
    turns.together(work(turns, seen := [], "c", 2), work(turns, seen, "d", 2))
    assert seen == ["c0", "d0", "c1", "d1"]


def test_layouts_that_run_pairs():
    assert runs_pairs(make_plan(pp=2, tp=2, schedule="dualpipe", micro_batches=4).parallel)
    assert not runs_pairs(make_plan(pp=2, schedule="dualpipe", micro_batches=4).parallel), (
        "nothing to hide"
    )
    assert not runs_pairs(make_plan(pp=2, tp=2).parallel)


LAYOUTS = {
    "dualpipev": dict(pp=2, tp=2, vpp=2, schedule="dualpipev", micro_batches=6),
    "dualpipe, cp": dict(pp=2, cp=2, schedule="dualpipe", micro_batches=6, seq_len=16),
    # Terms of the loss and routers' choices, which recomputation in a backward must not count
    # beside a forward.
    "dualpipe, ep": dict(
        pp=2,
        ep=2,
        schedule="dualpipe",
        micro_batches=6,
        recompute="full",
        model=tiny_model(**DEEPSEEK),
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_give_the_same_gradients_bit_for_bit(name):
    """The backward of each rank has begun to communicate before the forward has ended, in the same
    order on all ranks of a group."""
    plan = make_plan(**LAYOUTS[name])
    many = plan.parallel.micro_batches

    def run(rank, paired):
        engine = engine_of(plan, rank, FP64)
        seen = []
        uneven = random.Random(rank)
        engine.pipeline.one_by_one = not paired
        for kind in ("forward", "backward"):
            name = f"_compute_{kind}"
            setattr(engine.pipeline, name, _noted(getattr(engine.pipeline, name), kind, seen))
        real = engine.counter.count_sent

        def count_sent(operation, axis, *rest, **options):
            time.sleep(uneven.uniform(0.0, 0.002))  # ranks and threads are not equally fast
            if axis != "pp":
                pass_name = (
                    "forward"
                    if threading.current_thread() is threading.main_thread()
                    else "backward"
                )
                seen.append(f"{axis} of a {pass_name}" if paired else axis)
            return real(operation, axis, *rest, **options)

        engine.counter.count_sent = count_sent
        loss, _ = engine.gradients([micro_batch(plan, [at]) for at in range(many)], 10)
        thread_count = threading.active_count()
        record = {
            "loss": loss,
            "grads": engine.buckets.full_grads(),
            "seen": seen,
            "left": thread_count,
        }
        engine.update(torch.ones((), dtype=torch.float64), 1e-3)
        states = {info.name: value for info, value in engine.part.states()}
        return record | {"terms": engine.loss_term_totals(), "states": states}

    world = plan.parallel.world_size
    plain = run_ranks(run, world, False)
    paired = run_ranks(run, world, True)
    for plain_record, paired_record in zip(plain, paired, strict=True):
        assert torch.equal(plain_record["loss"], paired_record["loss"])
        assert all(
            torch.equal(grad, paired_record["grads"][key])
            for key, grad in plain_record["grads"].items()
        )
        assert paired_record["left"] == plain_record["left"], "no thread stays behind"
        for label in ("terms", "states"):
            assert all(
                torch.equal(value, paired_record[label][key])
                for key, value in plain_record[label].items()
            )
        assert bool(plain_record["terms"]) == ("ep" in name)
        assert _overlapped(paired_record["seen"]) >= 2, "forwards in which a backward communicates"
        assert _overlapped(plain_record["seen"]) == 0
    axis = next(axis for axis in ("tp", "cp", "ep") if getattr(plan.parallel, axis) > 1)
    orders = [
        [label for label in plain_record["seen"] if label.startswith(axis)]
        for plain_record in paired
    ]
    for rank in plan.ranks:
        peer = next(group for group in plan.groups[axis] if rank.rank in group)[0]
        assert orders[rank.rank] == orders[peer], "collectives of a group start in one order"


def _noted(real, kind, seen):
    def run(action, *rest):
        seen.append(f"{kind} {action}")
        real(action, *rest)
        seen.append(f"{kind} {action} ended")

    return run


def _overlapped(seen):
    """Forwards between whose begin and end a backward begins."""
    inside = False
    overlapped = 0
    for label in seen:
        if label.startswith("forward"):
            inside = not label.endswith("ended")
        elif label.startswith("backward") and not label.endswith("ended"):
            overlapped += inside
    return overlapped


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_transfers_around_pairs_do_not_deadlock_on_a_device(pp, name):
    for micro_batches in (2, 4, 2 * pp, 20):
        layout = dict(
            pp=pp,
            tp=2,
            schedule=name,
            micro_batches=micro_batches,
            vpp=2 if name == "dualpipev" else 1,
        )
        plan = make_plan(**layout, model=tiny_model(layers=2 * pp))
        schedule = schedule_of(plan.parallel)
        costs = costs_of(plan)
        programs = lower_to_batches(schedule, costs)
        assert len(run_on_device(schedule, programs, costs).ends) == sum(map(len, schedule.orders))
        on_device = [pairs_of(program) for program in programs]
        assert any(on_device) or micro_batches < 20
        lowered = lower(schedule, costs)
        early = [receive_early(program, costs=costs) for program in lowered]  # what gloo runs
        assert [pairs_of(program) for program in early] == on_device, "the same pairs on both"
        for program, late in zip(early, lowered, strict=True):
            assert sorted(flat(program)) == sorted(late)
            for at, batch in enumerate(program):
                if len(batch) > 1:
                    before = flat(program[:at])
                    after = flat(program[at + 1 :])
                    for action in batch:
                        forward = action.kind is Kind.F
                        stage = action.stage
                        number = action.micro_batch
                        receive = (Kind.RECV_F if forward else Kind.RECV_B, stage, number)
                        send = (Kind.SEND_F if forward else Kind.SEND_B, stage, number)
                        assert receive not in after and send not in before, (
                            "both receives before it, sends behind it"
                        )
        assert (
            program_problem(schedule, [flat(program) for program in early], rendezvous=False)
            is None
        )


def flat(program):
    return tuple(action for batch in program for action in batch)


def pairs_of(program):
    return [batch for batch in program if [action.kind for action in batch] == [Kind.F, Kind.B]]


def test_pairs_are_those_of_the_simulation_and_of_plans_whose_layers_communicate():
    layout = dict(pp=2, schedule="dualpipe", micro_batches=8)
    for options in (
        {"tp": 2},
        {"cp": 2, "seq_len": 16},
        {"ep": 2, "model": tiny_model(**DEEPSEEK)},
        {},
    ):
        plan = make_plan(**layout, **options)
        schedule = schedule_of(plan.parallel)
        costs = costs_of(plan)
        together = [
            [
                (span.action, next_span.action)
                for span, next_span in pairwise(spans)
                if span[1:] == next_span[1:]
            ]
            for spans in simulate(schedule, costs).spans
        ]
        assert [pairs_of(program) for program in lower_to_batches(schedule, costs)] == together
        assert any(together) == bool(options)
