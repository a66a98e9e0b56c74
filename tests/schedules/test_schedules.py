"""Every schedule, for every legal size: complete, deadlock-free, and with the bubble and memory
that was published."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.plan.schedules import (
    SCHEDULES,
    Costs,
    Kind,
    ScheduleError,
    build,
    illegal,
    lower,
    peak_in_flight,
    problem,
    program_problem,
    receive_early,
    simulate,
)

VPP = {"afab": (1, 2, 3), "interleaved": (2, 3, 4), "zbv": (2,), "dualpipev": (2,)}


@st.composite
def sizes(draw, names=tuple(SCHEDULES)):
    name = draw(st.sampled_from(names))
    step = 2 if name == "dualpipe" else 1
    pp = draw(st.integers(1, 8 // step)) * step
    micro_batches = draw(st.integers(1, 32 // step)) * step
    return name, pp, micro_batches, draw(st.sampled_from(VPP.get(name, (1,))))


@given(sizes())
@settings(max_examples=150, deadline=None)
def test_complete_and_free_of_deadlock(size):
    schedule = build(*size)
    assert problem(schedule) is None
    programs = lower(schedule)
    assert (
        program_problem(schedule, programs) is None
    )  # even if every send blocks until it is received
    early = [
        [action for batch in receive_early(program) for action in batch] for program in programs
    ]  # gloo's
    assert program_problem(schedule, early, rendezvous=False) is None


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_corner_sizes(name, pp):
    for micro_batches in (1, 2, 3, pp, pp + 1, 2 * pp - 1, 32):
        for vpp in VPP.get(name, (1,)):
            if illegal(name, pp, micro_batches, vpp) is None:
                schedule = build(name, pp, micro_batches, vpp)
                assert problem(schedule) is None
                assert program_problem(schedule, lower(schedule)) is None


def test_one_rank_is_gradient_accumulation():
    assert [str(action) for action in build("1f1b", 1, 3).orders[0]] == [
        "0F0",
        "0B0",
        "0F1",
        "0B1",
        "0F2",
        "0B2",
    ]
    assert lower(build("1f1b", 1, 3))[0] == build("1f1b", 1, 3).orders[0]


def test_1f1b_program_in_full():
    """p = 2, m = 2, written out by hand."""
    first, second = (" ".join(map(str, program)) for program in lower(build("1f1b", 2, 2)))
    assert first == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert second == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"


# -------------------------------------------------------------------------------------------
#     published figures


@given(
    st.integers(1, 8),
    st.integers(1, 32),
    st.sampled_from(["afab", "1f1b"]),
    st.integers(1, 5),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_bubble_of_afab_and_1f1b(pp, micro_batches, name, forward, backward):
    """(p - 1) / m, for any ratio of forward to backward: Narayanan et al. 2021, section 2.2."""
    costs = Costs(float(forward), backward / 2, backward / 2)
    assert simulate(build(name, pp, micro_batches), costs).bubble_ratio == pytest.approx(
        (pp - 1) / micro_batches
    )


@given(st.integers(1, 8), st.integers(1, 4), st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_bubble_and_memory_of_interleaved(pp, groups, vpp):
    """(p - 1) / (v m) with p dividing m; activations 1 + (p - 1) / (p v) times those of 1F1B."""
    schedule = build("interleaved", pp, groups * pp, vpp)
    assert simulate(schedule).bubble_ratio == pytest.approx((pp - 1) / (vpp * groups * pp))
    factor = 1 + (pp - 1) / (pp * vpp) if groups > 1 else 1
    assert max(peak_in_flight(schedule)) / vpp == pytest.approx(pp * factor)


def test_bubble_of_breadth_first():
    assert simulate(build("afab", 4, 8, 2)).bubble_ratio == pytest.approx(3 / 16)


@given(st.integers(1, 8), st.integers(1, 32))
@settings(max_examples=60, deadline=None)
def test_memory_of_afab_and_1f1b(pp, micro_batches):
    assert peak_in_flight(build("afab", pp, micro_batches)) == (micro_batches,) * pp
    expected = tuple(min(pp - rank, micro_batches) for rank in range(pp))
    assert peak_in_flight(build("1f1b", pp, micro_batches)) == expected


#: Seconds of forward, input gradient and weight gradient, in the range (W not above F and I) of the
#: papers' formulas.
SPLITS = [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (2.0, 3.0, 2.0), (1.0, 1.5, 1.0)]


def own_bubble_ratio(timeline):
    """The idle over busy time of the worst rank between its own first start and last end.

    The zero-bubble papers use this measure: it is the bubble of every step if ranks are not
    synchronised between steps, and 0 for ZB-H2, whose ranks only start and end one after another.
    """
    ratios = [
        (spans[-1].end - spans[0].start) / busy - 1
        for spans, busy in zip(timeline.spans, timeline.busy, strict=True)
        if busy
    ]
    return max(ratios, default=0.0)


@given(st.integers(1, 8), st.integers(0, 17), st.sampled_from(SPLITS))
@settings(max_examples=60, deadline=None)
def test_zero_bubble_h1_h2(pp, extra_batches, split):
    """arXiv 2401.10241, section 2: ZB-H1 (p-1)(F+I-W) at p activations, ZB-H2 (p-1)(F+I-2W) at
    2p-1."""
    micro_batches = 2 * pp - 1 + extra_batches
    forward, i, w = split
    ideal = sum(split) * micro_batches
    h1 = build("zb_h1", pp, micro_batches)
    h2 = build("zb_h2", pp, micro_batches)
    assert own_bubble_ratio(simulate(h1, Costs(*split))) * ideal == pytest.approx(
        (pp - 1) * (forward + i - w)
    )
    assert own_bubble_ratio(simulate(h2, Costs(*split))) * ideal == pytest.approx(
        (pp - 1) * (forward + i - 2 * w)
    )
    assert peak_in_flight(h1) == (pp,) * pp
    assert peak_in_flight(h2) == (2 * pp - 1,) * pp


@pytest.mark.parametrize("pp", range(1, 9))
def test_zbv(pp):
    """arXiv 2405.15362: no bubble when F = I = W; 2p half stages held, evenly."""
    schedule = build("zbv", pp, 2 * pp + 3, 2)
    assert own_bubble_ratio(simulate(schedule)) == pytest.approx(0)
    assert peak_in_flight(schedule) == (2 * pp,) * pp


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
@pytest.mark.parametrize("gain", [0.0, 0.1, 1 / 6])
@pytest.mark.parametrize("split", SPLITS)
def test_bubble_of_dualpipe(pp, gain, split):
    """DeepSeek-V3, table 2: (p/2 - 1)(F&B + B - 3W) on the worst rank; DualPipeV has it on half as
    many ranks."""
    _, i, w = split
    together = sum(split) * (1 - gain)  # of a forward and a backward, against one after the other
    published = (pp / 2 - 1) * (together + i + w - 3 * w)
    for schedule in (build("dualpipe", pp, 2 * pp), build("dualpipev", pp // 2, 2 * pp, 2)):
        timeline = simulate(schedule, Costs(*split, together=together))
        assert timeline.makespan - min(timeline.busy) == pytest.approx(published)


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_memory_of_dualpipe(pp):
    """DeepSeek-V3, table 2: p + 1 activations on every rank, parameters twice."""
    schedule = build("dualpipe", pp, 4 * pp)
    assert peak_in_flight(schedule) == (pp + 1,) * pp
    assert [schedule.stages_of(rank) for rank in range(pp)] == [
        (rank, 2 * pp - 1 - rank) for rank in range(pp)
    ]
    assert {schedule.model_stage(stage) for stage in schedule.stages_of(0)} == {0, pp - 1}
    assert peak_in_flight(build("dualpipev", pp // 2, 4 * pp, 2)) == (pp + 1,) * (pp // 2)


def test_uneven_stages_and_slow_links_cost_time():
    base = simulate(build("1f1b", 4, 8)).makespan
    slow = Costs(forward=(1.0, 1.0, 2.0, 1.0))
    assert simulate(build("1f1b", 4, 8), slow).makespan > base
    # The first micro-batch crosses three links forward, the last one three backward, at least.
    assert simulate(build("1f1b", 4, 8), Costs(transfer=0.25)).makespan >= base + 6 * 0.25


@given(sizes())
@settings(max_examples=40, deadline=None)
def test_timeline_is_consistent(size):
    """Nothing overlaps on a rank, nothing starts before its inputs, and busy time is the sum of the
    work."""
    schedule = build(*size)
    timeline = simulate(schedule, Costs(1.0, 1.25, 0.75, 0.5))
    ends = {span.action: span.end for spans in timeline.spans for span in spans}
    for rank, spans in enumerate(timeline.spans):
        assert [span.action for span in spans] == list(schedule.orders[rank])
        assert all(a.end <= b.start for a, b in pairwise(spans))
        for action, start, _ in spans:
            for source in schedule.needs(action):
                away = schedule.stage_rank[source.stage] != rank
                assert ends[source] + (0.5 if away else 0.0) <= start
    assert sum(timeline.busy) == pytest.approx(3.0 * schedule.micro_batches * schedule.model_stages)


# ------------------------------------------------------------------------------------------- what
#     is refused


@pytest.mark.parametrize(
    ("size", "phrases"),
    [
        (("1f1B", 2, 4, 1), ["did you mean '1f1b'", "zb_h1"]),
        (("1f1b", 2, 4, 2), ["exactly 1", "nearest: vpp=1"]),
        (("interleaved", 2, 4, 1), ["at least 2", "1f1b"]),
        (("zbv", 2, 4, 3), ["exactly 2", "vpp is 3"]),
        (("dualpipe", 3, 4, 1), ["even pp", "2 or 4"]),
        (("dualpipe", 2, 5, 1), ["even micro_batches", "4 or 6"]),
        (("dualpipe", 1, 2, 1), ["even pp, not 1; nearest: 2"]),
        (("afab", 0, 4, 1), ["pp is 0"]),
        (("afab", 2, 0, 1), ["micro_batches is 0"]),
    ],
)
def test_illegal_sizes_name_the_nearest_legal(size, phrases):
    with pytest.raises(ScheduleError) as caught:
        build(*size)
    assert all(phrase in str(caught.value) for phrase in phrases)
    assert "\n" not in str(caught.value)


def test_split_flag():
    assert not build("1f1b", 2, 4).splits_backward
    assert build("zbv", 2, 4, 2).splits_backward
    assert {action.kind for action in build("dualpipe", 4, 8).orders[0]} == {
        Kind.F,
        Kind.B,
        Kind.I,
        Kind.W,
    }
