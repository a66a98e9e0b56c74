"""Numbers of nodes as users type them: `4`, or a range, which is `2..4` or torchrun's `2:4`."""

from __future__ import annotations

import re

from orchestrator.errors import OrchError

MAX_SIZES = 256  # the most sizes that one range may hold
RULE = "a number of nodes like 4, or a range like 4..8 or 4:8"
COUNT = re.compile(r"[1-9][0-9]{0,6}")
RANGE = re.compile(rf"({COUNT.pattern})(?:\.\.|:)({COUNT.pattern})")


def canonical(typed: str) -> str:
    """Returns the spelling of a range that plans and messages use: `2:4` -> `2..4`."""
    return typed.replace(":", "..")


def node_range(typed: str, key: str = "nodes=") -> tuple[int, int]:
    """Parses a number of nodes or a range: `4` -> (4, 4), `4..8` and `4:8` -> (4, 8).

    `key`: the words before the value on the command line, for messages. Raises OrchError (64) if
    the text is neither, and if the range is empty or longer than `MAX_SIZES`.
    """
    if COUNT.fullmatch(typed):
        return int(typed), int(typed)
    bounds = RANGE.fullmatch(typed)
    if bounds is None:
        raise OrchError(f"'{key}{typed}': must be {RULE}, not '{typed}'")
    first, last = map(int, bounds.groups())
    shown = f"{key}{canonical(typed)}"
    if first > last:
        raise OrchError(f"{shown} is empty: the smaller number comes first")
    if last - first >= MAX_SIZES:
        raise OrchError(f"{shown} holds {last - first + 1} sizes, at most {MAX_SIZES} are planned")
    return first, last
