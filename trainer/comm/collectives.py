"""Collectives on the hot path, with counters of bytes and exposed time.

Every call names the axis it serves and the counter that records it; with a group of None (one
member) a collective costs nothing and returns its input. Bytes are those that one rank sends with
ring algorithms (Patarasuk & Yuan 2009; NCCL's rings): all-reduce 2(n-1)/n B, reduce-scatter and
all-gather (n-1)/n B with B the size of the whole buffer, point-to-point B. Seconds are exposed
time: how long the caller's thread (CPU) or stream (CUDA) waited.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import gloo

#: The links by which a rank reaches the experts of another: within an NVLink domain, or between
#: two.
LEVELS = ("nvlink", "network")


class TransferTrace(Protocol):
    """A recorder of transfers (`trainer.metrics.trace.StepTrace`)."""

    def transfer(
        self,
        name: str,
        axis: str,
        size: int,
        ranks: Sequence[int],
    ) -> None: ...

    def receive(self, axis: str, size: int, ranks: Sequence[int]) -> None:
        """Records a receive; `ranks`: the sender and the receiver."""

    def on_arrival(self, work: dist.Work | None) -> Callable[[], None]: ...


@dataclass
class CommCounter:
    """Bytes sent, exposed seconds and calls, by axis, since the last `take`."""

    gloo: bool = True  # on CPUs; False: on GPUs, with the collectives of NCCL
    measuring: bool = True  # on CUDA, by two events per wait; on a CPU always
    trace: TransferTrace | None = None  # records the transfers of traced steps
    subject: str = ""  # of the transfers that follow, for display
    started: int = 0  # transfers since the start
    waiting_in: tuple[str, str] | None = None  # (transfer, axis) that the caller's thread waits for
    last: str = ""  # the latest transfer
    #: Called before a wait, in which other work of this rank may run (`pipeline.turns`).
    before_wait: Callable[[], None] = lambda: None
    bytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    #: Bytes to experts, by level.
    levels: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def count_sent(
        self,
        operation: str,
        axis: str,
        size: int,
        group: dist.ProcessGroup,
        calls: int = 1,
        to: int | None = None,
    ) -> None:
        """Counts a transfer. `to`: the global rank that receives a message; None for a
        collective."""
        self.bytes[axis] += size
        self.calls[axis] += calls
        self.started += 1
        self.last = f"{operation} {self.subject}" if self.subject else operation
        if self.trace is not None:
            ranks = dist.get_process_group_ranks(group) if to is None else (dist.get_rank(), to)
            self.trace.transfer(self.last, axis, size, ranks)

    def on_arrival(self, work: dist.Work | None = None) -> Callable[[], None]:
        """Returns the function to call when the latest transfer has arrived."""
        return self.trace.on_arrival(work) if self.trace is not None else _nothing

    def waiting(self, axis: str, tensor: Tensor, operation: str = "") -> _Stopwatch:
        """Context manager that times a wait for `operation` (default: the latest transfer). On CUDA
        it records events and does not block the host."""
        return _Stopwatch(self, axis, tensor.is_cuda, operation or self.last)

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Context manager around a host wait for the device, which may itself wait for other
        ranks."""
        self.waiting_in = self.last, "device"
        try:
            yield
        finally:
            self.waiting_in = None

    def close(self) -> CommAccount:
        """Returns the account since the last call, and begins a new one."""
        closed = CommAccount(
            bytes=dict(self.bytes),
            waited=dict(self._seconds),
            events=self._events,
            levels=dict(self.levels),
        )
        self._events = []
        for account in (self.bytes, self.calls, self._seconds, self.levels):
            account.clear()
        return closed

    def take(self) -> tuple[dict[str, int], dict[str, float]]:
        """Returns (bytes, seconds) by axis since the last call, and resets both. On CUDA it waits
        for the recorded events."""
        closed = self.close()
        return closed.bytes, closed.seconds()


@dataclass(frozen=True)
class CommAccount:
    """The bytes that a step sent and the seconds that it waited, by axis."""

    bytes: dict[str, int]
    waited: dict[str, float]  # seconds of the host
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]]
    levels: dict[str, int]  # bytes to experts on other ranks, by level: "nvlink", "network"

    def seconds(self) -> dict[str, float]:
        """Returns exposed seconds by axis, and by level for transfers to experts. On CUDA it waits
        for events that have not happened yet."""
        seconds = defaultdict(float, self.waited)
        for axis, begin, end in self.events:
            if not end.query():
                end.synchronize()
            seconds[axis] += begin.elapsed_time(end) / 1e3
        return dict(seconds)


def _nothing() -> None:
    pass


class _Stopwatch:
    __slots__ = ("axis", "begin", "counter", "cuda", "what")

    begin: Any  # a CUDA event, or seconds of perf_counter

    def __init__(self, counter: CommCounter, axis: str, cuda: bool, operation: str):
        self.counter = counter
        self.axis = axis
        self.cuda = cuda
        self.what = operation

    def __enter__(self) -> None:
        self.counter.waiting_in = self.what, self.axis
        if not self.cuda:
            self.begin = perf_counter()
        elif self.counter.measuring:
            self.begin = torch.cuda.Event(enable_timing=True)
            self.begin.record()

    def __exit__(self, *_: object) -> None:
        self.counter.waiting_in = None
        if not self.cuda:
            self.counter._seconds[self.axis] += perf_counter() - self.begin
        elif self.counter.measuring:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self.counter._events.append((self.axis, self.begin, end))


class Handle:
    """A collective in progress. `wait` returns its result; waiting twice is harmless.

    Keep it until then: torch cancels a transfer whose handle is dropped. `finish` runs once, when
    the data has arrived.
    """

    __slots__ = ("_arrived", "_axis", "_counter", "_finish", "_result", "_what", "_work")

    def __init__(
        self,
        result: Tensor,
        work: dist.Work | None,
        axis: str,
        counter: CommCounter,
        finish: Callable[[], object] | None = None,
        operation: str = "",
    ):
        self._result = result
        self._work = work
        self._axis = axis
        self._counter = counter
        self._finish = finish
        self._arrived = counter.on_arrival(work)
        self._what = operation or counter.last

    def done(self) -> bool:
        """Whether the collective has ended."""
        return self._work is None or self._work.is_completed()

    @property
    def work(self) -> dist.Work | None:
        """torch's own handle, for callers that wait themselves. Raises RuntimeError if a `finish`
        has to run."""
        if self._finish is not None:
            raise RuntimeError("this collective has a finish step: use wait()")
        return self._work

    def wait_on_stream(self) -> None:
        """Makes the current CUDA stream wait, untimed: the stream of a following transfer, without
        computation."""
        if self._work is not None:
            self._work.wait()
            self._arrived()
            self._work = None

    def wait(self) -> Tensor:
        """Waits for the result, and returns it."""
        if self._work is not None:
            self._counter.before_wait()
            with self._counter.waiting(self._axis, self._result, self._what):
                self._work.wait()
                if self._finish is not None:
                    self._finish()
            self._arrived()
            self._work = self._finish = None
        return self._result


# -------------------------------------------------------------------------------------------
#     asynchronous


def start_all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: str,
    counter: CommCounter,
    op: Any = dist.ReduceOp.SUM,
) -> Handle:
    """Starts to sum `tensor` of any contiguous shape over the group, in place."""
    if group is None:
        return Handle(tensor, None, axis, counter)
    n = group.size()
    counter.count_sent(
        "all-reduce",
        axis,
        2 * tensor.nbytes * (n - 1) // n,
        group,
    )
    with counter.waiting(axis, tensor):
        work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    return Handle(tensor, work, axis, counter)


def start_reduce_scatter(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: str,
    counter: CommCounter,
    out: Tensor | None = None,
) -> Handle:
    """[n*k, ...] -> [k, ...]: starts to sum over the group this rank's slice of dimension 0 (a view
    if there is no group)."""
    if group is None:
        return Handle(
            tensor if out is None else out.copy_(tensor),
            None,
            axis,
            counter,
        )
    n = group.size()
    if out is None:
        out = tensor.new_empty(tensor.shape[0] // n, *tensor.shape[1:])
    counter.count_sent(
        "reduce-scatter",
        axis,
        tensor.nbytes * (n - 1) // n,
        group,
    )
    with counter.waiting(axis, tensor):
        if not counter.gloo:
            work = dist.reduce_scatter_tensor(out, tensor, group=group, async_op=True)
            return Handle(out, work, axis, counter)
        reduction = gloo.ReduceScatter(tensor, group, out)
    return Handle(out, reduction.work, axis, counter, reduction.finish)


def start_all_gather(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: str,
    counter: CommCounter,
    out: Tensor | None = None,
) -> Handle:
    """[k, ...] -> [n*k, ...]: starts to join the group's tensors along dimension 0."""
    if group is None:
        return Handle(
            tensor if out is None else out.copy_(tensor),
            None,
            axis,
            counter,
        )
    n = group.size()
    if out is None:
        out = tensor.new_empty(n * tensor.shape[0], *tensor.shape[1:])
    counter.count_sent("all-gather", axis, out.nbytes * (n - 1) // n, group)
    with counter.waiting(axis, tensor):
        if not counter.gloo:
            work = dist.all_gather_into_tensor(out, tensor, group=group, async_op=True)
        else:
            work = gloo.start_all_gather(tensor, group, out)
    return Handle(out, work, axis, counter)


class Message(NamedTuple):
    """A tensor to send to the global rank `peer`, or the memory for a tensor from it, whose shape
    is known from the plan. A sent tensor must not change before the wait. `tag` is equal on both
    sides; gloo matches messages by tag, NCCL by order."""

    tensor: Tensor
    peer: int
    receives: bool
    tag: int = 0


def start_messages(
    messages: Sequence[Message],
    group: dist.ProcessGroup,
    axis: str,
    counter: CommCounter,
) -> list[Handle]:
    """Starts all messages together, which NCCL runs as one kernel. Returns a handle for each, in
    the same order."""
    operations = [
        dist.P2POp(
            dist.irecv if message.receives else dist.isend,
            message.tensor,
            message.peer,
            group,
            message.tag,
        )
        for message in messages
    ]
    first = messages[0]
    with counter.waiting(axis, first.tensor, _description(first) or "send"):
        works = dist.batch_isend_irecv(operations)
    if len(works) == 1:  # NCCL returns one work for the whole batch
        works = works * len(messages)
    handles = []
    for message, work in zip(messages, works, strict=True):
        size = message.tensor.nbytes
        if not message.receives:
            counter.count_sent(
                "send",
                axis,
                size,
                group,
                to=message.peer,
            )
        elif counter.trace is not None:
            counter.trace.receive(axis, size, (message.peer, dist.get_rank()))
        operation = _description(message)
        handles.append(Handle(message.tensor, work, axis, counter, operation=operation))
    return handles


def _description(message: Message) -> str:
    return f"receive from rank {message.peer}" if message.receives else ""


def start_rotate(
    tensors: list[Tensor],
    to: int,
    source: int,
    group: dist.ProcessGroup,
    axis: str,
    counter: CommCounter,
) -> Callable[[], list[Tensor]]:
    """Sends `tensors` to the global rank `to` and receives as many of the same shapes from
    `source`.

    The returned function waits and returns the received tensors. All members of the group must call
    `start_rotate`. On CUDA all transfers start as one batch, since NCCL may deadlock on a ring of
    single sends.
    """
    arrived = [torch.empty_like(tensor) for tensor in tensors]
    size = sum(tensor.nbytes for tensor in tensors)
    counter.count_sent("rotate", axis, size, group, calls=len(tensors), to=to)
    ended = counter.on_arrival()
    with counter.waiting(axis, tensors[0]):
        if not counter.gloo:
            operations = [dist.P2POp(dist.isend, tensor, to, group) for tensor in tensors]
            operations += [dist.P2POp(dist.irecv, out, source, group) for out in arrived]
            works = dist.batch_isend_irecv(operations)
        else:
            group_to = dist.get_group_rank(group, to)
            group_source = dist.get_group_rank(group, source)
            works = [
                gloo.start_exchange(tensor, out, group_to, group_source, group)
                for tensor, out in zip(tensors, arrived, strict=True)
            ]

    def wait() -> list[Tensor]:
        counter.before_wait()
        with counter.waiting(axis, tensors[0], "rotate"):
            for work in works:
                work.wait()
        ended()
        return arrived

    return wait


# -------------------------------------------------------------------------------------------
#     synchronous


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: str,
    counter: CommCounter,
    op: Any = dist.ReduceOp.SUM,
) -> Tensor:
    """Sums `tensor` over the group, in place."""
    return start_all_reduce(tensor, group, axis, counter, op).wait()


def reduce_scatter(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: str,
    counter: CommCounter,
    out: Tensor | None = None,
) -> Tensor:
    """[n*k, ...] -> [k, ...]: the sum over the group of this rank's slice of dimension 0."""
    return start_reduce_scatter(tensor, group, axis, counter, out).wait()


def all_gather(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: str,
    counter: CommCounter,
    out: Tensor | None = None,
) -> Tensor:
    """[k, ...] -> [n*k, ...]: the group's tensors along dimension 0."""
    return start_all_gather(tensor, group, axis, counter, out).wait()


def all_to_all(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    axis: str,
    counter: CommCounter,
) -> Tensor:
    """[n, ...] -> [n, ...]: sends piece i to the i-th rank of the group; piece i of the result is
    that rank's."""
    if group is None:
        return tensor
    n = group.size()
    out = torch.empty_like(tensor)
    counter.count_sent("all-to-all", axis, tensor.nbytes * (n - 1) // n, group)
    with counter.waiting(axis, tensor):
        work = dist.all_to_all_single(out, tensor, group=group, async_op=True)
    return Handle(out, work, axis, counter).wait()
