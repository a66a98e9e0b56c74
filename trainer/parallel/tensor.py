"""Tensor and sequence parallelism: slices of parameters, and the entries and exits of
tensor-parallel regions.

Column-parallel matrices (wq, wk, wv, gate, up) hold a slice of their output features, row-parallel
ones (wo, down) a slice of their input features and give partial sums (Shoeybi et al. 2019, arXiv
1909.08053, section 3). A column/row pair is a tensor-parallel region. Between regions activations
are whole on every rank, or, with sequence parallelism, sharded over the sequence (Korthikanti et
al. 2022, arXiv 2205.05198, section 4.2.2):

               into the region                            out of the region
    TP         Copy:    identity    / all-reduce          Reduce:  all-reduce     / identity
    TP + SP    Gather:  all-gather  / reduce-scatter      Scatter: reduce-scatter / all-gather
    (forward / backward)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.plan.document import Model
from trainer.comm.collectives import CommCounter, all_reduce, start_all_gather, start_reduce_scatter

from .params import ParamInfo, even_shard

AXIS = "tp"
COLUMN = (
    "attn.wq.weight",
    "attn.wq.bias",
    "attn.wkv.weight",
    "mlp.gate.weight",
    "mlp.gate.bias",
    "mlp.up.weight",
    "mlp.up.bias",
    "mlp.shared.gate.weight",
    "mlp.shared.up.weight",
)
KEY_VALUE = ("attn.wk.weight", "attn.wk.bias", "attn.wv.weight", "attn.wv.bias")
ROW = ("attn.wo.weight", "mlp.down.weight", "mlp.shared.down.weight")
VOCABULARY = ("embed.weight", "head.weight", "head.bias")
#: Parameters of experts, [experts, out, in], whose outputs or inputs are cut.
EXPERT_COLUMN = ("mlp.experts.gate.weight", "mlp.experts.up.weight")
EXPERT_ROW = ("mlp.experts.down.weight",)
#: Parameters that are whole on every rank, of which each rank has the gradient of its own heads.
PARTIAL = ("attn.q_norm.weight", "attn.k_norm.weight")


# ----------------------------------------------------------------------------------------------
#     slices


def shard(
    name: str,
    shape: tuple[int, ...],
    model: Model,
    *,
    tp: int,
    index: int,
    sp: bool,
) -> ParamInfo:
    """Returns the slice of a parameter that tp rank `index` of `tp` holds. Pure; `check_supported`
    has checked the degrees."""
    decay = len(shape) > 1
    if tp > 1 and name.endswith(KEY_VALUE):
        return _key_value_shard(
            name,
            shape,
            max(1, tp // model.kv_heads),
            tp=tp,
            index=index,
        )
    if tp > 1 and name.endswith(
        (
            *COLUMN,
            *VOCABULARY,
            *ROW,
            *EXPERT_COLUMN,
            *EXPERT_ROW,
        )
    ):
        dims = {ROW: 1, EXPERT_COLUMN: 1, EXPERT_ROW: 2}
        dim = next((dim for names, dim in dims.items() if name.endswith(names)), 0)
        cut = even_shard(dim, shape[dim], index, tp, AXIS)  # only the vocabulary may not divide
        return ParamInfo(
            name,
            tuple(shape),
            decay,
            (cut,),
            replicas=(index,),
        )
    # Norms, output biases and positions are whole on every rank. With SP each rank sees a part of
    # the sequence, so its gradient is a part too; without SP every rank computes the same full
    # gradient.
    own_heads = name.endswith(PARTIAL) and not (model.mla is not None and ".attn." in name)
    sums = ("tp",) if tp > 1 and (sp or own_heads) else ()
    replicas = tuple(range(tp))
    return ParamInfo(
        name,
        tuple(shape),
        decay,
        sums=sums,
        replicas=replicas,
        owner=index == 0,
    )


def _key_value_shard(
    name: str,
    shape: tuple[int, ...],
    sharing: int,
    *,
    tp: int,
    index: int,
) -> ParamInfo:
    """Returns the slice of a key or value projection. `sharing` neighbours hold the same head if
    there are fewer heads than ranks; each has the gradient of its own queries only."""
    first = index // sharing * sharing
    cut = even_shard(
        0,
        shape[0],
        index // sharing,
        tp // sharing,
        AXIS,
    )
    return ParamInfo(
        name,
        tuple(shape),
        decay=len(shape) > 1,
        shards=(cut,),
        sums=("kv",) if sharing > 1 else (),
        replicas=tuple(range(first, first + sharing)),
        owner=index == first,
    )


# ----------------------------------------------------------------------------------------------
#     regions


class Region(nn.Module):
    """The entry or exit of a tensor-parallel region: [b, s or s/tp, hidden] -> [b, s or s/tp,
    hidden]."""

    def __init__(
        self,
        function: type[torch.autograd.Function],
        group: dist.ProcessGroup,
        counter: CommCounter,
    ):
        super().__init__()
        self.function = function
        self.group = group
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.group, self.counter)

    def extra_repr(self) -> str:
        return f"{self.function.__name__}, tp={self.group.size()}"


class Copy(torch.autograd.Function):
    """Identity forward, all-reduce backward: every rank's column slice contributes to the input's
    gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        counter: CommCounter,
    ) -> Tensor:
        ctx.group = group
        ctx.counter = counter
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # In place: the linears after the region have just made the gradient, and nothing else holds
        # it.
        return all_reduce(grad.contiguous(), ctx.group, AXIS, ctx.counter), None, None


class Reduce(torch.autograd.Function):
    """All-reduce forward (in place, on the partial sum of a row-parallel linear), identity
    backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        counter: CommCounter,
    ) -> Tensor:
        if x.is_contiguous():
            ctx.mark_dirty(x)
        return all_reduce(x.contiguous(), group, AXIS, counter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class Gather(torch.autograd.Function):
    """[b, s/tp, h] -> [b, s, h] forward, reduce-scatter over the sequence backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        counter: CommCounter,
    ) -> Tensor:
        ctx.group = group
        ctx.counter = counter
        return gather_sequence(x, group, counter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return scatter_sequence(grad, ctx.group, ctx.counter), None, None


class Scatter(torch.autograd.Function):
    """[b, s, h] partial sums -> [b, s/tp, h] sums forward, all-gather over the sequence
    backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        counter: CommCounter,
    ) -> Tensor:
        ctx.group = group
        ctx.counter = counter
        return scatter_sequence(x, group, counter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_sequence(grad, ctx.group, ctx.counter), None, None


class SequenceShard(nn.Module):
    """[b, s, h] -> this rank's [b, s/tp, h], without communication.

    It serves values that every rank computes alike (learned positions). Each rank has the gradient
    of its own shard, so the gradient of the parameter before it is partial.
    """

    def __init__(self, ranks: int, index: int):
        super().__init__()
        self.ranks = ranks
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(self.ranks, dim=1)[self.index]


def gather_sequence(
    x: Tensor,
    group: dist.ProcessGroup,
    counter: CommCounter,
    axis: str = AXIS,
) -> Tensor:
    """[b, s/n, h] of every rank -> [b, s, h]."""
    return start_gather_sequence(x, group, counter, axis)()


def scatter_sequence(x: Tensor, group: dist.ProcessGroup, counter: CommCounter) -> Tensor:
    """Partial sums [b, s, h] -> this rank's [b, s/n, h] of their sum."""
    return start_scatter_sequence(x, group, counter)()


def start_gather_sequence(
    x: Tensor,
    group: dist.ProcessGroup,
    counter: CommCounter,
    axis: str = AXIS,
) -> Callable[[], Tensor]:
    """Starts `gather_sequence`. The returned function waits for its result.

    Collectives join dimension 0, so for b > 1 the shards are reordered.
    """
    batch, length, hidden = x.shape
    handle = start_all_gather(x.contiguous(), group, axis, counter)

    def wait() -> Tensor:
        joined = handle.wait()
        if batch == 1:
            return joined.view(1, -1, hidden)
        by_rank = joined.view(-1, batch, length, hidden)
        return by_rank.transpose(0, 1).reshape(batch, -1, hidden)

    return wait


def start_scatter_sequence(
    x: Tensor,
    group: dist.ProcessGroup,
    counter: CommCounter,
) -> Callable[[], Tensor]:
    """Starts `scatter_sequence`. The returned function waits for its result."""
    batch, _, hidden = x.shape
    shards = x
    if batch > 1:
        shards = x.view(batch, group.size(), -1, hidden).transpose(0, 1)
    shards = shards.contiguous().view(-1, hidden)
    handle = start_reduce_scatter(shards, group, AXIS, counter)
    return lambda: handle.wait().view(batch, -1, hidden)
