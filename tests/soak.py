"""`python -m tests.soak COUNT`: `make test` again and again, every second time on a machine that is
made busy.

Prints a row for docs/testing.md after each run: date, load, what else ran, seconds, and pytest's
own last lines. Ends with 1 if any run failed.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUSY_LOOPS = 4
_COUNTS = re.compile(r"^\d+ (?:passed|failed).* in .*$", re.M)


@contextlib.contextmanager
def crowd(folder: Path) -> Iterator[None]:
    """Inside, busy loops and a writer of a gigabyte a time compete for the machine."""
    endless = "while :; do :; done"
    writing = f"while :; do dd if=/dev/zero of={folder}/block bs=1M count=1024 conv=fsync; done"
    commands = [endless] * BUSY_LOOPS + [writing]
    crowd = [
        subprocess.Popen(["bash", "-c", command], stderr=subprocess.DEVNULL, start_new_session=True)
        for command in commands
    ]
    try:
        yield
    finally:
        for process in crowd:
            os.killpg(process.pid, 9)
            process.wait()


def main(count: int) -> int:
    failed = 0
    print("| date | beside | load | seconds | tests |\n|---|---|---|---|---|", flush=True)
    for index in range(count):
        busy = index % 2 == 1
        began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="orch-soak-") as folder,
            contextlib.ExitStack() as stack,
        ):
            if busy:
                stack.enter_context(crowd(Path(folder)))
            done = subprocess.run(["make", "test"], cwd=ROOT, capture_output=True, text=True)
        seconds = time.monotonic() - began
        failed += done.returncode != 0
        date = datetime.datetime.now(datetime.UTC).strftime("%F %H:%M")
        competitors = f"{BUSY_LOOPS} busy loops, dd" if busy else "nothing"
        counts = "; ".join(_COUNTS.findall(done.stdout)) or done.stdout[-200:].replace("\n", " ")
        load = f"{os.getloadavg()[2]:.1f}"
        print(f"| {date} | {competitors} | {load} | {seconds:.0f} | {counts} |", flush=True)
        if done.returncode:
            print(done.stdout[-20000:], file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
