"""Rows of a benchmark that may be cut off at any moment: on a rented card minutes are all there is.

Rows are measured in the order of what matters. The result file is complete JSON at every moment and
has each row as soon as it is measured, and null for a number that is not finite. A row that fails is
a row with its error, as is one that the limit stops, that the process did not survive, or that was
not reached. Rows after one that has lost the device are not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trainer.durable import write_atomic

#: How an error of a row that more time may measure begins.
LATE = "not measured: "
#: What the file says of a row until it is measured, or for ever if the process dies in it.
RUNNING = f"{LATE}the process ended while it was measured"
#: What the file says of a row whose turn has not come.
AHEAD = f"{LATE}not reached"
#: Seconds between the signals after the limit: an error that is raised in `__del__` or a callback
#: of C is lost.
REPEAT_S = 1.0
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
        self._is_armed = False

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
        previous = signal.signal(signal.SIGALRM, self._raise_out_of_time)
        try:
            self._is_armed = True
            signal.setitimer(signal.ITIMER_REAL, max(self.remaining_s, 1e-3), REPEAT_S)
            yield
        finally:
            self._is_armed = False  # a signal that comes between these lines raises nothing
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ends the process GRACE_S after the limit: a wait for the device inside the driver sees
        no signal."""
        if not self.minutes:
            yield
            return
        last_s = self.remaining_s + GRACE_S
        faulthandler.dump_traceback_later(last_s, exit=True, file=sys.__stderr__)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _raise_out_of_time(self, *_: object) -> None:
        is_on_its_way = isinstance(sys.exc_info()[1], OutOfTimeError)  # `finally` blocks may last
        if self._is_armed and not is_on_its_way:
            raise OutOfTimeError


class Series:
    """Measures rows into `record["rows"]`, and writes the record after each of them.

    `path`: the result file; None writes nothing. `show` makes a line of a row. `free` gives back
    what a row has held on the device, and raises RuntimeError if the device is lost.
    """

    def __init__(
        self,
        record: dict[str, Any],
        limit: Limit,
        path: Path | None,
        *,
        show: Callable[[Row], str] = str,
        free: Callable[[], None] = lambda: None,
    ):
        self.record = record
        self.limit = limit
        self._path = path
        self._show = show
        self._free = free
        self._name = ""
        self._so_far: Row = {}
        self._lost_in = ""
        self.rows: dict[str, Row] = record.setdefault("rows", {})

    def expect(self, names: Iterable[str]) -> None:
        """Names the rows that will be measured: if the process dies, the file has them."""
        for name in names:
            self.rows.setdefault(name, {"failed": AHEAD})
        self.write()

    def measure(self, name: str, function: Callable[[], Row]) -> Row:
        """The row of this name: what `function` returns, or {"failed": why} with what it has
        passed to `note`."""
        if self._lost_in or not self.limit.remaining_s:  # `summary` names it
            over = f"{self.limit.minutes:g} minutes are over"
            lost = f"the device was lost in {self._lost_in}"
            if not self._has_numbers(name):  # an earlier run may have measured it
                self.rows[name] = {"failed": f"{LATE}{lost if self._lost_in else over}"}
                self.write()
            return self.rows[name]
        self._name = name
        self.note(self.rows[name] if self._has_numbers(name) else {})
        begin = time.monotonic()
        with self.limit.watched():
            row = self._guarded(function)
            row["row_s"] = time.monotonic() - begin
            self._keep(name, row)
            # Outside the handler: the error's traceback holds the tensors of the failed row.
            try:
                self._free()
            except RuntimeError as error:
                traceback.print_exc()
                self._lost_in = name
                row.setdefault("failed", error_line(error))
                self.write()
        return row

    def _has_numbers(self, name: str) -> bool:
        """Whether a row has more than the reason why it has not been measured."""
        return bool(self.rows.get(name, {}).keys() - {"failed", "row_s"})

    def note(self, row: Row) -> None:
        """Keeps what the row that is measured has so far, whatever becomes of the rest."""
        self._so_far = row
        self.rows[self._name] = row | {"failed": RUNNING}
        self.write()

    def _guarded(self, function: Callable[[], Row]) -> Row:
        try:
            with self.limit.enforced():
                return dict(function())
        except OutOfTimeError:
            failure = f"{LATE}stopped after {self.limit.minutes:g} minutes"
        except Exception as error:  # out of memory, a kernel that this card lacks: others go on
            traceback.print_exc()
            failure = error_line(error)
        return self._so_far | {"failed": failure}

    def _keep(self, name: str, row: Row) -> None:
        self.rows[name] = row
        self.write()
        if name in self.late:
            described = row["failed"]
        else:
            described = f"FAILED {row['failed']}" if "failed" in row else self._show(row)
        print(f"{name}: {described}", flush=True)

    def write(self) -> None:
        if self._path is not None:
            content = json.dumps(finite(self.record), indent=2, allow_nan=False)
            write_atomic(self._path, f"{content}\n".encode())

    @property
    def failed(self) -> list[str]:
        """The rows that went wrong; not those that the limit stopped."""
        return [
            name for name, row in self.rows.items() if "failed" in row and name not in self.late
        ]

    @property
    def late(self) -> list[str]:
        """The rows that were not measured, or not to their end, and did not go wrong."""
        return [
            name for name, row in self.rows.items() if str(row.get("failed", "")).startswith(LATE)
        ]

    def summary(self) -> str:
        """One line about all rows."""
        line = f"{len(self.rows)} rows, {len(self.failed)} failed"
        line += f": {', '.join(self.failed)}" if self.failed else ""
        if self.late:
            in_time = f"in {self.limit.minutes:g} minutes" if self.limit.minutes else "yet"
            lost = f"since the device was lost in {self._lost_in}"
            why = lost if self._lost_in else in_time
            line += f"; not measured {why}: {', '.join(self.late)}"
        return line


def earlier(path: Path | None, machine: dict[str, Any]) -> dict[str, Any]:
    """The record of a result file with rows, which others are added to; {} if there is none. Raises
    SystemExit if its rows are of another `machine`, of which a record has these fields."""
    record = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if "rows" not in record:
        return {}
    recorded = {name: record[name] for name in machine if name in record}
    if unlike := {name: value for name, value in recorded.items() if value != machine[name]}:
        raise SystemExit(f"{path}: its rows are of {unlike}; --out FILE keeps them apart")
    return record


def finite(value: Any) -> Any:
    """The value as JSON has it: null for a number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def error_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
