"""Programs as GPUs with NCCL run them: no schedule can deadlock there, whatever its size and its
stages' times."""

from __future__ import annotations

import itertools
import random

import pytest

from orchestrator.plan.schedules import (
    RECEIVES,
    SCHEDULES,
    Action,
    Costs,
    Kind,
    ScheduleError,
    build,
    costs_of,
    illegal,
    lower,
    lower_to_batches,
    program_problem,
    run_on_device,
    simulate,
)
from tests.beds.plans import make_plan
from tests.trainer.samples import small

FORWARD = (Kind.SEND_F, Kind.RECV_F)
BACKWARD = (Kind.SEND_B, Kind.RECV_B)
VPP = {"afab": (1, 2, 3), "interleaved": (2, 3, 4), "zbv": (2,), "dualpipev": (2,)}


def flat(programs):
    return tuple(tuple(action for batch in program for action in batch) for program in programs)


def alone(program):
    """Each action as a batch of its own."""
    return [(action,) for action in program]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_deadlocks_on_a_device(name):
    """Every pp to 8, vpp and number of micro-batches to 20, with equal and with random times of
    stages."""
    tried = 0
    generator = random.Random(0)
    for pp, vpp, micro_batches in itertools.product(
        range(1, 9), VPP.get(name, (1,)), (*range(1, 13), 16, 20)
    ):
        if illegal(name, pp, micro_batches, vpp) is not None:
            continue
        schedule = build(name, pp, micro_batches, vpp)
        drawn = [
            tuple(generator.choice((0.1, 1.0, 1.0, 7.0)) for _ in range(pp * vpp)) for _ in range(3)
        ]
        for costs in (None, Costs(*drawn, transfer=generator.choice((0.0, 0.5, 3.0)))):
            times = run_on_device(schedule, lower_to_batches(schedule, costs), costs)
            assert len(times.ends) == sum(map(len, schedule.orders))
            tried += 1
    assert tried >= 60


def test_a_wrong_order_is_found():
    """A message is sent too late, two messages of one pair change places, one is not received."""
    schedule = build("1f1b", 2, 4)
    first, second = flat(lower_to_batches(schedule))

    late = [action for action in second if action != Action(Kind.SEND_B, 1, 0)]
    late.append(Action(Kind.SEND_B, 1, 0))
    with pytest.raises(ScheduleError, match="rank 1 sends to rank 0 in another order"):
        run_on_device(schedule, [alone(first), alone(late)])

    crossed = list(second)
    at = crossed.index(Action(Kind.RECV_F, 1, 0))
    to = crossed.index(Action(Kind.RECV_F, 1, 1))
    crossed[at], crossed[to] = crossed[to], crossed[at]
    with pytest.raises(ScheduleError, match=r"rank 0 sends to rank 1 in another order .*message 0"):
        run_on_device(schedule, [alone(first), alone(crossed)])

    lost = [action for action in second if action != Action(Kind.RECV_F, 1, 3)]
    with pytest.raises(ScheduleError, match=r"4 sends, 3 receives"):
        run_on_device(schedule, [alone(first), alone(lost)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_send_behind_the_next_computation_deadlocks(name):
    """A seeded bug in every schedule: some send is enqueued behind a receive whose data needs
    it."""
    schedule = build(name, 4, 8, VPP.get(name, (1,))[0])
    programs = lower_to_batches(schedule)
    deadlocks = 0
    for rank, program in enumerate(programs):
        actions = [action for batch in program for action in batch]
        for at, action in enumerate(actions):
            if action.kind not in (Kind.SEND_F, Kind.SEND_B):
                continue
            behind = next(
                (to for to in range(at, len(actions)) if actions[to].kind in RECEIVES), None
            )
            if behind is None:
                continue
            changed = [*actions[:at], *actions[at + 1 : behind + 1], action, *actions[behind + 1 :]]
            try:
                run_on_device(
                    schedule,
                    [
                        alone(changed) if program_rank == rank else theirs
                        for program_rank, theirs in enumerate(programs)
                    ],
                )
            except ScheduleError as error:
                deadlocks += "deadlocks on a device" in str(error)
    assert deadlocks, "not one of the wrong orders hangs: the checker sees nothing"


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "dualpipev"])
def test_receives_posted_early_deadlock_on_nccl(name):
    """What is right on gloo, where tags match messages, hangs where batches of a communicator run
    in order: a receive that is moved to the front holds up the sends behind it."""
    vpp = VPP.get(name, (1,))[0]
    schedule = build(name, 4, 8, vpp)

    def receives_first(program):
        return (
            *(a for a in program if a.kind in RECEIVES),
            *(a for a in program if a.kind not in RECEIVES),
        )

    with pytest.raises(ScheduleError, match="deadlocks on a device"):
        run_on_device(schedule, [alone(receives_first(program)) for program in lower(schedule)])


def test_two_sends_towards_each_other_need_a_batch():
    """Both ranks of a pair send, then receive: a deadlock if each is a batch of its own, none as
    one batch."""
    schedule = build("dualpipe", 2, 2)
    programs = [[tuple(sorted(batch, key=lambda action: action.kind in RECEIVES)) for batch in program]
                for program in lower_to_batches(schedule)]  # fmt: skip
    assert run_on_device(schedule, programs).makespan > 0
    with pytest.raises(ScheduleError, match="deadlocks on a device"):
        run_on_device(schedule, [alone(program) for program in flat(programs)])


@pytest.mark.parametrize("name", SCHEDULES)
def test_free_transfers_take_the_simulated_time(name):
    """Transfers take no time here: a device with the actual times of its stages needs what
    `simulate` says, up to the waits of one batch for another."""
    vpp = VPP.get(name, (1,))[0]
    schedule = build(name, 4, 8, vpp)
    assert run_on_device(schedule, lower_to_batches(schedule)).makespan == pytest.approx(
        simulate(schedule).makespan
    )


def by_direction(program):
    """A batch of hidden states, then one of gradients, where a program has one of both."""
    apart = []
    for batch in program:
        forward = tuple(action for action in batch if action.kind in FORWARD)
        backward = tuple(action for action in batch if action.kind in BACKWARD)
        apart += [part for part in (forward, backward) if part] or [batch]
    return apart


@pytest.mark.parametrize("pp, micro_batches", [(4, 16), (8, 32)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_waiting_for_a_whole_batch_costs_little(name, pp, micro_batches):
    """Messages take 2 % of a stage's forward. A device waits for a batch and for those before it,
    `simulate` for the message alone. Smaller batches do not wait less: in one communicator they
    run one after the other."""
    schedule = build(name, pp, micro_batches, VPP.get(name, (1,))[0])
    programs = lower_to_batches(schedule)
    costs = Costs(transfer=0.02)
    whole = run_on_device(schedule, programs, costs).makespan
    assert whole <= 1.011 * simulate(schedule, costs).makespan
    apart = run_on_device(schedule, list(map(by_direction, programs)), costs).makespan
    assert apart >= (0.995 if name == "zb_h1" else 1 - 1e-9) * whole


def test_actual_times_shorten_the_step():
    """Transfers placed for equal stages wait behind others where the head makes the last stage
    slower."""
    gains = []
    for name, micro_batches in itertools.product(
        ("1f1b", "interleaved", "zb_h1", "zbv", "dualpipev"), (8, 12)
    ):
        vpp = VPP.get(name, (1,))[0]
        schedule = build(name, 4, micro_batches, vpp)
        forward = (1.0,) * (4 * vpp - 1) + (2.5,)
        costs = Costs(forward, forward, forward)
        blind, seeing = (
            run_on_device(schedule, lower_to_batches(schedule, order), costs).makespan
            for order in (None, costs)
        )
        assert seeing <= blind * (1 + 1e-9)
        gains.append(1 - seeing / blind)
    assert max(gains) > 0.01, gains


def test_batches_hold_the_same_actions_as_programs():
    for name, pp, micro_batches in itertools.product(("1f1b", "zbv", "dualpipe"), (2, 4), (4, 8)):
        schedule = build(name, pp, micro_batches, VPP.get(name, (1,))[0])
        batches = flat(lower_to_batches(schedule))
        assert [sorted(actions) for actions in batches] == [
            sorted(actions) for actions in lower(schedule)
        ]
        assert program_problem(schedule, batches, rendezvous=False) is None


def test_costs_of_a_plan_follow_its_stages():
    plan = make_plan(pp=2, model=small(layers=3, vocab=512))
    costs = costs_of(plan)
    layers = plan.parallel.stage_layers
    head = 2.0 * plan.model.vocab * plan.model.hidden
    first, last = costs.forward
    assert first / layers[0] == pytest.approx((last - head) / layers[1], rel=1e-3)
    assert costs.backward_input == costs.forward == costs.backward_weight
