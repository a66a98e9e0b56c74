"""Master weights and moments on a disk, of which a bounded part is in memory (ZeRO-Infinity, arXiv 2104.07857).

The state is one file, cut into chunks: the same elements of the master weights and of each moment, beside each other.
An update reads chunk after chunk in the order in which the next forward needs the weights, computes, and writes it
back: three are in memory, one being read, one computed, one written, whatever the size of the model or of a single
layer. Reads and writes bypass the page cache where the file system can (O_DIRECT), from a thread each.

The file has no name: its space is free again however the process ends. What survives is a checkpoint, which is written
from the file and read into it through a mapping, page by page.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from orchestrator.plan.offload import BLOCK, SLOTS, chunk_elements
from trainer.errors import DiskError, LayoutError
from trainer.host import HostMemory
from trainer.parallel.data.buckets import Sharding
from trainer.parallel.params import StateKind

from .rule import Rules, Shard, Update
from .sharded import StateSlice, pieces

#: (descriptor, buffers, offset) -> bytes moved
Transfer = Callable[[int, list[memoryview], int], int]


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a bucket's shard, and where in the file their state begins."""

    bucket: int
    start: int
    stop: int
    offset: int  # bytes
    stride: int  # bytes from one kind of state to the next


class DiskOptimizer:
    """`ShardedOptimizer` for state on a disk. Rules that look at each element alone."""

    def __init__(self, buckets: Sharding, rules: Rules, master_dtype: torch.dtype, folder: Path, buffer_bytes: int,
                 host: HostMemory):  # fmt: skip
        """`folder`: where the file is made; `buffer_bytes`: of host memory, at most. Raises LayoutError for whole
        matrices and for too small a buffer, DiskError if the file cannot be made as large as needed."""
        if any(bucket.kind.whole for bucket in buckets.buckets):
            raise LayoutError("an optimizer of whole matrices computes on the device: train.offload=none")
        self.buckets, self.rules, self.dtype = buckets, rules, master_dtype
        self.kinds: tuple[StateKind, ...] = ("master", *rules.elements.kinds)
        self.chunk = chunk_elements(buffer_bytes, len(self.kinds), master_dtype.itemsize)
        if not self.chunk:
            raise LayoutError(f"train.offload_buffer_mib: {buffer_bytes} bytes hold no chunk of {BLOCK} bytes")
        self.chunks, self.bytes = self._cut()
        self.slots = [host.zeros(BLOCK + self._slot_bytes, torch.uint8) for _ in range(SLOTS)]
        self.file = StateFile(folder, self.bytes)
        self.step_count = 0
        self.copied: torch.cuda.Event | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="offload-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-write")
        self.seconds = 0.0  # of all updates; `moved` bytes were read and written in them
        self.moved = 0
        self._fill()

    @property
    def _slot_bytes(self) -> int:
        return (len(self.kinds) + 1) * self.chunk * self.dtype.itemsize  # and the gradient

    def _cut(self) -> tuple[list[Chunk], int]:
        found, offset = list[Chunk](), 0
        for index, bucket in reversed(list(enumerate(self.buckets.buckets))):  # in forward order
            numel = bucket.param_shard.numel()
            for start in range(0, numel, self.chunk):
                stop = min(start + self.chunk, numel)
                stride = -(-(stop - start) * self.dtype.itemsize // BLOCK) * BLOCK
                found.append(Chunk(index, start, stop, offset, stride))
                offset += stride * len(self.kinds)
        return found, offset

    def _views(self, chunk: Chunk, slot: int) -> list[Tensor]:
        """State and, last, room for the gradient of a chunk, in a slot: 1-D."""
        room = self._aligned(slot)
        count = chunk.stop - chunk.start
        size = count * self.dtype.itemsize
        starts = [at * chunk.stride for at in range(len(self.kinds))]
        starts.append(len(self.kinds) * self.chunk * self.dtype.itemsize)
        return [room[start : start + size].view(self.dtype) for start in starts]

    def _aligned(self, slot: int) -> Tensor:
        start = -self.slots[slot].data_ptr() % BLOCK
        return self.slots[slot][start : start + self._slot_bytes]

    def _record(self, chunk: Chunk, slot: int) -> Tensor:
        return self._aligned(slot)[: chunk.stride * len(self.kinds)]

    @torch.no_grad()
    def _fill(self) -> None:
        """Write the first state: the weights as they are, moments of zero."""
        for chunk in self.chunks:
            master, *rest = self._views(chunk, 0)
            master.copy_(self._weights(chunk))
            for state in rest:
                state.zero_()
            self.file.write(self._record(chunk, 0), chunk.offset)

    def _weights(self, chunk: Chunk) -> Tensor:
        return self.buckets.buckets[chunk.bucket].param_shard[chunk.start : chunk.stop]

    # ------------------------------------------------------------------------------------------- the update

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, finite: Tensor) -> None:
        """As `ShardedOptimizer.step`; waits for the device. Raises DiskError."""
        if not finite:
            return
        began, factor = perf_counter(), float(grad_scale)
        self.step_count += 1
        update = Update(lr, torch.tensor(float(self.step_count)), torch.zeros(()))
        reads, writes = list[Future[None]](), list[Future[None]]()

        def read(number: int) -> None:
            """When the chunk that was there has been written."""
            if number >= SLOTS:
                writes[number - SLOTS].result()
            chunk = self.chunks[number]
            self.file.read(self._record(chunk, number % SLOTS), chunk.offset)

        many = len(self.chunks)
        try:
            reads += [self._reader.submit(read, number) for number in range(min(SLOTS, many))]
            for number, chunk in enumerate(self.chunks):
                slot = number % SLOTS
                reads[number].result()
                self._update(chunk, slot, factor, update)
                writes.append(self._writer.submit(self.file.write, self._record(chunk, slot), chunk.offset))
                if number + SLOTS < many:
                    reads.append(self._reader.submit(read, number + SLOTS))
                if chunk.stop == self.buckets.buckets[chunk.bucket].param_shard.numel():
                    self.buckets.gather(self.buckets.buckets[chunk.bucket])
        finally:
            for job in (*reads, *writes):
                job.exception()  # no thread goes on after this
        for job in writes:
            job.result()
        self.seconds += perf_counter() - began
        self.moved += 2 * self.bytes

    def _update(self, chunk: Chunk, slot: int, factor: float, update: Update) -> None:
        bucket = self.buckets.buckets[chunk.bucket]
        master, *states, grad = self._views(chunk, slot)
        grad.copy_(bucket.grad_shard[chunk.start : chunk.stop])
        if factor != 1.0:
            grad.mul_(factor)
        shard = Shard(master, grad, dict(zip(self.rules.elements.kinds, states, strict=True)))
        self.rules.elements.step([shard], update, bucket.kind.decay)
        self._weights(chunk).copy_(master)

    # ------------------------------------------------------------------------------------------- checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """As `ShardedOptimizer.slices`, through a mapping of the file: pages come and go, nothing is copied."""
        whole = self.file.mapped()
        for chunk in self.chunks:
            bucket = self.buckets.buckets[chunk.bucket]
            groups = bucket.kind.groups
            first = self.buckets.mesh.index(groups.replica if self.buckets.zero else groups.grad) == 0
            for info, start, stop, at in pieces(bucket):
                low, high = max(at, chunk.start), min(at + stop - start, chunk.stop)
                for number, kind in enumerate(self.kinds if low < high else ()):
                    begin = chunk.offset + number * chunk.stride + (low - chunk.start) * self.dtype.itemsize
                    view = whole[begin : begin + (high - low) * self.dtype.itemsize].view(self.dtype)
                    yield StateSlice(info, kind, start + low - at, start + high - at, view, first and info.owner)

    @torch.no_grad()
    def publish(self) -> None:
        """After a load into `slices`: copy the master weights to the parameters, on every rank."""
        for chunk in self.chunks:
            self.file.read(self._record(chunk, 0), chunk.offset)
            self._weights(chunk).copy_(self._views(chunk, 0)[0])
        for bucket in reversed(self.buckets.buckets):
            self.buckets.gather(bucket)
        self.buckets.wait_params()

    def tensors(self) -> list[Tensor]:
        """State on the device in addition to the parameters: none."""
        return []


class StateFile:
    """A file without a name, of a fixed size, whose space is reserved. Errors are DiskErrors, one line each."""

    def __init__(self, folder: Path, size: int):
        """Raises DiskError."""
        self.folder, self.size = folder, size
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.fd, name = tempfile.mkstemp(prefix="state-", suffix=".offload", dir=folder)
            try:
                self.direct = self._open_direct(name)
            finally:
                os.unlink(name)
            if size:
                os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise self._failed("cannot hold the optimizer's state", error) from None

    def _open_direct(self, name: str) -> int:
        """A second descriptor that bypasses the page cache, or the first where the file system has no such thing."""
        try:
            return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return self.fd

    def _failed(self, what: str, error: OSError) -> DiskError:
        needs = f"{self.size / 2**30:.2f} GiB"
        return DiskError(f"train.offload_dir {self.folder} {what} ({needs}): {error.strerror or error}", error.errno)

    def read(self, into: Tensor, offset: int) -> None:
        """Fill 1-D bytes. Raises DiskError."""
        self._each(into, offset, os.preadv, "cannot be read")

    def write(self, data: Tensor, offset: int) -> None:
        """Write 1-D bytes. Raises DiskError."""
        self._each(data, offset, os.pwritev, "cannot be written")

    def _each(self, data: Tensor, offset: int, transfer: Transfer, what: str) -> None:
        view = data.numpy().data
        try:
            while view:
                done = transfer(self.direct, [view], offset)
                if not done:
                    raise OSError(errno.EIO, "the file is shorter than it was made")
                view, offset = view[done:], offset + done
        except OSError as error:
            raise self._failed(what, error) from None

    def mapped(self) -> Tensor:
        """The file's bytes as a 1-D tensor, in pages that the kernel may drop; released with the tensor."""
        if not self.size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)

    def close(self) -> None:
        """Give the space back."""
        for fd in {self.fd, self.direct}:
            os.close(fd)
