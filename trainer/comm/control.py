"""Small messages between all ranks of a run: checks, outcomes, manifests, step counts.

They climb a tree and descend again: the ranks of a node talk to the first of them, first ranks talk
in groups of `FAN_OUT`, and so on up to rank 0. So a rank has at most `FAN_OUT` connections a level
and a message makes 2 log(ranks) hops, where a group of all ranks would need a connection to each
rank or a hop over each. Tensors are on the CPU, hence gloo, whatever the training groups use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

#: Most members of a group above the nodes: a level multiplies the ranks by this and adds two hops.
FAN_OUT = 16


class Group(Protocol):
    """What is used of a group of gloo."""

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions, /) -> dist.Work: ...

    def reduce(self, tensors: list[Tensor], opts: dist.ReduceOptions, /) -> dist.Work: ...

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions, /) -> dist.Work: ...

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
        """Whether all ranks are below its members: it is the topmost."""
        return self.size * self.stride >= world


def levels_of(rank: int, world: int, node: int, fan_out: int = FAN_OUT) -> list[Level]:
    """The levels that `rank` takes part in, lowest first: it leads all but the last. Empty for a
    world of one rank.

    `node`: ranks on a node, the members of the lowest groups.
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
    """Control messages of one rank. Every method is collective: all ranks call the same in the same
    order."""

    def __init__(
        self, rank: int = 0, world: int = 1, tree: Sequence[tuple[Level, Group]] | None = None
    ):
        """Without a `tree`: one group, torch's default one, and no messages where there is none."""
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
        """This rank's part of the tree. Connections are made when they are first used, if gloo is
        told so (`connect`)."""
        tree = list[tuple[Level, Group]]()
        for level in levels_of(rank, world, node, fan_out):
            level_store = dist.PrefixStore(f"control/{level.name}", store)
            tree.append(
                (
                    level,
                    cast(
                        Group, dist.ProcessGroupGloo(level_store, level.index, level.size, timeout)
                    ),
                )
            )
        return cls(rank, world, tree)

    @property
    def world_size(self) -> int:
        if self._tree is None:
            return dist.get_world_size() if dist.is_initialized() else 1
        return self._world

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Element-wise sums over all ranks."""
        return self._reduced(torch.tensor(values, dtype=torch.int64), dist.ReduceOp.SUM).tolist()

    def maximum(self, value: float) -> float:
        return float(self._reduced(torch.tensor([value], dtype=torch.float64), dist.ReduceOp.MAX))

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        self.sum_ints([0])

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, by rank, on rank 0; an empty list on the others. Lengths may
        differ."""
        messages = [data]  # of this rank and those below it: consecutive ranks
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
            works = [group.recv([arrived[index]], index, 0) for index in range(1, level.size)]
            for index, work in enumerate(works, 1):
                work.wait()
                messages += msgspec.msgpack.decode(
                    arrived[index].numpy().tobytes(), type=list[bytes]
                )
        return messages

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, by rank, on every rank."""
        table = self.broadcast_bytes(msgspec.msgpack.encode(self.gather_bytes(data)))
        return msgspec.msgpack.decode(table, type=list[bytes])

    def judge(self, data: bytes, verdict: Callable[[list[bytes]], str]) -> str:
        """`verdict` of every rank's `data`, by rank; computed on rank 0 and returned on all."""
        everyone = self.gather_bytes(data)
        return self.broadcast_bytes(verdict(everyone).encode() if everyone else b"").decode()

    def broadcast_bytes(self, data: bytes, src: int = 0) -> bytes:
        """The `data` of rank `src` on every rank; what the others pass is ignored."""
        levels = self._levels()
        for level, group in levels if src else ():  # first to rank 0, from leader to leader
            carrier = (src - level.first) // level.stride
            if not 0 < carrier < level.size:
                continue
            if level.index == carrier:
                group.send([torch.tensor([len(data)])], 0, 0).wait()
                group.send([_tensor(data)], 0, 0).wait()
            elif level.index == 0:
                size = torch.zeros(1, dtype=torch.int64)
                group.recv([size], carrier, 0).wait()
                row = torch.empty(max(int(size), 1), dtype=torch.uint8)
                group.recv([row], carrier, 0).wait()
                data = row.numpy().tobytes()[: int(size)]
        size = torch.tensor([len(data)])
        for _, group in reversed(levels):
            group.broadcast([size], dist.BroadcastOptions()).wait()
        row = torch.empty(max(int(size), 1), dtype=torch.uint8)
        if not levels or all(level.index == 0 for level, _ in levels):
            row = _tensor(data)
        for _, group in reversed(levels):
            group.broadcast([row], dist.BroadcastOptions()).wait()
        return row.numpy().tobytes()[: int(size)]

    def _levels(self) -> Sequence[tuple[Level, Group]]:
        if self._tree is not None:
            return self._tree
        world = self.world_size
        if world == 1:
            return ()
        assert dist.group.WORLD is not None
        return [(Level(0, 1, world, dist.get_rank()), dist.group.WORLD)]

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """`values` reduced over all ranks, in place: up to the topmost group, and down again."""
        levels = self._levels()
        upwards = dist.ReduceOptions()
        both_ways = dist.AllreduceOptions()
        upwards.reduceOp = both_ways.reduceOp = operation
        topmost = levels[-1:] if levels and levels[-1][0].covers(self.world_size) else ()
        below = levels[: len(levels) - len(topmost)]
        for _, group in below:
            group.reduce([values], upwards).wait()
        for _, group in topmost:
            group.allreduce([values], both_ways).wait()
        for _, group in reversed(below):
            group.broadcast([values], dist.BroadcastOptions()).wait()
        return values


def first_problem(problems: list[bytes]) -> str:
    """A verdict for `ControlPath.judge`: the problem of the lowest rank that has one, with its
    rank; "" for none."""
    return next(
        (f"rank {rank}: {problem.decode()}" for rank, problem in enumerate(problems) if problem), ""
    )


#: The control path over torch's default group: for a few ranks, or none.
WORLD = ControlPath()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
