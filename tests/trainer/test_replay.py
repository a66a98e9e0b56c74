"""Recorded calls on a simulated device: what waits for what, by hand."""

from __future__ import annotations

from tests.beds.fakegpu import Note
from tests.beds.fakegpu.replay import play

COMPUTE = 1
NETWORK = 2


def product(seconds: int) -> Note:
    return Note("K", "gemm", COMPUTE, 0, seconds, 0, 0)


def collective(seconds: int) -> Note:
    return Note("N", "ncclAllReduce", NETWORK, 7, seconds, 4, 0)


def recorded(stream: int, event: int) -> Note:
    return Note("R", "record", stream, event, 0, 0, 0)


def waits(stream: int, event: int) -> Note:
    return Note("W", "wait", stream, event, 0, 0, 0)


def seconds_of(notes: list[Note], begin: int = 0):
    return play(notes, lambda note: note.bytes, lambda note: ("dp", note.bytes), begin)


def test_a_collective_is_exposed_as_far_as_the_products_beside_it_are_shorter():
    """Products of 3 s, a sum of 5 s of their result, products of 2 s beside it, then its use."""
    step = [
        product(3),
        recorded(COMPUTE, 1),
        waits(NETWORK, 1),
        collective(5),
        recorded(NETWORK, 2),
        product(2),
        waits(COMPUTE, 2),
        product(1),
    ]
    assert seconds_of(step) == (9.0, 6.0, {"dp": 3.0}, {"dp": 5.0})
    assert seconds_of(step * 2, begin=len(step)) == seconds_of(step)


def test_an_event_is_the_moment_when_it_was_recorded():
    """A wait for an early event does not wait for what its stream has done since; a stream without
    a wait begins at once, and one that passes an event on is charged to what it waited for."""
    notes = [
        collective(2),
        recorded(NETWORK, 1),
        collective(9),
        waits(COMPUTE, 1),
        product(1),
    ]
    assert seconds_of(notes) == (3.0, 1.0, {"dp": 2.0}, {"dp": 11.0})
    third = 3
    relayed = [collective(2), recorded(NETWORK, 1), waits(third, 1), recorded(third, 2)]
    notes = [*relayed, waits(COMPUTE, 2), product(1)]
    assert seconds_of(notes) == (3.0, 1.0, {"dp": 2.0}, {"dp": 2.0})
