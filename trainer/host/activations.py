"""Activations of a rank away from its device, from forward to backward: in memory of the host, or
on its disk through a few rooms of host memory (ZeRO-R's Pa+cpu, arXiv 1910.02054, section 6.1;
ZeRO-Infinity, arXiv 2104.07857).

Backward needs them in another order than forward has put them, and a pipeline's schedule says in
which. The order of a step is recorded, and in the next one each activation is brought back while
the one before it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.plan.offload import BLOCK, ROOMS

from .file import StateFile
from .memory import HostMemory


class _Back(NamedTuple):
    """On its way to the device: the tensor, and the event or the job that ends with the event."""

    tensor: Tensor
    event: torch.cuda.Event | Future[torch.cuda.Event | None] | None


class Entry:
    """One activation that was put away; its place is free again when nobody refers to it."""

    __slots__ = ("__weakref__", "back", "dtype", "place", "serial", "shape", "stored")

    def __init__(self, serial: int, slot: int, tensor: Tensor):
        self.serial = serial
        self.place = slot
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.stored: Future[None] | None = None  # on its way to the disk
        self.back: _Back | None = None

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class ActivationStore:
    """Puts activations away and gets them back."""

    def __init__(self, host: HostMemory, folder: Path | None = None):
        """`folder`: of a disk; None: in memory of the host."""
        self.host = host
        self.folder = folder
        self.on_fetch: Callable[[Tensor], None] = lambda tensor: (
            None
        )  # told of each tensor that comes back
        self._places = dict[int, _Places]()  # by size in bytes
        self._away = dict[int, weakref.ref[Entry]]()  # put and not used yet, by serial number
        self._puts = self._start = (
            0  # serial numbers: the next, and the first since nothing was away
        )
        self._used = list[int]()
        self._before = list[int]()  # in the order of use, counted from `_start`: now, before
        self._alike = False  # so far the order is that of before

    def put(self, tensor: Tensor) -> Entry:
        """Start to copy `tensor` away. Raises DiskError, MemoryError."""
        if not self._away:  # as at the start of a step
            self._start = self._puts
            self._before = self._used
            self._used = []
            self._alike = True
        if (slots := self._places.get(tensor.nbytes)) is None:
            slots = self._places[tensor.nbytes] = _Places(self.host, tensor.nbytes, self.folder)
        entry = Entry(self._puts, slots.take(), tensor)
        self._away[entry.serial] = weakref.ref(entry)
        weakref.finalize(entry, self._release, slots, entry.place, entry.serial)
        self._puts += 1
        slots.store(entry, tensor)
        if entry.serial == self._following():
            slots.fetch(entry)
        return entry

    def get(self, entry: Entry) -> Tensor:
        """The activation on the device; the next one starts to come back. Raises DiskError."""
        if entry.back is None:
            self._places[entry.nbytes].fetch(entry)
        back = entry.back
        entry.back = None
        assert back is not None
        if self._away.pop(entry.serial, None) is not None:  # else it is recomputed a second time
            self._alike = self._alike and entry.serial == self._following()
            self._used.append(entry.serial - self._start)
            following = self._away.get(self._following())
            coming = following() if following is not None else None
            if coming is not None and coming.back is None:
                self._places[coming.nbytes].fetch(coming)
        event = back.event.result() if isinstance(back.event, Future) else back.event
        self.on_fetch(back.tensor)
        return self.host.arrived(back.tensor, event)

    def _following(self) -> int:
        """What is used next, if it is as before; else -1."""
        used_count = len(self._used)
        return self._start + self._before[used_count] if self._alike and used_count < len(self._before) else -1

    def _release(self, slots: _Places, slot: int, serial: int) -> None:
        self._away.pop(serial, None)
        slots.free.append(slot)


class _Places:
    """Places for activations of `size` bytes, made as they are needed, and used again."""

    def __init__(self, host: HostMemory, size: int, folder: Path | None):
        self.host = host
        self.size = size
        self.free = list[int]()
        self._made = 0
        self._memory = list[Tensor]()  # of the host: a place each
        self._file = None
        self._block = -(-size // BLOCK) * BLOCK
        if folder is not None:
            self._file = StateFile(folder, 0, host.requests)
            self._rooms = [host.blocks(self._block) for _ in range(ROOMS)]
            self._lanes = [
                ThreadPoolExecutor(1, thread_name_prefix="offload-activation") for _ in range(ROOMS)
            ]
            self._turns = 0  # of rooms, by activations that pass

    def take(self) -> int:
        """A place that nobody uses."""
        if self.free:
            return self.free.pop()
        self._made += 1
        if self._file is None:
            self._memory.append(self.host.zeros(self.size, torch.uint8))
        else:
            self._file.grow(self._made * self._block)
        return self._made - 1

    def store(self, entry: Entry, tensor: Tensor) -> None:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        file = self._file
        if file is None:
            self.host.take(self._memory[entry.place], data)
            return
        room, lane = self._room()
        lane.submit(lambda: None).result()  # what was there before is on the disk, or on the device
        copied = self.host.take(room[: self.size], data)

        def write() -> None:
            self.host.wait_for(copied)
            file.write(room, entry.place * self._block)

        entry.stored = lane.submit(write)

    def fetch(self, entry: Entry) -> None:
        """Start to bring it back."""
        target = self.host.room_for(entry.shape, entry.dtype)
        file = self._file
        if file is None:
            entry.back = _Back(target, self.host.bring(self._memory[entry.place], target))
            return
        room, lane = self._room()

        def read() -> torch.cuda.Event | None:
            if entry.stored is not None:
                entry.stored.result()
            file.read(room, entry.place * self._block)
            event = self.host.bring(room[: self.size], target)
            self.host.wait_for(event)  # the room is used again
            return event

        entry.back = _Back(target, lane.submit(read))

    def _room(self) -> tuple[Tensor, ThreadPoolExecutor]:
        """The room whose turn it is, and the thread that uses it."""
        at = self._turns % ROOMS
        self._turns = self._turns + 1
        return self._rooms[at], self._lanes[at]
