"""Records of a file that pass through a bounded buffer, again and again in the same order: read
ahead, written behind.

Whoever uses them takes one record after the other and gives each back. A record that was given back
is written, and then the next one in the order is read to its place, around the end of the file: so
the first records of a next round are read while something else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from .file import StateFile


class Record(NamedTuple):
    """Where it lies in the file, in bytes."""

    offset: int
    size: int


class Ring:
    """`records` of `file` in `slots`, each of which holds any of them. One thread a slot, which
    writes what was there before it reads."""

    def __init__(self, file: StateFile, records: Sequence[Record], slots: Sequence[Tensor]):
        self.file = file
        self.records = records
        self.slots = slots[: len(records)]
        self._lanes = [
            ThreadPoolExecutor(1, thread_name_prefix=f"offload-slot{slot}")
            for slot in range(len(self.slots))
        ]
        self._ready: list[Future[None] | None] = [None] * len(
            self.slots
        )  # its next record is there
        self._written = dict[int, Future[None]]()  # by record
        self._taken = 0  # records so far, over all rounds

    def read_ahead(self) -> None:
        """Start to read as many of the next records as there are slots, if they are not on their
        way."""
        for number in range(self._taken, self._taken + len(self.slots)):
            if self._ready[number % len(self.slots)] is None:
                self._start_read(number)

    def _start_read(self, number: int) -> None:
        slot = number % len(self.slots)
        self._ready[slot] = self._lanes[slot].submit(self._read, number)

    def _read(self, number: int) -> None:
        """Another slot may still be writing what the same record held a round ago."""
        index = number % len(self.records)
        if index in self._written:
            self._written[index].result()
        record = self.records[index]
        self.file.read(self.slots[number % len(self.slots)][: record.size], record.offset)

    def take(self) -> Tensor:
        """The slot of the next record, when its bytes are there. Raises DiskError, of earlier
        writes too."""
        self.read_ahead()
        slot = self._taken % len(self.slots)
        ready = self._ready[slot]
        assert ready is not None
        ready.result()
        return self.slots[slot]

    def give_back(self, use: Callable[[], None]) -> Future[None]:
        """In another thread, call `use`, write the record that was taken last, and read the next
        one to its place. Returned: when `use` is done."""
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
        """Wait until all is in the file, and forget what was read ahead: others may read and change
        the file now. Raises DiskError."""
        transfers = [pending for pending in (*self._written.values(), *self._ready) if pending is not None]
        self._written, self._ready, self._taken = {}, [None] * len(self.slots), 0
        failed = [error for error in [pending.exception() for pending in transfers] if error is not None]
        if failed:
            raise failed[0]
