"""A ring buffer for the records of a file that are used repeatedly in the same order: it reads
ahead and writes behind.

The user takes one record after the other and gives each back. A record that was given back is
written, and then the next record in the order is read into its slot. After the last record the
first follows, so the first records of the next round are read while something else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from .file import StateFile


class Record(NamedTuple):
    """The position of a record in the file, in bytes."""

    offset: int
    size: int


class Ring:
    """Passes `records` of `file` through `slots`, each of which can hold any record. Each slot has
    a thread, which writes the slot's record before it reads the next."""

    def __init__(self, file: StateFile, records: Sequence[Record], slots: Sequence[Tensor]):
        self.file = file
        self.records = records
        self.slots = slots[: len(records)]
        self._lanes = [
            ThreadPoolExecutor(1, thread_name_prefix=f"offload-slot{slot}")
            for slot in range(len(self.slots))
        ]
        #: done when the slot's next record is read
        self._ready: list[Future[None] | None] = [None] * len(self.slots)
        self._written = dict[int, Future[None]]()  # by record
        self._taken = 0  # records so far, over all rounds

    def read_ahead(self) -> None:
        """Starts to read as many of the next records as there are slots, unless they are already
        being read."""
        for number in range(self._taken, self._taken + len(self.slots)):
            if self._ready[number % len(self.slots)] is None:
                self._start_read(number)

    def _start_read(self, number: int) -> None:
        slot = number % len(self.slots)
        self._ready[slot] = self._lanes[slot].submit(self._read, number)

    def _read(self, number: int) -> None:
        """Reads a record, after another slot has written what the record held in the last round."""
        index = number % len(self.records)
        if index in self._written:
            self._written[index].result()
        record = self.records[index]
        self.file.read(self.slots[number % len(self.slots)][: record.size], record.offset)

    def take(self) -> Tensor:
        """Returns the slot of the next record once it is read. Raises DiskError, also for earlier
        writes."""
        self.read_ahead()
        slot = self._taken % len(self.slots)
        ready = self._ready[slot]
        assert ready is not None
        ready.result()
        return self.slots[slot]

    def give_back(self, use: Callable[[], None]) -> Future[None]:
        """Calls `use` in another thread, writes the record that was taken last, and reads the next
        one into its slot. Returns the future of `use`."""
        number = self._taken
        lane = self._lanes[self._taken % len(self.slots)]
        used = lane.submit(use)
        self._written[number % len(self.records)] = lane.submit(self._write, number, used)
        self._start_read(number + len(self.slots))
        self._taken += 1
        return used

    def _write(self, number: int, used: Future[None]) -> None:
        used.result()
        record = self.records[number % len(self.records)]
        self.file.write(self.slots[number % len(self.slots)][: record.size], record.offset)

    def settle(self) -> None:
        """Waits until all records are in the file, and drops those that were read ahead: the caller
        may then read and change the file. Raises DiskError."""
        transfers = [
            pending for pending in (*self._written.values(), *self._ready) if pending is not None
        ]
        self._written = {}
        self._ready = [None] * len(self.slots)
        self._taken = 0
        errors = [pending.exception() for pending in transfers]
        if first_error := next(filter(None, errors), None):
            raise first_error
