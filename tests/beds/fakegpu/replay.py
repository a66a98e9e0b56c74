"""Plays recorded calls on a device whose kernels and collectives take given seconds.

Streams are queues: what a stream is given begins when all that it was given before has ended, and
when the events that it waits for have happened. Streams run at the same time and do not slow each
other down, and the host is never late. So a step that is played shows which communication nothing
hides, for the one reason that the order of calls leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from tests.beds.fakegpu import Note

#: The seconds of a kernel, or of a collective with its label: the axis that it belongs to.
KernelSeconds = Callable[[Note], float]
CollectiveSeconds = Callable[[Note], tuple[str, float]]


class Moment(NamedTuple):
    """The end of a stream's work so far, and the label of the communication that it ended with; ""
    if it was computation."""

    at: float = 0.0
    label: str = ""


class Played(NamedTuple):
    """Seconds of the calls that were played."""

    total: float
    computed: float  # on the stream of products
    #: by label: in which the stream of products waits for communication
    exposed: dict[str, float]
    sent: dict[str, float]  # by label: of communication, hidden or not


def stream_of_products(notes: Iterable[Note]) -> int:
    """Returns the stream that runs most matrix products."""
    streams = Counter(note.stream for note in notes if is_product(note))
    return streams.most_common(1)[0][0]


def is_product(note: Note) -> bool:
    return note.kind == "K" and note.name.startswith("gemm")


def play(
    notes: list[Note],
    kernel_s: KernelSeconds,
    collective_s: CollectiveSeconds,
    begin: int = 0,
) -> Played:
    """Returns the seconds of the calls from number `begin` on, which follow the earlier ones."""
    compute = stream_of_products(notes)
    streams: dict[int, Moment] = {}
    events: dict[int, Moment] = {}
    computed = Counter[str]()
    exposed = Counter[str]()
    sent = Counter[str]()
    start = 0.0
    for number, note in enumerate(notes):
        if number == begin:
            start = streams.get(compute, Moment()).at
        stream = streams.get(note.stream, Moment())
        if note.kind == "R":
            events[note.event] = stream
        elif note.kind == "W":
            event = events.get(note.event, Moment())
            late_s = event.at - stream.at
            if late_s <= 0.0:
                continue
            streams[note.stream] = event
            if note.stream == compute and number >= begin:
                exposed[event.label] += late_s
        elif note.kind == "K":
            seconds = kernel_s(note)
            streams[note.stream] = Moment(stream.at + seconds, "" if seconds else stream.label)
            if note.stream == compute and number >= begin:
                computed[""] += seconds
        elif note.kind == "N" and note.stream:
            label, seconds = collective_s(note)
            streams[note.stream] = Moment(stream.at + seconds, label)
            if number >= begin:
                sent[label] += seconds
    end = streams[compute].at
    return Played(end - start, computed[""], dict(exposed), dict(sent))
