"""Optimizer state in fewer bits than the master weights have, widened for an update one chunk at a
time.

    8bit   one of 256 numbers times the largest value of a block of 64 elements of a row (Dettmers
           et al., arXiv 2110.02861, section 2). The numbers have a dynamic exponent: they are 3 %
           apart at the upper end, and reach down to 10^-7 of it. Only matrices: norms and biases
           keep their state wide.
    bf16   rounded stochastically: up with the probability that keeps the mean. Otherwise a slow
           average, which a step moves by less than half of the last digit, would never move.

Both are functions of the value and of its position in the parameter, so every layout and every
resumed run has the same state. Blocks are parts of rows, which `orchestrator.plan.trained` keeps
whole on every rank. Random bits are a function of (seed, parameter, kind of state, element,
update).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from orchestrator.plan.trained import STATE_BLOCK as BLOCK
from trainer.model.dropout import mix, salt_of, spread
from trainer.parallel.params import ParamInfo, StateKind

from .rule import ElementRule, ParamRange, Shard, Update

#: Elements that are widened at a time.
CHUNK = 1 << 20
Format = Literal["bf16", "8bit"]
#: Kinds of state that are never negative, so that their codes have no sign.
UNSIGNED = ("exp_avg_sq",)


def codebook(signed: bool) -> Tensor:
    """Returns the 256 numbers in ascending order, fp64. A code with n zeros after the sign has the
    factor 10^-n; the bits after its first one cut (0.1, 1) into equal parts, and the middle of a
    part is the number. 0 and 1 have codes as well."""
    numbers = [0.0, 1.0]
    bits = 6 if signed else 7
    for zeros in range(7):
        count = 2 ** (bits - zeros)
        middles = [(0.1 + 0.9 * (index + 0.5) / count) * 10.0**-zeros for index in range(count)]
        numbers += middles
        if signed:
            numbers += [-middle for middle in middles]
    return torch.tensor(sorted(numbers), dtype=torch.float64)


#: (parameter, kind of state, start and stop in its flat local elements, live view).
NarrowSlice = tuple[ParamInfo, StateKind, int, int, Tensor]
#: (elements, dtype) -> zeros where the state is kept.
Zeros = Callable[[int, torch.dtype], Tensor]


class NarrowState(Protocol):
    """One kind of state of a shard of a bucket."""

    def load(self, start: int, stop: int) -> Tensor:
        """Returns elements [start, stop) in the master dtype, as a new tensor."""

    def store(self, start: int, value: Tensor, update: Update) -> None:
        """Stores the elements from `start` on; does nothing if the update is skipped."""

    def tensors(self) -> list[Tensor]: ...

    def slices(self, param_range: ParamRange) -> Iterator[NarrowSlice]:
        """Yields (info, kind, start, stop, live view) of a parameter's elements for
        checkpoints."""


def narrow_state(
    form: Format,
    kind: StateKind,
    ranges: Sequence[ParamRange],
    *,
    numel: int,
    dtype: torch.dtype,
    zeros: Zeros,
    seed: int,
) -> NarrowState:
    """Returns state of zeros for the parameters `ranges` of a shard, whose master weights have
    `dtype`."""
    if form == "8bit":
        return Eight(kind, numel, dtype, zeros)
    return Rounded(
        kind,
        ranges,
        numel=numel,
        dtype=dtype,
        zeros=zeros,
        seed=seed,
    )


class Eight:
    """State in 8 bits: codes, and the largest value of each block."""

    def __init__(
        self,
        kind: StateKind,
        numel: int,
        dtype: torch.dtype,
        zeros: Zeros,
    ):
        self.kind = kind
        book = codebook(signed=kind not in UNSIGNED)
        self.codes = zeros(numel, torch.uint8).fill_(int((book == 0).nonzero()))
        self.largest = zeros(numel // BLOCK, dtype)
        device = self.codes.device
        self.book = book.to(device, dtype)
        self.between = ((book[1:] + book[:-1]) / 2).to(device, dtype)

    def load(self, start: int, stop: int) -> Tensor:
        values = self.book[self.codes[start:stop].int()].view(-1, BLOCK)
        return values.mul_(self.largest[start // BLOCK : stop // BLOCK, None]).view(-1)

    def store(self, start: int, value: Tensor, update: Update) -> None:
        blocks = value.view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        scale = torch.where(largest > 0, largest, torch.ones_like(largest))
        codes = torch.bucketize(blocks / scale[:, None], self.between, out_int32=True).to(
            torch.uint8
        )
        update.set(self.codes[start : start + value.numel()], codes.view(-1))
        first = start // BLOCK
        update.set(self.largest[first : first + len(largest)], largest)

    def tensors(self) -> list[Tensor]:
        return [self.codes, self.largest]

    def slices(self, param_range: ParamRange) -> Iterator[NarrowSlice]:
        info, start, stop, at = param_range
        count = stop - start
        yield info, f"{self.kind}.8bit", start, stop, self.codes[at : at + count]
        first = at // BLOCK
        blocks = count // BLOCK
        view = self.largest[first : first + blocks]
        first_block = start // BLOCK
        yield of_blocks(info, self.kind), "state", first_block, first_block + blocks, view


def of_blocks(info: ParamInfo, kind: StateKind) -> ParamInfo:
    """Describes the tensor of a parameter's blocks, which cut its last dimension."""
    last = len(info.global_shape) - 1
    shape = (*info.global_shape[:-1], info.global_shape[-1] // BLOCK)
    shards = tuple(
        replace(cut, start=cut.start // BLOCK, stop=cut.stop // BLOCK, padded=cut.padded // BLOCK)
        if cut.dim == last
        else cut
        for cut in info.shards
    )
    return replace(
        info,
        name=f"{info.name}.{kind}.largest",
        global_shape=shape,
        shards=shards,
    )


class Rounded:
    """State in bf16, rounded stochastically."""

    def __init__(
        self,
        kind: StateKind,
        ranges: Sequence[ParamRange],
        *,
        numel: int,
        dtype: torch.dtype,
        zeros: Zeros,
        seed: int,
    ):
        self.kind = kind
        self.ranges = list(ranges)
        self.dtype = dtype
        self.values = zeros(numel, torch.bfloat16)
        device = self.values.device
        names = (f"{seed}/state/{kind}/{info.name}" for info, *_ in ranges)
        self.salts = [torch.tensor(salt_of(name), device=device) for name in names]

    def load(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop].to(self.dtype)

    def store(self, start: int, value: Tensor, update: Update) -> None:
        stop = start + value.numel()
        # Padding is zero and stays zero.
        bits = torch.zeros(
            value.numel(),
            dtype=torch.int64,
            device=value.device,
        )
        for (info, first, last, at), salt in zip(self.ranges, self.salts, strict=True):
            low = max(at, start)
            high = min(at + last - first, stop)
            if low < high:
                range_bits = random_bits(
                    info,
                    first + low - at,
                    first + high - at,
                    salt,
                    update.number,
                )
                bits[low - start : high - start] = range_bits
        update.set(self.values[start:stop], rounded(value, bits))

    def tensors(self) -> list[Tensor]:
        return [self.values]

    def slices(self, param_range: ParamRange) -> Iterator[NarrowSlice]:
        info, start, stop, at = param_range
        yield info, f"{self.kind}.bf16", start, stop, self.values[at : at + stop - start]


def random_bits(
    info: ParamInfo,
    start: int,
    stop: int,
    salt: Tensor,
    number: Tensor,
) -> Tensor:
    """Returns 16 random bits int64 [stop - start] for the elements [start, stop) of the local
    tensor in update `number`.

    The bits come from multiplicative hashing (Dietzfelbinger et al. 1997), as those of dropout
    masks: a mixed number of the element's row in the whole parameter times an odd mixed number of
    its column. The bits of padding belong to no element.
    """
    shape = info.local_shape if len(info.global_shape) > 1 else (*info.local_shape, 1)
    *lead, width = shape
    cuts = info.shards
    firsts = {cut.dim: cut.start for cut in cuts}
    device = salt.device
    first = start // width
    last = -(-stop // width)
    row = torch.arange(first, last, device=device)
    inner = 1
    step = 1
    rows = torch.zeros_like(row)
    for dim in range(len(lead) - 1, -1, -1):
        rows += (row // inner % lead[dim] + firsts.get(dim, 0)) * step
        inner = inner * lead[dim]
        step = step * info.global_shape[dim]
    columns = torch.arange(width, device=device) + firsts.get(len(lead), 0)
    mixed_rows = mix(spread(rows) + mix(spread(number.long()) + salt))
    mixed_columns = mix(spread(columns)) | 1
    mixed = mixed_rows[:, None] * mixed_columns
    return mixed.view(-1)[start - first * width : stop - first * width] >> 48 & 0xFFFF


def rounded(value: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 or fp64 to bf16. Of the two bf16 numbers around a value, 16 random `bits` choose
    the one farther from zero with the probability of its share of the distance. Values of bf16
    stay."""
    if value.dtype == torch.float32:
        raw = value.view(torch.int32) + bits.int()
        return (raw & -(1 << 16)).view(torch.float32).bfloat16()
    # bf16 keeps 7 of the 52 digits: the first 16 of the others decide.
    raw64 = value.view(torch.int64) + (bits << 29)
    return (raw64 & -(1 << 45)).view(torch.float64).bfloat16()


@dataclass(frozen=True)
class NarrowShard:
    """A `Shard` with narrow state."""

    master: Tensor
    grad: Tensor
    state: dict[StateKind, NarrowState]


def step_narrow(
    rule: ElementRule,
    shards: Sequence[NarrowShard],
    update: Update,
    decay: bool,
) -> None:
    """Updates shards by `rule`, one chunk at a time."""
    for shard in shards:
        for start in range(0, shard.master.numel(), CHUNK):
            stop = min(start + CHUNK, shard.master.numel())
            state = {kind: narrow.load(start, stop) for kind, narrow in shard.state.items()}
            wide = Shard(
                shard.master[start:stop],
                shard.grad[start:stop],
                state,
            )
            rule.step([wide], update, decay)
            for kind, narrow in shard.state.items():
                narrow.store(start, state[kind], update)
