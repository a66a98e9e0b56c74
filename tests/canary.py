"""`python -m tests.canary FILE`: how long a process that needs the processor for a moment waits for
it.

It sleeps for a tenth of a second again and again, and keeps in FILE the longest that it came late
in the last minute, in seconds. A test that fails shows it (tests/conftest.py), so that "starved"
and "wrong" can be told apart.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

TICK_S = 0.1
WINDOW_S = 60.0


def main(path: Path) -> None:
    late = deque[tuple[float, float]]()
    partial_file = path.with_suffix(".part")
    while True:
        due = time.monotonic() + TICK_S
        time.sleep(TICK_S)
        now = time.monotonic()
        late.append((now, now - due))
        while late[0][0] < now - WINDOW_S:
            late.popleft()
        partial_file.write_text(f"{max(seconds for _, seconds in late):.2f}")
        partial_file.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
