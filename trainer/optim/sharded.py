"""Updates the shard that this rank owns of every bucket by the rules of an optimizer, with a master
copy where parameters are narrower.

One call of a rule for a group of buckets: those whose parameters are gathered after the update are
a group each, so that the gathers start early; others share a call, since ZeRO-3 has a bucket for
every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from orchestrator.plan.document import Optim
from trainer.compat import foreach_copy_, foreach_mul_
from trainer.errors import LayoutError
from trainer.host.memory import HostMemory
from trainer.parallel.data.buckets import ShardedBucket, Sharding
from trainer.parallel.params import ParamInfo, StateKind

from .adamw import AdamW
from .muon import Muon
from .narrow import NarrowShard, NarrowState, narrow_state, step_narrow
from .owners import cuts_of
from .rule import ElementRule, Matrix, MatrixRule, Piece, Rules, Shard, Update
from .sgd import Sgd

#: Elements of a narrow gradient that are widened at a time on the host, by up to seven threads.
PIECE = 1 << 19


def rules_of(optim: Optim, seed: int = 0) -> Rules:
    """What the plan asks for. With Muon, whatever is no matrix inside of a block follows AdamW."""
    state = optim.state or ""
    if optim.kind == "sgd":
        return Rules(Sgd(optim), state=state, seed=seed)
    return Rules(AdamW(optim), Muon(optim) if optim.kind == "muon" else None, state, seed)


@dataclass(frozen=True)
class StateSlice:
    """Elements `[start, stop)` of one parameter's local tensor, flattened, as this rank holds them
    for one kind of state. `tensor` is the live 1-D view: a save reads it, a load writes it."""

    info: ParamInfo
    kind: StateKind
    start: int
    stop: int
    tensor: Tensor
    writes: bool  # of all holders, this rank writes it to checkpoints


@dataclass
class BucketState:
    """The optimizer's state for one bucket; its tensors are 1-D of the shard's length in the master
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
        """`host`: where master weights and moments are, and updates are computed. Raises
        LayoutError for whole matrices and narrow state there."""
        if host is not None and rules.state:
            raise LayoutError(
                f"optim.state={rules.state} is kept on the device: train.offload=none"
            )
        if host is not None and any(bucket.kind.whole for bucket in buckets.buckets):
            raise LayoutError(
                "an optimizer of whole matrices computes on the device: train.offload=none"
            )
        self.buckets = buckets
        self.rules = rules
        self.master_dtype = master_dtype
        self.host = host
        self.states = [self._new_state(bucket) for bucket in buckets.buckets]
        self.groups = self._grouped()
        device = self.states[0].master.device if self.states else torch.device("cpu")
        self._steps = torch.zeros(
            (), dtype=torch.float32, device=device
        )  # updates made; exact to 16 million
        self._skip = torch.zeros((), dtype=torch.float32, device=device)  # 1: not this one
        self.copied: torch.cuda.Event | None = (
            None  # a copy of the state is complete: no update before that
        )

    @property
    def step_count(self) -> int:
        """Updates made so far, skipped ones not among them. Waits for the device."""
        return int(self._steps)

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._steps.fill_(count)

    def _rule(self, bucket: ShardedBucket) -> ElementRule | MatrixRule:
        if not bucket.kind.whole:
            return self.rules.elements
        assert self.rules.matrices is not None
        return self.rules.matrices

    def _new_state(self, bucket: ShardedBucket) -> BucketState:
        shard = bucket.param_shard
        if self.host is not None:
            master, *rest = (
                self.host.zeros(shard.numel(), self.master_dtype)
                for _ in ("", *self._rule(bucket).kinds)
            )
            master.copy_(shard)
            return BucketState(master, dict(zip(self._rule(bucket).kinds, rest, strict=True)))
        master = shard if shard.dtype == self.master_dtype else shard.to(self.master_dtype)
        if bucket.kind.narrow and self.rules.state:
            where, (form, seed) = list(pieces(bucket)), (self.rules.state, self.rules.seed)
            same = master.numel(), master.dtype, master.device, seed
            return BucketState(
                master,
                {},
                {kind: narrow_state(form, kind, where, *same) for kind in self._rule(bucket).kinds},
            )
        return BucketState(
            master, {kind: torch.zeros_like(master) for kind in self._rule(bucket).kinds}
        )

    def _grouped(self) -> list[list[int]]:
        """Indices of the buckets that one call updates, groups in forward order."""
        groups = list[list[int]]()
        at = dict[tuple[bool, ...], list[int]]()
        for index, bucket in reversed(list(enumerate(self.buckets.buckets))):
            # a narrow gradient is widened for the update: not those of the whole model at once
            alone = (
                self.buckets.gathers
                or self.host is not None
                or bucket.grad_shard.dtype != self.master_dtype
            )
            kind = bucket.kind.decay, bucket.kind.whole, bucket.kind.narrow
            if not alone and kind in at:
                at[kind].append(index)
                continue
            groups.append([index])
            if not alone:
                at[kind] = groups[-1]
        return groups

    @torch.no_grad()
    def step(self, lr: float, grad_scale: Tensor, finite: Tensor) -> None:
        """One update with the gradients times `grad_scale` (clipping, loss scale), or none if not
        `finite`: both 0-d, decided on the device. Starts the parameter gathers in forward order;
        `buckets.wait_params()` waits for them."""
        factor, update = self.decide(lr, grad_scale, finite)
        for group in self.groups:
            buckets = [self.buckets.buckets[at] for at in group]
            states = [self.states[at] for at in group]
            self.compute(group, [_gradient(bucket) for bucket in buckets], factor, update)
            copies = [
                pair
                for pair in zip(buckets, states, strict=True)
                if pair[1].master is not pair[0].param_shard
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

    def decide(self, lr: float, grad_scale: Tensor, finite: Tensor) -> tuple[Tensor | None, Update]:
        """(factor of the gradients if it is not 1, the update), which is counted. On the host it
        waits for the device, which decides, and for the gradients."""
        if self.host is not None:
            grad_scale = grad_scale.cpu()
            finite = finite.cpu()
            self.host.wait()
        if self._steps.device != finite.device:  # a rank without parameters, in its first step
            self._steps, self._skip = self._steps.to(finite.device), self._skip.to(finite.device)
        if self.copied is not None:  # the stream waits, not the host
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None
        self._steps += finite
        torch.logical_not(finite, out=self._skip)
        no_scaling = not grad_scale.is_cuda and float(grad_scale) == 1.0
        return None if no_scaling else grad_scale.to(self.master_dtype), Update(
            lr, self._steps, self._skip
        )

    def compute(
        self, group: Sequence[int], grads: Sequence[Tensor], factor: Tensor | None, update: Update
    ) -> None:
        """Update the states of a group of buckets by their gradients, which may be changed."""
        if self.host is not None and any(grad.dtype != self.master_dtype for grad in grads):
            for at, grad in zip(group, grads, strict=True):
                self._compute_in_pieces(at, grad, factor, update)
            return
        grads = [grad.to(self.master_dtype) for grad in grads]
        if factor is not None:
            foreach_mul_(grads, factor)
        self._update(
            [self.buckets.buckets[at] for at in group],
            [self.states[at] for at in group],
            grads,
            update,
        )

    def _compute_in_pieces(
        self, at: int, grad: Tensor, factor: Tensor | None, update: Update
    ) -> None:
        """As `compute`, on the host, of a gradient that is widened: a piece of it stays in the
        caches, the whole would be written to memory and read again."""
        state = self.states[at]
        length = min(grad.numel(), PIECE * max(1, torch.get_num_threads() // 4))
        buffer = torch.empty(length, dtype=self.master_dtype)
        for start in range(0, grad.numel(), length):
            span = slice(start, start + length)
            grad32 = buffer[: grad[span].numel()].copy_(grad[span])
            if factor is not None:
                grad32.mul_(factor)
            shard = Shard(
                state.master[span],
                grad32,
                {kind: tensor[span] for kind, tensor in state.state.items()},
            )
            self.rules.elements.step([shard], update, self.buckets.buckets[at].kind.decay)

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
                NarrowShard(one.master, grad, one.narrow)
                for one, grad in zip(states, grads, strict=True)
            ]
            step_narrow(self.rules.elements, narrow, update, kind.decay)
            return
        shards = [
            Shard(state.master, grad, state.state)
            for state, grad in zip(states, grads, strict=True)
        ]
        if not kind.whole:
            self.rules.elements.step(shards, update, kind.decay)
            return
        assert self.rules.matrices is not None
        matrices = [
            one for pair in zip(buckets, shards, strict=True) for one in self._matrices(*pair)
        ]
        self.rules.matrices.step(matrices, update, self.buckets.counter)

    def _matrices(self, bucket: ShardedBucket, shard: Shard) -> Iterator[Matrix]:
        rows = bucket.layout.rows(bucket.shards)
        if rows:  # a bucket is a matrix, of which a rank has rows, or none
            (info,), (start, stop) = bucket.infos, bucket.range
            matrix_pieces = [(info, start, stop, 0)]
        else:
            matrix_pieces = list(pieces(bucket))
        for info, start, stop, at in matrix_pieces:
            assert rows or (start, stop) == (0, info.numel), (
                f"{info.name} is cut over the shard group"
            )
            span = slice(at, at + stop - start)
            shape = (-1, info.local_shape[1])
            state = {kind: tensor[span].view(shape) for kind, tensor in shard.state.items()}
            master = shard.master[span].view(shape)
            grad = shard.grad[span].view(shape)
            yield Matrix(info, master, grad, state, cuts_of(info, self.buckets.mesh, rows))

    # -------------------------------------------------------------------------------------------
    #     checkpoints

    def slices(self) -> Iterator[StateSlice]:
        """All optimizer state of this rank. Over all ranks, the slices with `writes` cover each
        element of each parameter once, including tp padding, which `ParamInfo.valid` removes."""
        for bucket, state in zip(self.buckets.buckets, self.states, strict=True):
            first_replica = is_first_replica(self.buckets, bucket)
            for info, start, stop, at in pieces(bucket):
                for kind, tensor in {"master": state.master, **state.state}.items():
                    view = tensor[at : at + stop - start]
                    yield StateSlice(info, kind, start, stop, view, first_replica and info.owner)
                for narrow_state in state.narrow.values():
                    for kind, state_info, first, last, view in narrow_state.slices(
                        (info, start, stop, at)
                    ):
                        yield StateSlice(
                            state_info, kind, first, last, view, first_replica and info.owner
                        )

    @torch.no_grad()
    def copy_masters_to_params(self, stale: bool = False) -> None:
        """After a load into `slices`: copy the master weights to the parameters, on every rank."""
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
            tensors += [
                tensor
                for narrow_state in state.narrow.values()
                for tensor in narrow_state.tensors()
            ]
        return tensors


def is_first_replica(buckets: Sharding, bucket: ShardedBucket) -> bool:
    """Whether this rank writes its shard of a bucket: of the ranks that hold the same, the first
    does."""
    groups = bucket.kind.groups
    return buckets.mesh.index(groups.replica if buckets.zero else groups.grad) == 0


def _gradient(bucket: ShardedBucket) -> Tensor:
    return bucket.grad_shard if bucket.host_grad is None else bucket.host_grad


def copy_weights_to_device(bucket: ShardedBucket, master: Tensor) -> None:
    """Start to copy updated weights to the device. They are narrowed where the gradient was, which
    nobody reads any more: page-locked memory, so the copy runs beside the next bucket's update."""
    if master.dtype != bucket.param_shard.dtype:
        assert bucket.host_grad is not None
        buffer = bucket.host_grad.view(torch.uint8)[: bucket.param_shard.nbytes]
        master = buffer.view(bucket.param_shard.dtype).copy_(master)
    bucket.param_shard.copy_(master, non_blocking=True)


def pieces(bucket: ShardedBucket) -> Iterator[Piece]:
    """(parameter, start and stop in its flat elements, position in the shard) of all that this
    rank's shard holds."""
    position_of = {slot.index: position for position, slot in enumerate(bucket.layout.slots)}
    for slot, start, stop in bucket.layout.pieces(bucket.shard_index, bucket.shards):
        yield (
            bucket.infos[position_of[slot.index]],
            start,
            stop,
            slot.start + start - bucket.range[0],
        )
