"""What the validator must catch, and schedules as text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.plan.schedules import (
    Action,
    Kind,
    ScheduleError,
    build,
    lower,
    parse_action,
    peak_in_flight,
    problem,
    program_problem,
    read_table,
    receive_early,
    write_table,
)


def with_rank(schedule, rank, actions):
    orders = list(schedule.orders)
    orders[rank] = tuple(actions)
    return replace(schedule, orders=tuple(orders))


BASE = build("zb_h1", 3, 4)
MUTATIONS = {
    "a forward is lost": (lambda order: order[1:], "no forward"),
    "a backward is lost": (
        lambda order: [a for a in order if a != Action(Kind.I, 1, 3)],
        "0 I, 1 W",
    ),
    "a weight gradient is lost": (
        lambda order: [a for a in order if a != Action(Kind.W, 1, 3)],
        "1 I, 0 W",
    ),
    "the last micro-batch is dropped": (
        lambda order: [a for a in order if a.micro_batch != 3],
        "no forward",
    ),
    "a backward runs twice": (lambda order: [*order, Action(Kind.I, 1, 0)], "happens twice"),
    "whole and split": (lambda order: [*order, Action(Kind.B, 1, 0)], "1 B, 1 I, 1 W"),
    "another rank's stage": (
        lambda order: [*order, Action(Kind.F, 0, 0)],
        "the stage is on rank 0",
    ),
    "a micro-batch too many": (
        lambda order: [*order, Action(Kind.F, 1, 4)],
        "micro-batches are 0 to 3",
    ),
    "a stage that is not there": (
        lambda order: [*order, Action(Kind.F, 3, 0)],
        "does not pass that stage",
    ),
    "a transfer among computes": (
        lambda order: [*order, Action(Kind.SEND_F, 1, 0)],
        "not one of F, B, I, W",
    ),
    "backward before forward": (lambda order: order[::-1], "deadlocks"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_broken_schedule_is_caught(name):
    change, phrase = MUTATIONS[name]
    assert problem(BASE) is None
    message = problem(with_rank(BASE, 1, change(list(BASE.orders[1]))))
    assert message is not None and phrase in message and "\n" not in message


def test_crossed_orders_deadlock_and_say_where():
    first = with_rank(build("1f1b", 2, 2), 0, [*map(parse_action, ("0F0", "0B0", "0F1", "0B1"))])
    assert problem(first) is None  # slow, but it ends
    crossed = with_rank(first, 1, map(parse_action, ("1F1", "1B1", "1F0", "1B0")))
    assert (
        problem(crossed)
        == "schedule 1f1b deadlocks: rank 0 at 0B0 waits for 1B0, rank 1 at 1F1 waits for 0F1"
    )


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_swapping_two_actions_is_legal_or_named(data):
    """The validator is the simulator's judgement: any order that it lets through can be lowered and
    run."""
    schedule = build(
        *data.draw(st.sampled_from([("1f1b", 3, 4, 1), ("interleaved", 2, 4, 2), ("zbv", 2, 4, 2)]))
    )
    rank = data.draw(st.integers(0, schedule.pp - 1))
    order = list(schedule.orders[rank])
    a = data.draw(st.integers(0, len(order) - 1))
    b = data.draw(st.integers(0, len(order) - 1))
    order[a], order[b] = order[b], order[a]
    changed = with_rank(schedule, rank, order)
    if problem(changed) is None:
        assert program_problem(changed, lower(changed)) is None
    else:
        with pytest.raises(ScheduleError):
            lower(changed)


def test_memory_bound():
    schedule = build("afab", 2, 6)
    assert problem(schedule, max_in_flight=6) is None
    assert (
        problem(schedule, 5)
        == "schedule afab, rank 0 holds 6 stage activations at once, the bound is 5"
    )
    # After I only a part is kept for W: arXiv 2401.10241, section 2, counts M_B and M_W apart.
    assert max(peak_in_flight(build("zb_h1", 4, 8), weight_share=0.5)) < 4.5


# -------------------------------------------------------------------------------------------
#     lowered programs


def flat(batches):
    return tuple(action for batch in batches for action in batch)


def test_early_receives_would_deadlock_without_tags():
    """Why `receive_early` is for gloo only: the validator sees that rendezvous transfers would
    block."""
    schedule = build("1f1b", 2, 4)
    early = tuple(flat(receive_early(program)) for program in lower(schedule))
    assert program_problem(schedule, early, rendezvous=False) is None
    assert "deadlocks" in program_problem(schedule, early)


def test_early_receives_stand_before_the_actions_in_front():
    program = tuple(map(parse_action, ("1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1")))
    assert (
        " ".join(map(str, flat(receive_early(program, by=1))))
        == "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1"
    )
    program = tuple(
        map(
            parse_action,
            ("0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"),
        )
    )
    advanced_by_two = "0RECV_B0 0F0 0SEND_F0 0RECV_B1 0F1 0SEND_F1 0B0 0B1"
    assert " ".join(map(str, flat(receive_early(program, by=2)))) == advanced_by_two


@pytest.mark.parametrize("kind", ["1RECV_F0", "0SEND_F0", "0F0"])
def test_a_program_that_lacks_something_is_caught(kind):
    schedule = build("1f1b", 2, 2)
    missing = parse_action(kind)
    programs = tuple(tuple(a for a in program if a != missing) for program in lower(schedule))
    assert program_problem(schedule, programs) is not None


def test_transfers_of_a_pair_swapped_at_one_end_are_caught():
    schedule = build("1f1b", 2, 2)
    first, second = lower(schedule)
    swapped = list(second)
    a, b = (second.index(parse_action(action_text)) for action_text in ("1RECV_F0", "1RECV_F1"))
    swapped[a], swapped[b] = swapped[b], swapped[a]
    assert "deadlocks" in program_problem(schedule, (first, tuple(swapped)))


# ------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    "size", [("1f1b", 3, 4), ("interleaved", 2, 4, 2), ("zbv", 2, 4, 2), ("zb_h2", 2, 3)]
)
def test_table_round_trip(size):
    schedule = build(*size)
    again = read_table(write_table(schedule), schedule.name)
    assert again == schedule


def test_table_as_json_and_with_idle_slots_and_transfers():
    rows = [
        ["0F0", None, "0SEND_F0", "", "0RECV_B0", "0B0"],
        ["", "1RECV_F0", "1F0", "1B0", "1SEND_B0"],
    ]
    expected = build("1f1b", 2, 1).orders
    assert read_table(json.dumps(rows)).orders == expected
    assert read_table(json.dumps({"rows": rows, "name": "mine"})).name == "mine"
    assert (
        read_table("\n".join(",".join(cell or "" for cell in row) for row in rows)).orders
        == expected
    )


def test_table_of_two_copies():
    schedule = build("dualpipe", 2, 4)
    rows = [[str(action) for action in order] for order in schedule.orders]
    assert read_table(json.dumps({"rows": rows, "name": "dualpipe", "copies": 2})) == schedule


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("", "one row of actions per rank"),
        ("[]", "one row of actions per rank"),
        ('{"rows": 3}', "one row of actions per rank"),
        ("[[}", "not JSON"),
        ('{"rows": [["0F0"]], "copies": 3}', "copies is 1 or 2"),
        ("0F0,0B0\n1F0,1X0", "row 1, cell 1: '1X0' is not an action"),
        ("[[0]]", "row 0, cell 0: '0' is not an action"),
        ("0F0,0B0,1F0\n1F0,1B0", "stage 1 is on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0", "want 0 to a multiple of 2 less one"),
        ("0F0,0B0\n1F0", "wants B, or I and W; has 0 B"),
        ("0B0,0F0\n1F0,1B0", "deadlocks"),
    ],
)
def test_wrong_tables_are_refused_with_their_place(table, message):
    with pytest.raises(ScheduleError) as caught:
        read_table(table)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_table_with_a_memory_bound():
    with pytest.raises(ScheduleError, match="the bound is 2"):
        read_table(write_table(build("afab", 2, 3)), max_in_flight=2)
