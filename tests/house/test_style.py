"""How the code reads, room by room: the limits of tests/house/style_limits.csv, which only fall."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.house.style import PLACEHOLDERS, bound_names, measures, read_limits, rooms_style

TESTS = Path(__file__).parent.parent

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


def test_names_of_the_tests_say_what_they_hold():
    """The limits above are those of rooms. Of the names in tests, at most 0.5 % are placeholders."""
    names = Counter[str]()
    for path in TESTS.rglob("*.py"):
        names.update(bound_names(ast.parse(path.read_text())))
    placeholders = {name: count for name, count in names.items() if name in PLACEHOLDERS}
    assert sum(placeholders.values()) <= names.total() / 200, placeholders
