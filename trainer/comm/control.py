"""Small messages between all ranks of a run: checks, outcomes, manifests, step counts.

Messages go up a tree and down: the ranks of a node send to the first of them, first ranks
communicate in groups of `FAN_OUT`, and so on up to rank 0. So a rank has at most `FAN_OUT`
connections per level, and a message makes 2 log(ranks) hops; a group of all ranks would need a
connection to every rank, or a hop through every rank. Tensors are on the CPU, so the groups are
gloo's, whatever the training groups use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

#: Maximum number of members of a group above the nodes: each level multiplies the ranks by this
#: number, and adds two hops.
FAN_OUT = 16


class Group(Protocol):
    """The methods of a gloo group that are used here."""

    def allreduce(
        self,
        tensors: list[Tensor],
        opts: dist.AllreduceOptions,
        /,
    ) -> dist.Work: ...

    def reduce(self, tensors: list[Tensor], opts: dist.ReduceOptions, /) -> dist.Work: ...

    def broadcast(
        self,
        tensors: list[Tensor],
        opts: dist.BroadcastOptions,
        /,
    ) -> dist.Work: ...

    def send(self, tensors: list[Tensor], to: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], source: int, tag: int, /) -> dist.Work: ...


@dataclass(frozen=True)
class Level:
    """One rank's place in a level of the tree: `size` members, global ranks `first`, `first +
    stride`, ..."""

    first: int
    stride: int
    size: int
    index: int  # of this rank among the members

    @property
    def name(self) -> str:
        return f"{self.stride}/{self.first}"

    def covers(self, world: int) -> bool:
        """Whether all ranks are below its members, so that it is the topmost level."""
        return self.size * self.stride >= world


def levels_of(rank: int, world: int, node: int, fan_out: int = FAN_OUT) -> list[Level]:
    """Returns the levels that `rank` takes part in, lowest first; it leads all but the last. Empty
    for a world of one rank.

    `node`: the number of ranks per node, the members of the lowest groups.
    """
    levels = list[Level]()
    stride = 1
    fan = max(1, node)
    while stride < world and rank % stride == 0:
        span = stride * fan
        first = rank // span * span
        size = -(-(min(first + span, world) - first) // stride)
        if size > 1:
            levels.append(Level(first, stride, size, (rank - first) // stride))
        stride = span
        fan = fan_out
    return levels


class ControlPath:
    """The control messages of one rank. Every method is collective: all ranks call the same methods
    in the same order."""

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        tree: Sequence[tuple[Level, Group]] | None = None,
    ):
        """Without a `tree`, messages use torch's default group; without that, there are none."""
        self._rank = rank
        self._world = world
        self._tree = tree

    @classmethod
    def join(
        cls,
        store: dist.Store,
        rank: int,
        world: int,
        node: int,
        timeout: timedelta,
        fan_out: int = FAN_OUT,
    ) -> ControlPath:
        """Returns this rank's part of the tree. Connections are made when they are first used, if
        gloo is configured so (`connect`)."""
        tree = list[tuple[Level, Group]]()
        for level in levels_of(rank, world, node, fan_out):
            level_store = dist.PrefixStore(f"control/{level.name}", store)
            group = dist.ProcessGroupGloo(level_store, level.index, level.size, timeout)
            tree.append((level, cast(Group, group)))
        return cls(rank, world, tree)

    @property
    def world_size(self) -> int:
        if self._tree is None:
            return dist.get_world_size() if dist.is_initialized() else 1
        return self._world

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Returns element-wise sums over all ranks."""
        sums = torch.tensor(values, dtype=torch.int64)
        return self._reduced(sums, dist.ReduceOp.SUM).tolist()

    def maximum(self, value: float) -> float:
        """Returns the largest `value` of all ranks."""
        return float(
            self._reduced(
                torch.tensor([value], dtype=torch.float64),
                dist.ReduceOp.MAX,
            )
        )

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self.sum_ints([0])

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data`, by rank, on rank 0; an empty list on the others. Lengths may
        differ."""
        messages = [data]  # of this rank and the ranks below it, which are consecutive
        for level, group in self._levels():
            packed = msgspec.msgpack.encode(messages)
            sizes = torch.zeros(level.size, dtype=torch.int64)
            sizes[level.index] = len(packed)
            options = dist.ReduceOptions()
            group.reduce([sizes], options).wait()
            if level.index:
                group.send([_tensor(packed)], 0, 0).wait()
                return []
            arrived = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
            run_all(
                [partial(group.recv, [arrived[index]], index, 0) for index in range(1, level.size)]
            )
            for message in arrived[1:]:
                messages += msgspec.msgpack.decode(
                    message.numpy().tobytes(),
                    type=list[bytes],
                )
        return messages

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's `data`, by rank, on every rank."""
        table = self.broadcast_bytes(msgspec.msgpack.encode(self.gather_bytes(data)))
        return msgspec.msgpack.decode(table, type=list[bytes])

    def judge(self, data: bytes, verdict: Callable[[list[bytes]], str]) -> str:
        """Returns `verdict` of every rank's `data`, by rank: rank 0 computes it, all ranks return
        it."""
        table = self.gather_bytes(data)
        answer = verdict(table) if table else ""
        return self.broadcast_bytes(answer.encode()).decode()

    def broadcast_bytes(self, data: bytes, src: int = 0) -> bytes:
        """Returns the `data` of rank `src` on every rank; that of the others is ignored."""
        levels = self._levels()
        if src:
            data = self._send_to_rank_0(data, src)
        size = torch.tensor([len(data)])
        for _, group in reversed(levels):
            group.broadcast([size], dist.BroadcastOptions()).wait()
        row = torch.empty(max(int(size), 1), dtype=torch.uint8)
        if not levels or all(level.index == 0 for level, _ in levels):
            row = _tensor(data)
        for _, group in reversed(levels):
            group.broadcast([row], dist.BroadcastOptions()).wait()
        return row.numpy().tobytes()[: int(size)]

    def _send_to_rank_0(self, data: bytes, src: int) -> bytes:
        """Sends the `data` of rank `src` from leader to leader. Returns it on the leaders, and the
        own `data` on the other ranks."""
        for level, group in self._levels():
            sender = (src - level.first) // level.stride
            if not 0 < sender < level.size:
                continue
            if level.index == sender:
                group.send([torch.tensor([len(data)])], 0, 0).wait()
                group.send([_tensor(data)], 0, 0).wait()
            elif level.index == 0:
                size = torch.zeros(1, dtype=torch.int64)
                group.recv([size], sender, 0).wait()
                row = torch.empty(max(int(size), 1), dtype=torch.uint8)
                group.recv([row], sender, 0).wait()
                data = row.numpy().tobytes()[: int(size)]
        return data

    def _levels(self) -> Sequence[tuple[Level, Group]]:
        if self._tree is not None:
            return self._tree
        world = self.world_size
        if world == 1:
            return ()
        assert dist.group.WORLD is not None
        return [(Level(0, 1, world, dist.get_rank()), dist.group.WORLD)]

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces `values` over all ranks, in place: up to the topmost group, and down to all
        ranks."""
        levels = self._levels()
        upwards = dist.ReduceOptions()
        both_ways = dist.AllreduceOptions()
        upwards.reduceOp = operation
        both_ways.reduceOp = operation
        topmost = levels[-1:] if levels and levels[-1][0].covers(self.world_size) else ()
        below = levels[: len(levels) - len(topmost)]
        for _, group in below:
            group.reduce([values], upwards).wait()
        for _, group in topmost:
            group.allreduce([values], both_ways).wait()
        for _, group in reversed(below):
            group.broadcast([values], dist.BroadcastOptions()).wait()
        return values


def run_all(operations: Sequence[Callable[[], dist.Work]]) -> None:
    """Starts operations of a gloo group and waits for each, even if one fails; then raises the
    first error.

    A message for an operation that nobody holds any more stays unread in its socket. A group that
    is dropped then, with lazy connections, never stops reading (`Loop::run` and `Pair::read` of
    gloo, April 2026), and its rank hangs.
    """
    failed: Exception | None = None
    works = list[dist.Work]()
    for start in operations:
        try:
            works.append(start())
        except Exception as error:
            failed = failed or error
    for work in works:
        try:
            work.wait()
        except Exception as error:
            failed = failed or error
    try:
        if failed is not None:
            raise failed
    finally:
        del failed  # its traceback holds this frame: the cycle would keep the group open


def first_problem(problems: list[bytes]) -> str:
    """Returns the problem of the lowest rank that has one, with its rank, or "": a verdict for
    `ControlPath.judge`."""
    for rank, problem in enumerate(problems):
        if problem:
            return f"rank {rank}: {problem.decode()}"
    return ""


#: The control path over torch's default group, for few ranks or one.
WORLD = ControlPath()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
