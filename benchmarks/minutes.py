"""Rows of a benchmark that may be cut off at any moment: on a rented card minutes are all there is.

Rows are measured in the order of what matters. The result file is complete JSON at every moment and
has each row as soon as it is measured. A row that fails is a row with its error, as is one that the
limit stops, that the process did not survive, or that was not reached.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.durable import write_atomic

#: What the file says of a row until it is measured, or for ever if the process dies in it.
RUNNING = "the process ended while it was measured"
#: How an error of a row that was not measured for lack of time begins.
LATE = "not measured: "
#: Seconds after the limit when a call that no signal can interrupt ends the process.
GRACE_S = 30.0
Row = dict[str, Any]


def add_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="stop after so many minutes; what is not measured then is named (default: no limit)",
    )


class OutOfTimeError(BaseException):
    """The limit has come while a row was measured. No handler of a measured program takes it."""


class Limit:
    """The moment at which everything must have ended; `minutes` 0: never."""

    def __init__(self, minutes: float):
        self.minutes = minutes
        self._end = time.monotonic() + 60.0 * minutes if minutes else float("inf")

    @property
    def remaining_s(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def share_s(self, most_s: float) -> float:
        """Seconds for a row that may hang: half of what remains, so that others come after it."""
        return min(most_s, max(self.remaining_s / 2, 1.0))

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Raises OutOfTimeError inside the block at the limit, on the main thread."""
        if not self.minutes:
            yield
            return
        previous = signal.signal(signal.SIGALRM, _raise_out_of_time)
        try:
            # A wait for the device inside the driver sees no signal.
            last_s = self.remaining_s + GRACE_S
            faulthandler.dump_traceback_later(last_s, exit=True, file=sys.__stderr__)
            signal.setitimer(signal.ITIMER_REAL, max(self.remaining_s, 1e-3))
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous)
            faulthandler.cancel_dump_traceback_later()


def _raise_out_of_time(*_: object) -> None:
    raise OutOfTimeError


class Series:
    """Measures rows into `record[key]`, and writes the record after each of them.

    `path`: the result file; None writes nothing. `show` makes a line of a row. `free` gives back
    what a row has held on the device.
    """

    def __init__(
        self,
        record: dict[str, Any],
        limit: Limit,
        path: Path | None,
        *,
        key: str = "rows",
        show: Callable[[Row], str] = str,
        free: Callable[[], None] = lambda: None,
    ):
        self.record = record
        self.limit = limit
        self._path = path
        self._key = key
        self._show = show
        self._free = free
        self.rows: dict[str, Row] = record.setdefault(key, {})

    def measure(self, name: str, function: Callable[[], Row]) -> Row:
        """The row of this name: what `function` returns, or {"failed": why}."""
        if not self.limit.remaining_s:  # `summary` names it
            self.rows[name] = {"failed": f"{LATE}{self.limit.minutes:g} minutes are over"}
            self.write()
            return self.rows[name]
        self.rows[name] = {"failed": RUNNING}
        self.write()
        begin = time.monotonic()
        row = self._guarded(function)
        row["row_s"] = time.monotonic() - begin
        return self._keep(name, row)

    def _guarded(self, function: Callable[[], Row]) -> Row:
        try:
            with self.limit.enforced():
                row = dict(function())
        except OutOfTimeError:
            row = {"failed": f"{LATE}stopped after {self.limit.minutes:g} minutes"}
        except Exception as error:  # out of memory, a kernel that this card lacks: others go on
            traceback.print_exc()
            row = {"failed": error_line(error)}
        # Outside the handler: the error's traceback holds the tensors of the failed row.
        with contextlib.suppress(RuntimeError):  # a device that is lost fails here as well
            self._free()
        return row

    def _keep(self, name: str, row: Row) -> Row:
        self.rows[name] = row
        self.write()
        if name in self.late:
            described = row["failed"]
        else:
            described = f"FAILED {row['failed']}" if "failed" in row else self._show(row)
        print(f"{name}: {described}", flush=True)
        return row

    def write(self) -> None:
        if self._path is not None:
            content = json.dumps(self.record, indent=2) + "\n"
            write_atomic(self._path, content.encode())

    @property
    def failed(self) -> list[str]:
        """The rows that went wrong; not those that the limit stopped."""
        return [
            name for name, row in self.rows.items() if "failed" in row and name not in self.late
        ]

    @property
    def late(self) -> list[str]:
        """The rows that the limit left without a measurement."""
        return [
            name for name, row in self.rows.items() if str(row.get("failed", "")).startswith(LATE)
        ]

    def summary(self) -> str:
        """One line about all rows."""
        line = f"{len(self.rows)} rows, {len(self.failed)} failed"
        line += f": {', '.join(self.failed)}" if self.failed else ""
        if self.late:
            line += f"; not measured in {self.limit.minutes:g} minutes: {', '.join(self.late)}"
        return line


def error_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
