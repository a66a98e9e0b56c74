"""How the code reads, room by room: the limits of tests/house/style_limits.csv, which only fall."""

from __future__ import annotations

from tests.house.style import measures, read_limits, rooms_style

#: A limit may be this much above what a room has reached before it has to be lowered.
SLACK = 0.05


def test_no_room_reads_worse_than_its_limits():
    limits = read_limits()
    styles = rooms_style()
    worse = [
        f"{room}: {name} is {value:g}, at most {limits[room][name]:g}"
        for room, style in styles.items()
        for name, value in measures(style).items()
        if room in limits and value > limits[room][name]
    ]
    assert worse == []
    assert styles.keys() == limits.keys(), "python -m tests.house.style --lower"


def test_limits_follow_what_was_reached():
    limits = read_limits()
    loose = [
        f"{room}: {name} is {value:g}, its limit {limits[room][name]:g}"
        for room, style in rooms_style().items()
        for name, value in measures(style).items()
        if value + max(1.0, value * SLACK) < limits[room][name]
    ]
    assert loose == [], "python -m tests.house.style --lower"
