"""Master weights and moments on a disk, of which a bounded part is in memory (ZeRO-Infinity, arXiv 2104.07857).

The state is one file, cut into chunks: the same elements of the master weights and of each moment, beside each other.
An update reads chunk after chunk in the order in which the next forward needs the weights, computes, and writes it
back: three are in memory, one being read, one computed, one written, whatever the size of the model or of a single
layer. Reads and writes bypass the page cache where the file system can (O_DIRECT), from a thread each.

The file has no name: its space is free again however the process ends. What survives is a checkpoint, which is written
from the file and read into it through a mapping, page by page.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from orchestrator.plan.offload import BLOCK, SLOTS, chunk_elements
from trainer.errors import LayoutError
from trainer.host import HostMemory, StateFile
from trainer.parallel.data.buckets import ShardedBucket, Sharding
from trainer.parallel.params import StateKind

from .rule import Rules, Shard, Update
from .sharded import StateSlice, is_first_replica, pieces


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
            """State and gradient, when the chunk that was there has been written."""
            if number >= SLOTS:
                writes[number - SLOTS].result()
            chunk, slot = self.chunks[number], number % SLOTS
            self.file.read(self._record(chunk, slot), chunk.offset)
            with torch.no_grad():  # known to each thread by itself
                gradient = self.buckets.buckets[chunk.bucket].grad_shard
                self._views(chunk, slot)[-1].copy_(gradient[chunk.start : chunk.stop])

        def write(chunk: Chunk, slot: int) -> None:
            with torch.no_grad():
                self._weights(chunk).copy_(self._views(chunk, slot)[0])
            self.file.write(self._record(chunk, slot), chunk.offset)

        many, done = len(self.chunks), list[tuple[Future[None], ShardedBucket]]()
        try:
            reads += [self._reader.submit(read, number) for number in range(min(SLOTS, many))]
            for number, chunk in enumerate(self.chunks):
                slot, bucket = number % SLOTS, self.buckets.buckets[chunk.bucket]
                reads[number].result()
                self._update(chunk, slot, factor, update)
                writes.append(self._writer.submit(write, chunk, slot))
                if number + SLOTS < many:
                    reads.append(self._reader.submit(read, number + SLOTS))
                if chunk.stop == bucket.param_shard.numel():
                    done.append((writes[-1], bucket))
                while done and done[0][0].done():
                    self._gather(*done.pop(0))
            for last in done:
                self._gather(*last)
        finally:
            for job in (*reads, *writes):
                job.exception()  # no thread goes on after this
        self.seconds += perf_counter() - began
        self.moved += 2 * self.bytes

    def _gather(self, written: Future[None], bucket: ShardedBucket) -> None:
        """In the same order on all ranks, if not at the same moment."""
        written.result()
        self.buckets.gather(bucket)

    def _update(self, chunk: Chunk, slot: int, factor: float, update: Update) -> None:
        master, *states, grad = self._views(chunk, slot)
        if factor != 1.0:
            grad.mul_(factor)
        shard = Shard(master, grad, dict(zip(self.rules.elements.kinds, states, strict=True)))
        self.rules.elements.step([shard], update, self.buckets.buckets[chunk.bucket].kind.decay)

    # ------------------------------------------------------------------------------------------- checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """As `ShardedOptimizer.slices`, through a mapping of the file: pages come and go, nothing is copied."""
        whole = self.file.mapped()
        for chunk in self.chunks:
            bucket = self.buckets.buckets[chunk.bucket]
            first = is_first_replica(self.buckets, bucket)
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
