"""Master weights and moments on a disk, of which a bounded part is in memory (ZeRO-Infinity, arXiv
2104.07857).

The state is one file, cut into chunks: the same elements of the master weights and of each moment,
beside each other. An update takes chunk after chunk in the order in which the next forward needs
the weights. While one is computed the next ones are read, those before are written
(`trainer.host.ring`), and the gradient of the next one is copied: whatever the size of the model or
of a single layer, the same few are in memory. The last chunks of an update are written, and the
first ones of the next update read, during the forward after it.

The file has no name: its space is free again however the process ends. What survives is a
checkpoint, which is written from the file and read into it through a mapping, page by page.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from orchestrator.plan.offload import BLOCK, GRADIENTS, SLOTS, chunk_elements
from trainer.errors import LayoutError
from trainer.host.file import StateFile
from trainer.host.memory import HostMemory
from trainer.host.ring import Record, Ring
from trainer.parallel.data.buckets import Sharding
from trainer.parallel.params import StateKind

from .rule import Rules, Shard, Update
from .sharded import StateSlice, is_first_replica, param_ranges


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
        """`folder`: where the file is made; `buffer_bytes`: of host memory, at most. Raises
        LayoutError for whole matrices and for too small a buffer, DiskError if the file cannot be
        made as large as needed."""
        if any(bucket.kind.whole for bucket in buckets.buckets):
            raise LayoutError(
                "an optimizer of whole matrices computes on the device: train.offload=none"
            )
        self.buckets = buckets
        self.rules = rules
        self.dtype = master_dtype
        self.kinds: tuple[StateKind, ...] = ("master", *rules.elements.kinds)
        self.chunk = chunk_elements(buffer_bytes, len(self.kinds), master_dtype.itemsize)
        if not self.chunk:
            raise LayoutError(
                f"train.offload_buffer_mib: {buffer_bytes} bytes hold no chunk of {BLOCK} bytes"
            )
        self.chunks, self.bytes = self._cut()
        self.host = host
        width = self.chunk * master_dtype.itemsize
        slots = [host.blocks(len(self.kinds) * width) for _ in range(SLOTS)]
        self._gradients = [host.blocks(width) for _ in range(GRADIENTS)]
        self.file = StateFile(folder, self.bytes, host.requests)
        self.ring = Ring(self.file, [self._record(chunk) for chunk in self.chunks], slots)
        self.step_count = 0
        self.copied: torch.cuda.Event | None = None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="offload-gradient")
        self._fill(slots[0])

    def _cut(self) -> tuple[list[Chunk], int]:
        chunks = list[Chunk]()
        offset = 0
        for index, bucket in reversed(list(enumerate(self.buckets.buckets))):  # in forward order
            numel = bucket.param_shard.numel()
            for start in range(0, numel, self.chunk):
                stop = min(start + self.chunk, numel)
                stride = -(-(stop - start) * self.dtype.itemsize // BLOCK) * BLOCK
                chunks.append(Chunk(index, start, stop, offset, stride))
                offset += stride * len(self.kinds)
        return chunks, offset

    def _record(self, chunk: Chunk) -> Record:
        return Record(chunk.offset, chunk.stride * len(self.kinds))

    def _views(self, chunk: Chunk, slot: Tensor) -> list[Tensor]:
        """A chunk's state in its slot: 1-D."""
        size = (chunk.stop - chunk.start) * self.dtype.itemsize
        return [slot[at * chunk.stride :][:size].view(self.dtype) for at in range(len(self.kinds))]

    def _weights(self, chunk: Chunk) -> Tensor:
        return self.buckets.buckets[chunk.bucket].param_shard[chunk.start : chunk.stop]

    @torch.no_grad()
    def _fill(self, slot: Tensor) -> None:
        """Write the first state: the weights as they are, moments of zero."""
        for chunk in self.chunks:
            master, *rest = self._views(chunk, slot)
            self.host.read(self._weights(chunk), master)
            for state in rest:
                state.zero_()
            self.file.write(slot[: self._record(chunk).size], chunk.offset)

    # -------------------------------------------------------------------------------------------
    #     the update

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, finite: Tensor) -> None:
        """As `ShardedOptimizer.step`; waits for the device. Raises DiskError."""
        if not finite:
            return
        factor = float(grad_scale)
        self.step_count += 1
        update = Update(lr, torch.tensor(float(self.step_count)), torch.zeros(()))
        copied = list[Future[Tensor]]()
        stored = list[Future[None]]()
        gathered = 0
        try:
            for number in range(min(GRADIENTS, len(self.chunks))):
                copied.append(self._copier.submit(self._gradient, number))
            for number, chunk in enumerate(self.chunks):
                slot = self.ring.take()
                grad = copied[number].result()
                master, *states = self._views(chunk, slot)
                if factor != 1.0:
                    grad.mul_(factor)
                shard = Shard(
                    master, grad, dict(zip(self.rules.elements.kinds, states, strict=True))
                )
                self.rules.elements.step(
                    [shard], update, self.buckets.buckets[chunk.bucket].kind.decay
                )
                stored.append(self.ring.give_back(partial(self._store, chunk, master, grad)))
                if number + GRADIENTS < len(self.chunks):
                    copied.append(
                        self._copier.submit(self._gradient, number + GRADIENTS, stored[-1])
                    )
                gathered = self._gather(stored, gathered, wait=False)
            self._gather(stored, gathered, wait=True)
        finally:
            for job in copied:
                job.exception()  # no thread goes on after this

    def _gradient(self, number: int, free: Future[None] | None = None) -> Tensor:
        """A chunk's gradient on the host, when its place is `free`."""
        if free is not None:
            free.result()
        chunk = self.chunks[number]
        buffer = self._gradients[number % GRADIENTS].view(self.dtype)[: chunk.stop - chunk.start]
        with torch.no_grad():  # known to each thread by itself
            self.host.read(
                self.buckets.buckets[chunk.bucket].grad_shard[chunk.start : chunk.stop], buffer
            )
        return buffer

    def _store(self, chunk: Chunk, master: Tensor, buffer: Tensor) -> None:
        """Give a chunk's weights back; they are narrowed in `room`, where the gradient was."""
        weights = self._weights(chunk)
        with torch.no_grad():
            if weights.dtype != master.dtype:
                master = (
                    buffer.view(torch.uint8)[: weights.nbytes].view(weights.dtype).copy_(master)
                )
            self.host.write(master, weights)

    def _gather(self, stored: list[Future[None]], done: int, wait: bool) -> int:
        """Gather the buckets whose weights are back, in the same order on all ranks, if not at the
        same moment. `done`: chunks that were seen before; returned: after this."""
        for job in stored[done:]:
            if not wait and not job.done():
                break
            job.result()
            chunk = self.chunks[done]
            done = done + 1
            bucket = self.buckets.buckets[chunk.bucket]
            if chunk.stop == bucket.param_shard.numel():
                self.buckets.gather(bucket)
        return done

    # -------------------------------------------------------------------------------------------
    #     checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """As `ShardedOptimizer.slices`, through a mapping of the file: pages come and go, nothing
        is copied."""
        self.ring.settle()
        file_bytes = self.file.mapped()
        for chunk in self.chunks:
            bucket = self.buckets.buckets[chunk.bucket]
            first = is_first_replica(self.buckets, bucket)
            for info, start, stop, at in param_ranges(bucket):
                low = max(at, chunk.start)
                high = min(at + stop - start, chunk.stop)
                for number, kind in enumerate(self.kinds if low < high else ()):
                    begin = (
                        chunk.offset
                        + number * chunk.stride
                        + (low - chunk.start) * self.dtype.itemsize
                    )
                    view = file_bytes[begin : begin + (high - low) * self.dtype.itemsize].view(
                        self.dtype
                    )
                    yield StateSlice(
                        info, kind, start + low - at, start + high - at, view, first and info.owner
                    )

    @torch.no_grad()
    def copy_masters_to_params(self, stale: bool = False) -> None:
        """After a load into `slices`: copy the master weights to the parameters, on every rank."""
        self.ring.settle()
        slot = self.ring.slots[0] if self.chunks else torch.empty(0)
        for chunk in self.chunks:
            self.file.read(slot[: self._record(chunk).size], chunk.offset)
            self.host.write(
                self._views(chunk, slot)[0].to(self._weights(chunk).dtype), self._weights(chunk)
            )
        for bucket in reversed(self.buckets.buckets):
            self.buckets.gather(bucket)
        self.buckets.wait_params()

    def tensors(self) -> list[Tensor]:
        """State on the device in addition to the parameters: none."""
        return []
