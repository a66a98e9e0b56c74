"""How long tests wait for what needs the processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

#: Every wait looks for its condition and ends with it, so on a busy machine a test loses nothing
#: but time.
PATIENCE_S = 300.0

Found = TypeVar("Found")


def wait_for(
    condition: Callable[[], Found], timeout_s: float = PATIENCE_S, what: str = "condition"
) -> Found:
    """The first true value of `condition()`; AssertionError when it stays false."""
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} did not come within {timeout_s} s"
        time.sleep(0.02)
    return value
