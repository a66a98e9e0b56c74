"""Parameters of flat buckets, gathered after an update while earlier parts of a forward compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module

from trainer.comm.collectives import CommCounter, start_all_gather
from trainer.comm.mesh import Mesh
from trainer.model.stage import Stage
from trainer.parallel.params import ParamInfo

from .flat_bucket import FlatBucket
from .rooms import Rooms


class ParamGathers:
    """The parameters of one rank's buckets, of which ZeRO-1 and -2 update one shard per rank."""

    def __init__(self, mesh: Mesh, zero: int, counter: CommCounter):
        self.mesh = mesh
        self.zero = zero
        self.counter = counter
        self.buckets: list[FlatBucket] = []
        #: The buffers of messages, if they have a constant size.
        self.rooms: Rooms | None = None
        #: Parameter -> (bucket, slot).
        self._slot_of: dict[Tensor, tuple[int, int]] = {}
        #: Buckets that a part of a stage waits for, by number.
        self._ahead: set[int] = set()

    @property
    def gathers(self) -> bool:
        """Whether ranks hold shards of the parameters, so that `gather` sends messages."""
        return any(self._shard_group(bucket) is not None for bucket in self.buckets)

    def gather(self, bucket: FlatBucket) -> None:
        """Starts to gather a bucket's parameters from every rank's `param_shard`."""
        group = self._shard_group(bucket)
        if group is not None:
            bucket.wait_gather()  # an earlier gather that no part has waited for
            bucket.gathering = start_all_gather(
                bucket.param_shard,
                group,
                "dp",
                self.counter,
                out=bucket.params,
            )

    def gather_ahead(self, stages: Sequence[Stage]) -> None:
        """Makes each part of the stages wait for its own parameters before it computes."""
        for stage in stages:
            needs = {name: self._holders(modules) for name, modules in stage.parts().items()}
            self._ahead.update(*needs.values())
            stage.before = partial(self._wait_part, needs)

    def _holders(self, modules: Sequence[Module]) -> list[int]:
        """Returns the numbers of the buckets that hold the modules' parameters."""
        numbers = set[int]()
        for module in modules:
            for param in module.parameters():
                first = self._slot_of[param][0]
                numbers.update(range(first, first + self.buckets[first].buckets))
        return sorted(numbers)

    def _wait_part(self, needs: dict[str, list[int]], name: str) -> None:
        for number in needs[name]:
            self.buckets[number].wait_gather()

    def start_forward(self) -> None:
        """Waits for the parameters that no part of a forward waits for."""
        for number, bucket in enumerate(self.buckets):
            if number not in self._ahead:
                bucket.wait_gather()

    def wait_params(self) -> None:
        """Waits until every parameter is whole again."""
        for bucket in self.buckets:
            bucket.wait_gather()

    def full_params(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Yields every parameter whole, as this rank holds it."""
        for bucket in self.buckets:
            if not bucket.layout.continues:
                for info, param in zip(bucket.infos, bucket.members, strict=True):
                    yield info, param.detach()

    def buffer_tensors(self) -> list[Tensor]:
        """The storage of messages that is kept between steps, for memory metrics."""
        return [] if self.rooms is None else self.rooms.tensors

    def param_tensors(self) -> list[Tensor]:
        """The parameters' storage, for memory metrics."""
        return [bucket.params for bucket in self.buckets]

    def _shard_group(self, bucket: FlatBucket) -> torch.distributed.ProcessGroup | None:
        return self.mesh.group(bucket.kind.groups.shard) if self.zero else None
