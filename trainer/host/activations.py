"""Offloads a rank's activations between forward and backward: to host memory, or to disk through a
few buffers of host memory (ZeRO-R's Pa+cpu, arXiv 1910.02054, section 6.1; ZeRO-Infinity, arXiv
2104.07857).

Backward uses activations in another order than forward stores them, which depends on the pipeline's
schedule. The store records the order of a step, and in the next step fetches each activation while
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


class _Fetch(NamedTuple):
    """An activation on its way to the device: its tensor, and the event after the copy, or the job
    that returns the event."""

    tensor: Tensor
    event: torch.cuda.Event | Future[torch.cuda.Event | None] | None


class Entry:
    """An offloaded activation; its slot becomes free when nothing refers to the entry."""

    __slots__ = ("__weakref__", "dtype", "fetch", "serial", "shape", "slot", "stored")

    def __init__(self, serial: int, slot: int, tensor: Tensor):
        self.serial = serial
        self.slot = slot
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.stored: Future[None] | None = None  # on its way to the disk
        self.fetch: _Fetch | None = None

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class ActivationStore:
    """Offloads activations and returns them to the device."""

    def __init__(self, host: HostMemory, folder: Path | None = None):
        """`folder` is a folder of a disk, or None for host memory."""
        self.host = host
        self.folder = folder
        #: called with each tensor that is back on the device
        self.on_fetch: Callable[[Tensor], None] = lambda tensor: None
        self._slots = dict[int, _Slots]()  # by size in bytes
        self._offloaded = dict[int, weakref.ref[Entry]]()  # not used yet, by serial number
        self._puts = 0  # the next serial number
        self._step_start = 0  # the first serial number since nothing was offloaded
        # Serial numbers in the order of use, counted from `_step_start`:
        self._used = list[int]()  # of this step
        self._last_used = list[int]()  # of the step before
        self._same_order = False  # whether this step has so far used the order of the last

    def put(self, tensor: Tensor) -> Entry:
        """Starts to offload `tensor`. Raises DiskError, MemoryError."""
        if not self._offloaded:  # as at the start of a step
            self._step_start = self._puts
            self._last_used = self._used
            self._used = []
            self._same_order = True
        slots = self._slots.get(tensor.nbytes)
        if slots is None:
            slots = _Slots(self.host, tensor.nbytes, self.folder)
            self._slots[tensor.nbytes] = slots
        entry = Entry(self._puts, slots.take(), tensor)
        self._offloaded[entry.serial] = weakref.ref(entry)
        weakref.finalize(
            entry,
            self._release,
            slots,
            entry.slot,
            entry.serial,
        )
        self._puts += 1
        slots.store(entry, tensor)
        if entry.serial == self._following():
            slots.fetch(entry)
        return entry

    def get(self, entry: Entry) -> Tensor:
        """Returns the activation on the device, and starts to fetch the next one. Raises
        DiskError."""
        if entry.fetch is None:
            self._slots[entry.nbytes].fetch(entry)
        fetch = entry.fetch
        entry.fetch = None
        assert fetch is not None
        # A second recomputation finds its activation used already.
        if self._offloaded.pop(entry.serial, None) is not None:
            self._same_order = self._same_order and entry.serial == self._following()
            self._used.append(entry.serial - self._step_start)
            self._fetch_following()
        event = fetch.event.result() if isinstance(fetch.event, Future) else fetch.event
        self.on_fetch(fetch.tensor)
        return self.host.arrived(fetch.tensor, event)

    def _fetch_following(self) -> None:
        reference = self._offloaded.get(self._following())
        following = reference() if reference is not None else None
        if following is not None and following.fetch is None:
            self._slots[following.nbytes].fetch(following)

    def _following(self) -> int:
        """Returns the serial number that is used next if this step repeats the order of the last,
        else -1."""
        used_count = len(self._used)
        if not self._same_order or used_count >= len(self._last_used):
            return -1
        return self._step_start + self._last_used[used_count]

    def _release(self, slots: _Slots, slot: int, serial: int) -> None:
        self._offloaded.pop(serial, None)
        slots.free.append(slot)


class _Slots:
    """Slots for activations of `size` bytes, allocated as needed and used repeatedly."""

    def __init__(self, host: HostMemory, size: int, folder: Path | None):
        self.host = host
        self.size = size
        self.free = list[int]()
        self._count = 0
        self._memory = list[Tensor]()  # host memory, one tensor per slot
        self._file = None
        self._block = -(-size // BLOCK) * BLOCK
        if folder is not None:
            self._file = StateFile(folder, 0, host.requests)
            self._buffers = [host.blocks(self._block) for _ in range(ROOMS)]
            self._threads = [
                ThreadPoolExecutor(1, thread_name_prefix="offload-activation") for _ in range(ROOMS)
            ]
            self._transfers = 0

    def take(self) -> int:
        """Returns the number of a free slot."""
        if self.free:
            return self.free.pop()
        self._count += 1
        if self._file is None:
            self._memory.append(self.host.zeros(self.size, torch.uint8))
        else:
            self._file.grow(self._count * self._block)
        return self._count - 1

    def store(self, entry: Entry, tensor: Tensor) -> None:
        """Starts to copy `tensor` to the entry's slot."""
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        file = self._file
        if file is None:
            self.host.take(self._memory[entry.slot], data)
            return
        buffer, thread = self._next_buffer()
        thread.submit(lambda: None).result()  # the buffer's last transfer is complete
        copied = self.host.take(buffer[: self.size], data)

        def write() -> None:
            self.host.wait_for(copied)
            file.write(buffer, entry.slot * self._block)

        entry.stored = thread.submit(write)

    def fetch(self, entry: Entry) -> None:
        """Starts to copy an activation back to the device."""
        target = self.host.device_tensor(entry.shape, entry.dtype)
        file = self._file
        if file is None:
            entry.fetch = _Fetch(
                target,
                self.host.bring(self._memory[entry.slot], target),
            )
            return
        buffer, thread = self._next_buffer()

        def read() -> torch.cuda.Event | None:
            if entry.stored is not None:
                entry.stored.result()
            file.read(buffer, entry.slot * self._block)
            event = self.host.bring(buffer[: self.size], target)
            self.host.wait_for(event)  # the buffer is used again
            return event

        entry.fetch = _Fetch(target, thread.submit(read))

    def _next_buffer(self) -> tuple[Tensor, ThreadPoolExecutor]:
        """Returns the next buffer in turn, and the thread that uses it."""
        index = self._transfers % ROOMS
        self._transfers += 1
        return self._buffers[index], self._threads[index]
