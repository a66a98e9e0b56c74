"""Updates the shard that this rank owns of every bucket by the rules of an optimizer, with a master
copy where parameters are narrower.

One call of a rule updates a group of buckets. A bucket whose parameters are gathered after the
update is a group of its own, so that its gather starts early. The others share calls, since ZeRO-3
has one bucket per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from orchestrator.plan.document import Optim
from trainer.compat import foreach_copy_, foreach_mul_
from trainer.host.memory import HostMemory
from trainer.parallel.data.buckets import ShardedBucket, Sharding
from trainer.parallel.params import ParamInfo, StateKind

from .adamw import AdamW
from .muon import Muon
from .narrow import NarrowShard, NarrowState, Zeros, narrow_state, step_narrow
from .owners import cuts_of
from .rule import ElementRule, Matrix, MatrixRule, ParamRange, Rules, Shard, Update
from .sgd import Sgd

#: Elements of a narrow gradient that the host widens at a time, with up to seven threads.
WIDENED_ELEMENTS = 1 << 19


def rules_of(optim: Optim, seed: int = 0) -> Rules:
    """Returns the rules of the plan's optimizer. With Muon, AdamW updates all parameters that are
    not matrices inside blocks."""
    state = optim.state or ""
    if optim.kind == "sgd":
        return Rules(Sgd(optim), state=state, seed=seed)
    matrices = Muon(optim) if optim.kind == "muon" else None
    return Rules(AdamW(optim), matrices, state, seed)


@dataclass(frozen=True)
class StateSlice:
    """Elements `[start, stop)` of a parameter's flattened local tensor, as this rank holds them for
    one kind of state. `tensor` is the live 1-D view: a save reads it, a load writes it."""

    info: ParamInfo
    kind: StateKind
    start: int
    stop: int
    tensor: Tensor
    writes: bool  # whether this rank, among those that hold the slice, writes it to checkpoints


@dataclass
class BucketState:
    """The optimizer's state for one bucket: 1-D tensors of the shard's length in the master
    dtype."""

    master: Tensor  # the parameter shard itself where its dtype is the master dtype
    state: dict[StateKind, Tensor]
    narrow: dict[StateKind, NarrowState] = field(default_factory=dict)  # in place of `state`


class ShardedOptimizer:
    """Updates the shard that this rank owns of every bucket, then gathers the parameters."""

    def __init__(
        self,
        buckets: Sharding,
        rules: Rules,
        master_dtype: torch.dtype,
        host: HostMemory | None = None,
    ):
        """`host` holds master weights and moments, and computes the updates, if it is given."""
        self.buckets = buckets
        self.rules = rules
        self.master_dtype = master_dtype
        self.host = host
        self.states = [self._new_state(bucket) for bucket in buckets.buckets]
        self.groups = self._grouped()
        device = self.states[0].master.device if self.states else torch.device("cpu")
        #: Updates made, fp32: exact to 16 million.
        self._steps = torch.zeros((), dtype=torch.float32, device=device)
        #: 1 if the current update is skipped.
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        #: Completes when a copy of the state is complete; no update starts before that.
        self.copied: torch.cuda.Event | None = None

    @property
    def step_count(self) -> int:
        """Updates made so far, without skipped ones. Waits for the device."""
        return int(self._steps)

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._steps.fill_(count)

    def _rule(self, bucket: ShardedBucket) -> ElementRule | MatrixRule:
        if not bucket.kind.whole_matrix:
            return self.rules.elements
        assert self.rules.matrices is not None
        return self.rules.matrices

    def _new_state(self, bucket: ShardedBucket) -> BucketState:
        shard = bucket.param_shard
        kinds = self._rule(bucket).kinds
        zeros = partial(_zeros, shard.device) if self.host is None else self.host.zeros
        if self.host is not None:
            master = zeros(shard.numel(), self.master_dtype).copy_(shard)
        else:
            master = shard if shard.dtype == self.master_dtype else shard.to(self.master_dtype)
        if bucket.kind.narrow and self.rules.state:
            return BucketState(master, {}, self._narrow_states(bucket, master, zeros))
        return BucketState(master, {kind: zeros(master.numel(), master.dtype) for kind in kinds})

    def _narrow_states(
        self,
        bucket: ShardedBucket,
        master: Tensor,
        zeros: Zeros,
    ) -> dict[StateKind, NarrowState]:
        assert self.rules.state
        ranges = list(param_ranges(bucket))
        return {
            kind: narrow_state(
                self.rules.state,
                kind,
                ranges,
                numel=master.numel(),
                dtype=master.dtype,
                zeros=zeros,
                seed=self.rules.seed,
            )
            for kind in self._rule(bucket).kinds
        }

    def _grouped(self) -> list[list[int]]:
        """Returns the groups of bucket indices that one call updates, in forward order."""
        groups = list[list[int]]()
        shared = dict[tuple[bool, ...], list[int]]()
        for index, bucket in reversed(list(enumerate(self.buckets.buckets))):
            # A narrow gradient is widened for the update: never that of the whole model at once.
            widened = bucket.grad_shard.dtype != self.master_dtype
            # Whole matrices share the ranks that compute them, one matrix each.
            on_host = self.host is not None and not bucket.kind.whole_matrix
            single = self.buckets.gathers or on_host or widened
            kind = bucket.kind.decay, bucket.kind.whole_matrix, bucket.kind.narrow
            if not single and kind in shared:
                shared[kind].append(index)
                continue
            groups.append([index])
            if not single:
                shared[kind] = groups[-1]
        return groups

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, finite: Tensor) -> None:
        """Updates with the gradients times `grad_scale` (clipping, loss scale), unless `finite` is
        False. Both are 0-d and decided on the device. Starts the parameter gathers in forward
        order; `buckets.wait_params()` waits for them."""
        factor, update = self.decide(lr, grad_scale, finite)
        for group in self.groups:
            buckets = [self.buckets.buckets[at] for at in group]
            states = [self.states[at] for at in group]
            self.compute(
                group,
                [_gradient(bucket) for bucket in buckets],
                factor,
                update,
            )
            copies = [
                (bucket, state)
                for bucket, state in zip(buckets, states, strict=True)
                if state.master is not bucket.param_shard
            ]
            if self.host is not None:
                for bucket, state in copies:
                    copy_weights_to_device(bucket, state.master)
            elif copies:
                foreach_copy_(
                    [bucket.param_shard for bucket, _ in copies],
                    [state.master for _, state in copies],
                )
            for bucket in buckets:
                self.buckets.gather(bucket)

    def decide(
        self,
        lr: float,
        grad_scale: Tensor,
        finite: Tensor,
    ) -> tuple[Tensor | None, Update]:
        """Returns (the factor of the gradients, or None for 1; the update, which is counted). An
        optimizer on the host waits for the device, which decides, and for the gradients."""
        if self.host is not None:
            grad_scale = grad_scale.cpu()
            finite = finite.cpu()
            self.host.wait()
        if self._steps.device != finite.device:  # a rank without parameters, in its first step
            self._steps = self._steps.to(finite.device)
            self._skip = self._skip.to(finite.device)
        if self.copied is not None:  # the stream waits, not the host
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None
        self._steps += finite
        torch.logical_not(finite, out=self._skip)
        update = Update(lr, self._steps, self._skip)
        if not grad_scale.is_cuda and float(grad_scale) == 1.0:
            return None, update
        return grad_scale.to(self.master_dtype), update

    def compute(
        self,
        group: Sequence[int],
        grads: Sequence[Tensor],
        factor: Tensor | None,
        update: Update,
    ) -> None:
        """Updates the states of a group of buckets by their gradients, which may be overwritten."""
        kind = self.buckets.buckets[group[0]].kind
        in_pieces = self.host is not None and not kind.whole_matrix and not kind.narrow
        if in_pieces and any(grad.dtype != self.master_dtype for grad in grads):
            for at, grad in zip(group, grads, strict=True):
                self._compute_in_pieces(at, grad, factor, update)
            return
        grads = [grad.to(self.master_dtype) for grad in grads]
        if factor is not None:
            foreach_mul_(grads, factor)
        buckets = [self.buckets.buckets[at] for at in group]
        states = [self.states[at] for at in group]
        self._update(buckets, states, grads, update)

    def _compute_in_pieces(
        self,
        at: int,
        grad: Tensor,
        factor: Tensor | None,
        update: Update,
    ) -> None:
        """Computes an update on the host with a narrow gradient, widened piece by piece: a piece
        stays in the caches, where the whole would be written to memory and read again."""
        state = self.states[at]
        length = min(grad.numel(), WIDENED_ELEMENTS * max(1, torch.get_num_threads() // 4))
        buffer = torch.empty(length, dtype=self.master_dtype)
        for start in range(0, grad.numel(), length):
            span = slice(start, start + length)
            wide_grad = buffer[: grad[span].numel()].copy_(grad[span])
            if factor is not None:
                wide_grad.mul_(factor)
            shard = Shard(
                state.master[span],
                wide_grad,
                {kind: tensor[span] for kind, tensor in state.state.items()},
            )
            self.rules.elements.step(
                [shard],
                update,
                self.buckets.buckets[at].kind.decay,
            )

    def _update(
        self,
        buckets: list[ShardedBucket],
        states: list[BucketState],
        grads: list[Tensor],
        update: Update,
    ) -> None:
        kind = buckets[0].kind
        if kind.narrow:
            narrow = [
                NarrowShard(state.master, grad, state.narrow)
                for state, grad in zip(states, grads, strict=True)
            ]
            step_narrow(self.rules.elements, narrow, update, kind.decay)
            return
        shards = [
            Shard(state.master, grad, state.state)
            for state, grad in zip(states, grads, strict=True)
        ]
        if not kind.whole_matrix:
            self.rules.elements.step(shards, update, kind.decay)
            return
        assert self.rules.matrices is not None
        matrices = [
            matrix
            for bucket, shard in zip(buckets, shards, strict=True)
            for matrix in self._matrices(bucket, shard)
        ]
        self.rules.matrices.step(matrices, update, self.buckets.counter)

    def _matrices(self, bucket: ShardedBucket, shard: Shard) -> Iterator[Matrix]:
        rows = bucket.layout.rows(bucket.shards)
        if rows:  # the bucket is one matrix, of which a rank holds rows, or none
            (info,) = bucket.infos
            start, stop = bucket.range
            ranges = [(info, start, stop, 0)]
        else:
            ranges = list(param_ranges(bucket))
        for info, start, stop, at in ranges:
            is_whole = (start, stop) == (0, info.numel)
            assert rows or is_whole, f"{info.name} is cut over the shard group"
            span = slice(at, at + stop - start)
            shape = (-1, info.local_shape[1])
            state = {kind: tensor[span].view(shape) for kind, tensor in shard.state.items()}
            master = shard.master[span].view(shape)
            grad = shard.grad[span].view(shape)
            cuts = cuts_of(info, self.buckets.mesh, rows)
            device = bucket.param_shard.device if self.host is None else self.host.device
            yield Matrix(info, master, grad, state, cuts, device=device)

    # -------------------------------------------------------------------------------------------
    #     checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """Yields all optimizer state of this rank. Over all ranks, the slices with `writes` cover
        each element of each parameter once, including tp padding, which `ParamInfo.valid`
        removes."""
        for bucket, state in zip(self.buckets.buckets, self.states, strict=True):
            first_replica = is_first_replica(self.buckets, bucket)
            tensors = {"master": state.master, **state.state}
            for info, start, stop, at in param_ranges(bucket):
                writes = first_replica and info.owner
                for kind, tensor in tensors.items():
                    view = tensor[at : at + stop - start]
                    yield StateSlice(info, kind, start, stop, view, writes=writes)
                for narrow in state.narrow.values():
                    for narrow_slice in narrow.slices((info, start, stop, at)):
                        yield StateSlice(*narrow_slice, writes=writes)

    @torch.no_grad()
    def copy_masters_to_params(self, stale: bool = False) -> None:
        """Copies the master weights to the parameters on every rank, after a load into `slices`."""
        for bucket, state in zip(self.buckets.buckets, self.states, strict=True):
            if state.master is not bucket.param_shard:
                bucket.param_shard.copy_(state.master)
            self.buckets.gather(bucket)
        self.buckets.wait_params()

    def tensors(self) -> list[Tensor]:
        """State on the device in addition to the parameters, for memory metrics."""
        tensors = list[Tensor]()
        if self.host is not None:
            return tensors
        for bucket, state in zip(self.buckets.buckets, self.states, strict=True):
            tensors += [] if state.master is bucket.param_shard else [state.master]
            tensors += state.state.values()
            for narrow in state.narrow.values():
                tensors += narrow.tensors()
        return tensors


def is_first_replica(buckets: Sharding, bucket: ShardedBucket) -> bool:
    """Whether this rank writes its shard of a bucket: it is the first of the ranks that hold the
    shard."""
    groups = bucket.kind.groups
    holders = groups.replica if buckets.zero else groups.grad
    return buckets.mesh.index(holders) == 0


def _zeros(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _gradient(bucket: ShardedBucket) -> Tensor:
    return bucket.grad_shard if bucket.host_grad is None else bucket.host_grad


def copy_weights_to_device(bucket: ShardedBucket, master: Tensor) -> None:
    """Starts to copy updated weights to the device. They are narrowed into the memory of the
    gradient, which is no longer read: it is page-locked, so the copy overlaps with the next
    bucket's update."""
    if master.dtype != bucket.param_shard.dtype:
        assert bucket.host_grad is not None
        buffer = bucket.host_grad.view(torch.uint8)[: bucket.param_shard.nbytes]
        master = buffer.view(bucket.param_shard.dtype).copy_(master)
    bucket.param_shard.copy_(master, non_blocking=True)


def param_ranges(bucket: ShardedBucket) -> Iterator[ParamRange]:
    """Yields (parameter, start and stop in its flat elements, position in the shard) of all that
    this rank's shard holds."""
    position_of = {slot.index: position for position, slot in enumerate(bucket.layout.slots)}
    shard_start = bucket.range[0]
    ranges = bucket.layout.param_ranges(bucket.shard_index, bucket.shards)
    for slot, start, stop in ranges:
        info = bucket.infos[position_of[slot.index]]
        yield info, start, stop, slot.start + start - shard_start
