"""Data parallelism and ZeRO-0/1 on flat buckets.

Parameters become views of one flat buffer per bucket; gradients are added, in the reduce dtype, to
a second flat buffer as backward produces them. When a bucket has all its gradients of the step, its
collective starts while backward continues: a reduce-scatter (ZeRO-1: this rank keeps the sum of its
shard) or an all-reduce (ZeRO-0). After the optimizer has updated its shard, an all-gather in place
rebuilds the whole parameters. In both cases a rank sends, on a ring, 2(n-1)/n times the bytes of
the parameters (ZeRO, arXiv 1910.02054, section 7.2; Megatron-LM `mc/distributed`).

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
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.nn import Parameter

from orchestrator.plan.trained import STATE_BLOCK
from trainer.comm.collectives import (
    CommCounter,
    all_reduce,
    start_all_gather,
    start_all_reduce,
)
from trainer.comm.mesh import Mesh
from trainer.comm.narrow_wire import start_shard_sum
from trainer.errors import LayoutError
from trainer.host.memory import HostMemory
from trainer.parallel.data.flat_bucket import CutParameter, FlatBucket, Kind, cut_parameters
from trainer.parallel.data.layout import SHARD_ALIGN, Bucket, Item, Slot, make_layout
from trainer.parallel.data.param_gathers import ParamGathers
from trainer.parallel.data.rooms import Rooms
from trainer.parallel.params import DENSE, GradGroups, ParamInfo

#: The axis under which the bytes of a composite group are counted.
AXIS_OF_GROUP = {"kv": "tp", "embedding": "pp"}


def axis_of_sum(name: str, groups: GradGroups) -> str:
    """Returns the axis under which the bytes of a sum over the group `name` are counted: "dp" if it
    is that of the replicas."""
    return "dp" if name == groups.replica else AXIS_OF_GROUP.get(name, name)


#: Number of later reductions that start before a bucket's sum over the replicas starts.
SUMS_BEHIND = 1


class ShardLayout(Protocol):
    """The positions of parameters in a bucket, and the slices of them in each shard."""

    @property
    def slots(self) -> tuple[Slot, ...]: ...

    def param_ranges(self, index: int, shards: int) -> list[tuple[Slot, int, int]]: ...

    def rows(self, shards: int) -> list[tuple[int, int]]:
        """The rows [start, stop) of each shard of a matrix that shards cut into rows; else none."""
        ...


class ShardedBucket(Protocol):
    """A bucket as the optimizer and the norm see it: this rank's shard of its parameters and
    gradients."""

    infos: list[ParamInfo]
    kind: Kind
    owner: bool
    shards: int  # over which the bucket is spread
    shard_index: int
    range: tuple[int, int]  # of the shard, in elements of the bucket
    param_shard: Tensor
    grad_shard: Tensor
    host_grad: Tensor | None  # `grad_shard` on the host, if the optimizer is there

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


class GradBuckets(ParamGathers):
    """Gradient accumulation, reduction and parameter gathering of one rank.

    A step calls `expect(n)`, runs n backward passes, and calls `finish()`. Hooks collect the
    gradients; a schedule that computes weight gradients itself calls `accumulate_grad`. Then the
    optimizer updates `param_shard` of each bucket from its `grad_shard` and calls `gather(bucket)`.
    The hooks do not keep this object: its user holds it. The next step begins with
    `start_forward()`. Each part of a forward waits for its own buckets
    (`gather_ahead`), so that gathers overlap with the computation of earlier parts.
    """

    zero_stages: tuple[int, ...] = (0, 1)
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
        most_bytes: int | None = None,
        wire: torch.dtype | None = None,
    ):
        """`params` are listed in forward order, each once; their storage moves into the buckets.
        `classes` lists the classes of all ranks' parameters. `host` receives the summed gradients,
        bucket by bucket. `most_bytes`: no message is larger. `wire`: the format in which gradients
        travel to the rank that sums them, in `reduce_dtype`.

        Raises LayoutError for a ZeRO stage that this class does not implement, ValueError for a
        parameter that appears twice or whose class is not listed.
        """
        if zero not in self.zero_stages:
            raise LayoutError(f"{type(self).__name__} does not implement ZeRO-{zero}")
        check_params(params, classes)
        super().__init__(mesh, zero, counter)
        self.wire = wire
        self.classes = classes
        self.host = host
        self.passes = 0
        #: The stream on which sums over replicas wait for their shards.
        self._side_stream: torch.cuda.Stream | None = None
        #: Number of buckets whose reduction has started, in index order on every rank.
        self.started = 0
        #: Gradients of this step, by bucket and slot.
        self._received: list[list[int]] = []
        #: Gradients per pass, by bucket and slot; inf: varies. None before the end of the first
        #: step.
        self._uses: list[list[float]] | None = None
        bucket_numel = max(1, bucket_bytes // reduce_dtype.itemsize)
        most_numel = None
        if most_bytes is not None:
            widest = max(param.dtype.itemsize for _, param, _ in params)
            widest = max(widest, reduce_dtype.itemsize)
            most_numel = most_bytes // widest
            device = params[0][1].device
            zeros = partial(torch.zeros, device=device)
            self.rooms = Rooms(most_bytes, zeros)
        layouts = make_layout(
            layout_items(params),
            self._shards_of,
            bucket_numel,
            most_numel,
        )
        cut = cut_parameters(layouts)
        for layout in layouts:
            self._add_bucket(
                layout,
                [params[slot.index] for slot in layout.slots],
                reduce_dtype,
                cut.get(layout.slots[0].index),
            )

    def _add_bucket(
        self,
        layout: Bucket,
        members: list[tuple[str, Parameter, ParamInfo]],
        reduce_dtype: torch.dtype,
        cut: CutParameter | None,
    ) -> None:
        """Allocates the next bucket, and hooks its parameters."""
        number = len(self.buckets)
        infos = [info for _, _, info in members]
        if len({info.owner for info in infos}) != 1:
            names = [info.name for info in infos]
            raise ValueError(f"parameters {names} share a bucket but not an owner")
        shard_group = infos[0].groups.shard
        bucket = FlatBucket(
            layout,
            [param for _, param, _ in members],
            infos,
            shards=self._shards_of(layout.key),
            shard_index=self.mesh.index(shard_group) if self.zero else 0,
            reduce_dtype=reduce_dtype,
            allocate_grads=self.keeps_whole_grads,
            host=self.host,
            cut=cut,
            rooms=self.rooms,
        )
        self.buckets.append(bucket)
        self._received.append([0] * len(members))
        if layout.continues:
            return
        for position, (_, param, _) in enumerate(members):
            self._slot_of[param] = (number, position)
            # Weak: the garbage collector sees no cycle through a parameter's hook, and an engine
            # that is done would keep its weights and gradients.
            hook = partial(_call, WeakMethod(self._accumulate), number, position)
            param.register_post_accumulate_grad_hook(hook)

    def _shards_of(self, kind: Hashable) -> int:
        return self.mesh.size(cast(Kind, kind).groups.shard) if self.zero else 1

    # -------------------------------------------------------------------------------------------
    #     gradients

    def expect(self, passes: int) -> None:
        """Begins a step of `passes` backward passes (micro-batches).

        The first step counts the gradients that each parameter gets per pass; its reductions all
        start in `finish`. Normally there is one; there are two for a parameter that serves both
        ends of the model on this rank, and none for an unused one. Raises RuntimeError when the
        previous step is not finished, ValueError for `passes` below 1.
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
        """Adds `param.grad` to the bucket, and starts the reduction of every bucket that is now
        complete.

        If the dtypes are equal, `param.grad` becomes a view of the bucket, so that autograd itself
        adds later gradients; else it is cleared.
        """
        self._accumulate(*self._slot_of[param], param)

    def _accumulate(self, number: int, position: int, param: Tensor) -> None:
        bucket = self.buckets[number]
        received = self._received[number]
        if number < self.started:  # the gradient would be lost, or change a buffer in transit
            name = bucket.infos[position].name
            count = received[position]
            raise RuntimeError(
                f"{name} got gradient {count + 1} of this step after its bucket's reduction had"
                " started"
            )
        last = number + bucket.buckets
        runs = self.buckets[number:last]
        if any(run.gathering is not None for run in runs):
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
        for counts in self._received[number:last]:
            counts[position] += 1
        for run in runs:
            run.missing -= 1
        if not bucket.missing:
            self._start_complete()

    def _start_complete(self) -> None:
        """Starts the reductions of complete buckets in index order: ranks may complete buckets in
        different orders, but must start collectives in one."""
        while self.started < len(self.buckets) and not self.buckets[self.started].missing:
            self._start_reduction()

    def _start_reduction(self) -> None:
        """Starts the reduction of the next bucket."""
        bucket = self.buckets[self.started]
        self.counter.subject = f"bucket {self.started}"
        for param, view, count in zip(
            bucket.members,
            bucket.grad_views,
            self._received[self.started],
            strict=True,
        ):
            param.grad = None
            if not count:  # not used in this step: zero, for the sum with ranks that use it
                view.zero_()
        groups = bucket.kind.groups
        if self.zero:
            group = self.mesh.group(groups.shard)
            out = None if group is None else bucket.grad_shard
            bucket.reduction = start_shard_sum(
                bucket.whole_grads,
                group,
                self.counter,
                self.wire,
                out=out,
            )
        else:
            bucket.reduction = start_all_reduce(
                bucket.whole_grads,
                self.mesh.group(groups.grad),
                "dp",
                self.counter,
            )
        self.counter.subject = ""
        self.started += 1
        if self.started > SUMS_BEHIND:
            behind = self.buckets[self.started - 1 - SUMS_BEHIND]
            if self.wire is not None:  # frees what it has sent, and makes its wide sum
                behind.wait_reduction()
            if self.zero:
                self._sum_replicas(behind)
            if not behind.kind.sums and not behind.summed:
                behind.copy_grad_to_host(self.host)

    def _sum_replicas(self, bucket: FlatBucket) -> None:
        """Starts the sum of a bucket's shard over the replicas, which waits on a side stream for
        the shard's reduction: no computation waits.

        On CPUs the caller waits, for a reduction that began `SUMS_BEHIND` buckets ago. All ranks
        start the same sums between the same reductions.
        """
        replicas = self.mesh.group(bucket.kind.groups.replica)
        if replicas is None or bucket.summed:
            return
        bucket.summed = True
        if self.wire is not None or not bucket.grad_shard.is_cuda:
            bucket.wait_reduction()
            bucket.reduction = start_all_reduce(bucket.grad_shard, replicas, "dp", self.counter)
            return
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(bucket.grad_shard.device)
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            if bucket.reduction is not None:
                bucket.reduction.wait_on_stream()
            bucket.reduction = start_all_reduce(bucket.grad_shard, replicas, "dp", self.counter)

    def finish(self) -> None:
        """Waits until every `grad_shard` holds the sum over all ranks and passes."""
        while self.started < len(self.buckets):
            self._start_reduction()
        self._sum_parts()
        self.started = 0
        if self._uses is None:
            self._uses = [
                [math.inf if count % self.passes else count // self.passes for count in counts]
                for counts in self._received
            ]

    def _sum_parts(self) -> None:
        """Adds up the shards over the replicas and over the groups of second sums."""
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
    #     views

    def full_grads(self) -> dict[str, Tensor]:
        """Returns copies of the whole summed gradients by parameter name, gathered from the
        shards: for verification only."""
        whole_grads = list[Tensor]()
        for bucket in self.buckets:
            uncounted = CommCounter(gloo=self.counter.gloo)
            gathering = start_all_gather(
                bucket.grad_shard.clone(), self._shard_group(bucket), "dp", uncounted
            )
            whole_grads.append(gathering.wait())
        return _by_name(self.buckets, whole_grads)

    def grad_tensors(self) -> list[Tensor]:
        """The gradients' storage, for memory metrics."""
        return [bucket.whole_grads for bucket in self.buckets]


def _by_name(buckets: Sequence[FlatBucket], whole_grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns copies of the gradients of buckets by parameter name."""
    runs: dict[str, list[Tensor]] = {}
    shapes = dict[str, torch.Size]()
    for bucket, grad in zip(buckets, whole_grads, strict=True):
        for info, slot, shape in zip(
            bucket.infos,
            bucket.layout.slots,
            bucket.shapes,
            strict=True,
        ):
            run = grad[max(slot.start, 0) : slot.stop]
            runs.setdefault(info.name, []).append(run)
            shapes[info.name] = shape
    return {name: torch.cat(runs[name]).view(shape) for name, shape in shapes.items()}


def _call(
    method: WeakMethod[Callable[[int, int, Tensor], None]],
    number: int,
    position: int,
    param: Tensor,
) -> None:
    """Calls `GradBuckets._accumulate`, unless its buckets are gone."""
    accumulate = method()
    if accumulate is not None:
        accumulate(number, position, param)


def kind_of(dtype: torch.dtype, info: ParamInfo) -> Kind:
    """The kind of the bucket that a parameter belongs to."""
    return Kind(
        dtype=dtype,
        decay=info.decay,
        replicated=len(info.replicas) > 1,
        sums=info.sums,
        groups=info.groups,
        whole_matrix=info.whole_matrix,
        narrow=info.narrow,
    )


def layout_items(params: Sequence[tuple[str, Parameter, ParamInfo]]) -> list[Item]:
    """The parameters as the layout of buckets sees them."""
    return [
        Item(
            index=index,
            numel=param.numel(),
            key=kind_of(param.dtype, info),
            one_shard=info.whole_matrix,
            align=STATE_BLOCK if info.narrow else SHARD_ALIGN,
        )
        for index, (_, param, info) in enumerate(params)
    ]


def check_params(
    params: Sequence[tuple[str, Parameter, ParamInfo]], classes: Sequence[GradGroups]
) -> None:
    """Raises ValueError for a parameter that appears twice or whose class is not in `classes`."""
    if len({id(param) for _, param, _ in params}) != len(params):
        raise ValueError("a parameter appears twice: list a tied weight once, under its first name")
    check_classes([info for _, _, info in params], classes)


def check_classes(infos: Sequence[ParamInfo], classes: Sequence[GradGroups]) -> None:
    """Raises ValueError for a parameter of a class that is not in `classes`: ranks without such
    parameters would not sum its norm."""
    for info in infos:
        if info.groups not in classes:
            raise ValueError(
                f"{info.name} is of the class {info.groups.name!r}, not among those of this model"
            )
