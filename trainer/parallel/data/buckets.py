"""Data parallelism and ZeRO-0/1 on flat buckets.

Parameters become views of one flat buffer per bucket; gradients are added, in the reduce dtype, to
a second flat buffer as backward produces them. When a bucket has all its gradients of the step, its
collective starts while backward continues: a reduce-scatter (ZeRO-1: this rank keeps the sum of its
shard) or an all-reduce (ZeRO-0). After the optimizer has updated its shard, an all-gather in place
rebuilds the whole parameters. Ring bytes a rank sends are 2(n-1)/n times the parameters in both
cases (ZeRO, arXiv 1910.02054, section 7.2; Megatron-LM `mc/distributed`).

Hybrid sharding: shards are spread over a group of neighbours ("shard") and summed over the groups
("replica").

Gradients are communicated as sums. The loss has been divided by the step's global number of valid
tokens, so nothing here scales by a world size, and token counts may differ between ranks and
micro-batches.

Some gradients need a second sum: partial gradients of tensor-parallel ranks (norm weights under
sequence parallelism, replicated key/value heads) and copies of tied embeddings on the first and
last pipeline stage. It follows the first sum and moves only the shard.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from orchestrator.plan.trained import STATE_BLOCK
from trainer.comm.collectives import (
    CommCounter,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from trainer.comm.mesh import Mesh
from trainer.errors import LayoutError
from trainer.host.memory import HostMemory
from trainer.model.stage import Stage
from trainer.parallel.data.flat_bucket import FlatBucket, Kind
from trainer.parallel.data.layout import SHARD_ALIGN, Item, Slot, make_layout
from trainer.parallel.params import DENSE, GradGroups, ParamInfo

#: Axis under which the bytes of a composite group are counted.
AXIS_OF_GROUP = {"kv": "tp", "embedding": "pp"}

#: How many reductions may be in progress behind a bucket before its sum over the replicas starts.
SUMS_BEHIND = 1


class ShardLayout(Protocol):
    """Where parameters lie in a bucket, and which parts of them in a shard."""

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    def pieces(self, index: int, shards: int) -> list[tuple[Slot, int, int]]: ...

    def rows(
        self, shards: int
    ) -> list[tuple[int, int]]: ...  # of a matrix that shards cut into rows; else none


class ShardedBucket(Protocol):
    """What the optimizer and the norm read of a bucket: this rank's shard of its parameters and
    gradients."""

    infos: list[ParamInfo]
    kind: Kind
    owner: bool
    shards: int  # over which the bucket is spread
    shard_index: int
    range: tuple[int, int]  # of the shard, in elements of the bucket
    param_shard: Tensor
    grad_shard: Tensor
    host_grad: Tensor | None  # the same on the host, where the optimizer is there

    @property
    def layout(self) -> ShardLayout: ...


class Sharding(Protocol):
    """Data parallelism as the optimizer and the norm see it: `GradBuckets` or
    `FullyShardedParameters`."""

    mesh: Mesh
    counter: CommCounter
    zero: int
    classes: Sequence[GradGroups]  # of all ranks' parameters, in the same order everywhere

    @property
    def buckets(self) -> Sequence[ShardedBucket]: ...

    @property
    def gathers(self) -> bool: ...  # whether `gather` sends messages

    def gather(self, bucket: Any) -> None: ...

    def wait_params(self) -> None: ...

    def start_forward(self) -> None: ...


class GradBuckets:
    """Gradient accumulation, reduction and parameter gathering of one rank.

    A step: `expect(n)`; n backward passes (hooks collect every gradient, or `accumulate_grad` is called by
    hand where a schedule computes weight gradients itself); `finish()`; the optimizer updates
    `param_shard` of each bucket from its `grad_shard` and calls `gather(bucket)`; `start_forward()`
    before the next forward, whose parts each wait for their own buckets (`gather_ahead`), so that a
    gather runs beside the computation of the parts before.
    """

    keeps_whole_grads = True  # each bucket has a whole gradient buffer during the whole step

    def __init__(
        self,
        params: Sequence[tuple[str, Parameter, ParamInfo]],
        mesh: Mesh,
        zero: int,
        reduce_dtype: torch.dtype,
        bucket_bytes: int,
        counter: CommCounter,
        classes: Sequence[GradGroups] = (DENSE,),
        host: HostMemory | None = None,
    ):
        """`params` in forward order, each once. Their storage moves into the buckets. `classes`:
        all that any rank has parameters of. `host`: where the summed gradients go, bucket by
        bucket. Raises LayoutError for a `zero` that this class is not, ValueError for a parameter
        that appears twice or whose class is not listed."""
        if zero not in ((0, 1) if self.keeps_whole_grads else (2,)):
            raise LayoutError(f"{type(self).__name__} does not implement ZeRO-{zero}")
        if len({id(param) for _, param, _ in params}) != len(params):
            raise ValueError(
                "a parameter appears twice: list a tied weight once, under its first name"
            )
        check_classes([info for _, _, info in params], classes)
        self.mesh = mesh
        self.zero = zero
        self.counter = counter
        self.classes = classes
        self.host = host
        self.passes = 0
        self._ahead: set[int] = set()  # buckets that parts of the stages wait for
        self._aside: torch.cuda.Stream | None = (
            None  # where sums over replicas wait for their shards
        )
        self.started = (
            0  # buckets whose reduction has started; they start in index order on every rank
        )
        items = [
            Item(
                at,
                param.numel(),
                kind_of(param.dtype, info),
                info.whole,
                STATE_BLOCK if info.narrow else SHARD_ALIGN,
            )
            for at, (_, param, info) in enumerate(params)
        ]
        layouts = make_layout(items, self._shards_of, max(1, bucket_bytes // reduce_dtype.itemsize))
        self.buckets: list[FlatBucket] = []
        self._slot_of: dict[Tensor, tuple[int, int]] = {}  # parameter -> (bucket, slot)
        self._received: list[list[int]] = []  # gradients of this step, by bucket and slot
        self._uses: list[list[float]] | None = (
            None  # gradients in one pass, inf: varies; None before the first step
        )
        for number, layout in enumerate(layouts):
            members = [params[slot.index] for slot in layout.slots]
            infos = [info for _, _, info in members]
            if len({info.owner for info in infos}) != 1:
                raise ValueError(
                    f"parameters {[i.name for i in infos]} share a bucket but not an owner"
                )
            tensors = [param for _, param, _ in members]
            place = self._shards_of(layout.key), mesh.index(infos[0].groups.shard) if zero else 0
            self.buckets.append(
                FlatBucket(
                    layout, tensors, infos, *place, reduce_dtype, self.keeps_whole_grads, host
                )
            )
            self._received.append([0] * len(members))
            for position, (_, param, _) in enumerate(members):
                self._slot_of[param] = number, position
                param.register_post_accumulate_grad_hook(
                    partial(self._accumulate, number, position)
                )

    def _shards_of(self, kind: Hashable) -> int:
        return self.mesh.size(cast(Kind, kind).groups.shard) if self.zero else 1

    # -------------------------------------------------------------------------------------------
    #     gradients

    def expect(self, passes: int) -> None:
        """Begin a step of `passes` backward passes (micro-batches).

        The number of gradients that a parameter gets per pass is learnt in the first step, whose
        reductions all start in `finish`: normally one, two if it serves both ends of the model on
        this rank, none if it is not used. Raises RuntimeError when the previous step is not
        finished, ValueError for `passes` below 1.
        """
        if passes < 1:
            raise ValueError(f"a step needs at least one backward pass, not {passes}")
        if self.started:
            raise RuntimeError("expect() before finish() of the previous step")
        self.passes = passes
        for number, bucket in enumerate(self.buckets):
            bucket.missing = passes * sum(self._uses[number]) if self._uses else math.inf
            self._received[number] = [0] * len(bucket.infos)

    def accumulate_grad(self, param: Tensor) -> None:
        """Add `param.grad` to the bucket. Starts the reduction of every bucket that is now
        complete.

        If the dtypes are equal, `param.grad` then is a view of the bucket, so that autograd itself
        adds the following gradients; else it is cleared.
        """
        self._accumulate(*self._slot_of[param], param)

    def _accumulate(self, number: int, position: int, param: Tensor) -> None:
        bucket = self.buckets[number]
        received = self._received[number]
        if number < self.started:  # it would be lost, or change a buffer in transit
            name = bucket.infos[position].name
            count = received[position]
            raise RuntimeError(
                f"{name} got gradient {count + 1} of this step after its bucket's reduction had"
                " started"
            )
        if bucket.gathering is not None:
            raise RuntimeError(f"{bucket.infos[position].name} was used before it was gathered")
        view = bucket.grad_views[position]
        grad = param.grad
        assert grad is not None
        if grad is not view:
            if received[position]:
                view.add_(grad)
            else:
                view.copy_(grad)
            param.grad = view if bucket.direct else None
        received[position] += 1
        bucket.missing -= 1
        if not bucket.missing:
            self._start_complete()

    def _start_complete(self) -> None:
        """Start complete buckets in index order: ranks may complete them in different orders,
        collectives must not."""
        while self.started < len(self.buckets) and not self.buckets[self.started].missing:
            self._start_reduction()

    def _start_reduction(self) -> None:
        bucket = self.buckets[self.started]
        self.counter.subject = f"bucket {self.started}"
        for param, view, count in zip(
            bucket.members, bucket.grad_views, self._received[self.started], strict=True
        ):
            param.grad = None
            if not count:  # not used in this step: zero, for the sum with ranks that use it
                view.zero_()
        groups = bucket.kind.groups
        if self.zero:
            group = self.mesh.group(groups.shard)
            out = None if group is None else bucket.grad_shard
            bucket.reduction = start_reduce_scatter(
                bucket.whole_grads, group, "dp", self.counter, out=out
            )
        else:
            bucket.reduction = start_all_reduce(
                bucket.whole_grads, self.mesh.group(groups.grad), "dp", self.counter
            )
        self.counter.subject = ""
        self.started += 1
        if self.started > SUMS_BEHIND:
            behind = self.buckets[self.started - 1 - SUMS_BEHIND]
            if self.zero:
                self._sum_replicas(behind)
            if not behind.kind.sums and not behind.summed:
                behind.copy_grad_to_host(self.host)

    def _sum_replicas(self, bucket: FlatBucket) -> None:
        """When the shard is reduced, start its sum over the replicas; no computation waits for the
        one before.

        On CPUs the caller waits instead, for a reduction that began `SUMS_BEHIND` buckets ago. All
        ranks start the same sums between the same reductions.
        """
        replicas = self.mesh.group(bucket.kind.groups.replica)
        if replicas is None or bucket.summed:
            return
        bucket.summed = True
        if not bucket.grad_shard.is_cuda:
            bucket.wait_reduction()
            bucket.reduction = start_all_reduce(bucket.grad_shard, replicas, "dp", self.counter)
            return
        if self._aside is None:
            self._aside = torch.cuda.Stream(bucket.grad_shard.device)
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            if bucket.reduction is not None:
                bucket.reduction.pass_on()
            bucket.reduction = start_all_reduce(bucket.grad_shard, replicas, "dp", self.counter)

    def finish(self) -> None:
        """Wait until every `grad_shard` holds the sum over all ranks and passes."""
        while self.started < len(self.buckets):
            self._start_reduction()
        self._sum_parts()
        self.started = 0
        if self._uses is None:
            self._uses = [
                [math.inf if n % self.passes else n // self.passes for n in row]
                for row in self._received
            ]

    def _sum_parts(self) -> None:
        """The sums that follow the first one, on the shards only."""
        for bucket in self.buckets if self.zero else ():
            self._sum_replicas(bucket)
        for bucket in self.buckets:
            bucket.wait_reduction()
            bucket.summed = False
            for name in bucket.kind.sums:
                all_reduce(
                    bucket.grad_shard,
                    self.mesh.group(name),
                    AXIS_OF_GROUP.get(name, name),
                    self.counter,
                )
            bucket.copy_grad_to_host(self.host)
            bucket.copies_to_host = False

    # -------------------------------------------------------------------------------------------
    #     parameters

    @property
    def gathers(self) -> bool:
        """Whether ranks hold shards of the parameters, which are gathered after an update."""
        return any(self._shard_group(bucket) is not None for bucket in self.buckets)

    def gather(self, bucket: FlatBucket) -> None:
        """Start to gather a bucket's parameters from every rank's `param_shard`."""
        group = self._shard_group(bucket)
        if group is not None:
            bucket.wait_gather()  # of a part that did not compute since
            bucket.gathering = start_all_gather(
                bucket.param_shard, group, "dp", self.counter, out=bucket.params
            )

    def gather_ahead(self, stages: Sequence[Stage]) -> None:
        """Let each part of the stages wait for its own parameters, before it computes."""
        for stage in stages:
            needs = {name: self._holders(modules) for name, modules in stage.parts().items()}
            self._ahead.update(*needs.values())
            stage.before = partial(self._wait_part, needs)

    def _holders(self, modules: Sequence[Module]) -> list[int]:
        """Numbers of the buckets that hold the modules' parameters."""
        return sorted(
            {self._slot_of[param][0] for module in modules for param in module.parameters()}
        )

    def _wait_part(self, needs: dict[str, list[int]], name: str) -> None:
        for number in needs[name]:
            self.buckets[number].wait_gather()

    def start_forward(self) -> None:
        """Wait for the parameters that no part of a forward waits for."""
        for number, bucket in enumerate(self.buckets):
            if number not in self._ahead:
                bucket.wait_gather()

    def wait_params(self) -> None:
        """Wait until every parameter is whole again."""
        for bucket in self.buckets:
            bucket.wait_gather()

    # -------------------------------------------------------------------------------------------
    #     views

    def grad_of(self, param: Tensor) -> Tensor:
        """A view of a parameter's gradient buffer: after `finish`, the sum where this rank owns the
        shard."""
        number, position = self._slot_of[param]
        return self.buckets[number].grad_views[position]

    def full_grads(self) -> dict[str, Tensor]:
        """Every parameter's whole summed gradient by name, shards gathered into copies: for
        verification only."""
        result = {}
        for bucket in self.buckets:
            uncounted = CommCounter(gloo=self.counter.gloo)
            full_grad = start_all_gather(
                bucket.grad_shard.clone(), self._shard_group(bucket), "dp", uncounted
            ).wait()
            for info, slot, shape in zip(
                bucket.infos, bucket.layout.slots, bucket.shapes, strict=True
            ):
                result[info.name] = full_grad[slot.start : slot.stop].view(shape).clone()
        return result

    def full_params(self) -> Iterator[tuple[ParamInfo, Tensor]]:
        """Every parameter whole, as this rank holds it."""
        for bucket in self.buckets:
            for info, slot, shape in zip(
                bucket.infos, bucket.layout.slots, bucket.shapes, strict=True
            ):
                yield info, bucket.params[slot.start : slot.stop].view(shape)

    def _shard_group(self, bucket: FlatBucket) -> torch.distributed.ProcessGroup | None:
        return self.mesh.group(bucket.kind.groups.shard) if self.zero else None

    def param_tensors(self) -> list[Tensor]:
        """The parameters' storage, for memory metrics."""
        return [bucket.params for bucket in self.buckets]

    def grad_tensors(self) -> list[Tensor]:
        """The gradients' storage, for memory metrics."""
        return [bucket.whole_grads for bucket in self.buckets]


def kind_of(dtype: torch.dtype, info: ParamInfo) -> Kind:
    return Kind(
        dtype, info.decay, len(info.replicas) > 1, info.sums, info.groups, info.whole, info.narrow
    )


def check_classes(infos: Sequence[ParamInfo], classes: Sequence[GradGroups]) -> None:
    """Raises ValueError for a parameter of another class: ranks without such parameters would not
    sum its norm."""
    for info in infos:
        if info.groups not in classes:
            raise ValueError(
                f"{info.name} is of the class {info.groups.name!r}, not among those of this model"
            )
