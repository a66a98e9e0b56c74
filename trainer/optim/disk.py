"""Master weights and moments on a disk, of which a bounded part is in memory (ZeRO-Infinity, arXiv
2104.07857).

The state is one file, cut into chunks. A chunk holds the same elements of the master weights and of
each moment, one after the other. An update takes the chunks in the order in which the next forward
needs the weights. While a chunk is computed, later ones are read, earlier ones are written
(`trainer.host.ring`), and the gradient of the next one is copied. So memory holds a fixed number of
chunks, whatever the size of the model or of a layer. The last chunks of an update are written, and
the first ones of the next update are read, during the forward after it.

The file has no name, so its space is freed however the process ends. State survives in checkpoints,
which are written from the file and read into it through a mapping, page by page.
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
    """Elements [start, stop) of a bucket's shard, and the offset of their state in the file."""

    bucket: int
    start: int
    stop: int
    offset: int  # bytes
    stride: int  # bytes from one kind of state to the next


class DiskOptimizer:
    """A `ShardedOptimizer` with its state on a disk, for rules that update each element alone."""

    def __init__(
        self,
        buckets: Sharding,
        rules: Rules,
        master_dtype: torch.dtype,
        *,
        folder: Path,
        buffer_bytes: int,
        host: HostMemory,
    ):
        """`folder` receives the file; `buffer_bytes` is the most host memory to use. Raises
        LayoutError for whole matrices, narrow state and too small a buffer, DiskError if the file
        cannot be made large enough."""
        if rules.matrices is not None or rules.state:
            raise LayoutError(
                "a disk holds wide state, in chunks that cut matrices: train.offload=host"
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
        self._grad_buffers = [host.blocks(width) for _ in range(GRADIENTS)]
        self.file = StateFile(folder, self.bytes, host.requests)
        self.ring = Ring(
            self.file,
            [self._record(chunk) for chunk in self.chunks],
            slots,
        )
        self.step_count = 0
        self.copied: torch.cuda.Event | None = None
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="offload-gradient")
        self._fill(slots[0])

    def _cut(self) -> tuple[list[Chunk], int]:
        """Returns the chunks in forward order, and the bytes of the file."""
        chunks = list[Chunk]()
        offset = 0
        for index, bucket in reversed(list(enumerate(self.buckets.buckets))):
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
        """Returns the 1-D tensors of a chunk's state in its slot."""
        size = (chunk.stop - chunk.start) * self.dtype.itemsize
        return [slot[at * chunk.stride :][:size].view(self.dtype) for at in range(len(self.kinds))]

    def _weights(self, chunk: Chunk) -> Tensor:
        return self.buckets.buckets[chunk.bucket].param_shard[chunk.start : chunk.stop]

    @torch.no_grad()
    def _fill(self, slot: Tensor) -> None:
        """Writes the initial state: the weights as they are, moments of zero."""
        for chunk in self.chunks:
            master, *moments = self._views(chunk, slot)
            self.host.read(self._weights(chunk), master)
            for moment in moments:
                moment.zero_()
            self.file.write(slot[: self._record(chunk).size], chunk.offset)

    # -------------------------------------------------------------------------------------------
    #     the update

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, finite: Tensor) -> None:
        """Updates like `ShardedOptimizer.step`, but waits for the device. Raises DiskError."""
        if not finite:
            return
        factor = float(grad_scale)
        self.step_count += 1
        update = Update(
            lr,
            torch.tensor(float(self.step_count)),
            torch.zeros(()),
        )
        grads = list[Future[Tensor]]()
        stored = list[Future[None]]()
        gathered = 0
        try:
            for number in range(min(GRADIENTS, len(self.chunks))):
                grads.append(self._copier.submit(self._read_grad, number))
            for number, chunk in enumerate(self.chunks):
                slot = self.ring.take()
                grad = grads[number].result()
                if factor != 1.0:
                    grad.mul_(factor)
                master = self._update(chunk, slot, grad, update)
                store = partial(self._store_weights, chunk, master, grad)
                stored.append(self.ring.give_back(store))
                following = number + GRADIENTS
                if following < len(self.chunks):
                    grads.append(self._copier.submit(self._read_grad, following, stored[-1]))
                gathered = self._gather(stored, gathered, wait=False)
            self._gather(stored, gathered, wait=True)
        finally:
            for read in grads:
                read.exception()  # no thread outlives this call

    def _update(
        self,
        chunk: Chunk,
        slot: Tensor,
        grad: Tensor,
        update: Update,
    ) -> Tensor:
        """Updates a chunk's state in its slot. Returns the master weights."""
        rule = self.rules.elements
        master, *moments = self._views(chunk, slot)
        shard = Shard(master, grad, dict(zip(rule.kinds, moments, strict=True)))
        rule.step(
            [shard],
            update,
            self.buckets.buckets[chunk.bucket].kind.decay,
        )
        return master

    def _read_grad(self, number: int, free: Future[None] | None = None) -> Tensor:
        """Copies a chunk's gradient to the host, once its buffer is `free`."""
        if free is not None:
            free.result()
        chunk = self.chunks[number]
        elements = chunk.stop - chunk.start
        buffer = self._grad_buffers[number % GRADIENTS].view(self.dtype)[:elements]
        with torch.no_grad():  # each thread has its own grad mode
            self.host.read(
                self.buckets.buckets[chunk.bucket].grad_shard[chunk.start : chunk.stop],
                buffer,
            )
        return buffer

    def _store_weights(self, chunk: Chunk, master: Tensor, buffer: Tensor) -> None:
        """Copies a chunk's weights to the device, narrowed in `buffer`, which held the gradient."""
        weights = self._weights(chunk)
        with torch.no_grad():
            if weights.dtype != master.dtype:
                master = (
                    buffer.view(torch.uint8)[: weights.nbytes].view(weights.dtype).copy_(master)
                )
            self.host.write(master, weights)

    def _gather(self, stored: list[Future[None]], done: int, wait: bool) -> int:
        """Gathers the buckets whose weights are on the device: in the same order on all ranks, if
        not at the same moment. `done` counts the chunks of earlier calls. Returns the new
        count."""
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
        """Yields the state like `ShardedOptimizer.slices`, through a mapping of the file: pages are
        loaded and dropped, nothing is copied."""
        self.ring.settle()
        file_bytes = self.file.mapped()
        width = self.dtype.itemsize
        for chunk in self.chunks:
            bucket = self.buckets.buckets[chunk.bucket]
            first = is_first_replica(self.buckets, bucket)
            for info, start, stop, at in param_ranges(bucket):
                low = max(at, chunk.start)
                high = min(at + stop - start, chunk.stop)
                for number, kind in enumerate(self.kinds if low < high else ()):
                    begin = chunk.offset + number * chunk.stride + (low - chunk.start) * width
                    view = file_bytes[begin : begin + (high - low) * width].view(self.dtype)
                    yield StateSlice(
                        info,
                        kind,
                        start=start + low - at,
                        stop=start + high - at,
                        tensor=view,
                        writes=first and info.owner,
                    )

    @torch.no_grad()
    def copy_masters_to_params(self, stale: bool = False) -> None:
        """Copies the master weights to the parameters on every rank, after a load into `slices`."""
        self.ring.settle()
        slot = self.ring.slots[0] if self.chunks else torch.empty(0)
        for chunk in self.chunks:
            self.file.read(slot[: self._record(chunk).size], chunk.offset)
            weights = self._weights(chunk)
            master = self._views(chunk, slot)[0]
            self.host.write(master.to(weights.dtype), weights)
        for bucket in reversed(self.buckets.buckets):
            self.buckets.gather(bucket)
        self.buckets.wait_params()

    def tensors(self) -> list[Tensor]:
        """Returns the state on the device in addition to the parameters: none."""
        return []
