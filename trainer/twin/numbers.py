"""Numbers in tensors without values.

What is read from a fake tensor is one: a norm is finite, a loss is there. Integers that follow from
a real tensor, as choices of experts do, are known: they are computed beside their fake tensors. So
is what other ranks send of them: all are taken to have the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from trainer.compat import DispatchMode, is_fake, real_tensors, tree_leaves, tree_map

aten = torch.ops.aten
c10d = torch.ops.c10d
#: Operations that make known integers of nothing.
SOURCES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.zeros.default,
    aten.ones.default,
}


class Numbers(DispatchMode):
    """Inside fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()  # fake tensor -> real one
        self._sources = (
            WeakTensorKeyDictionary()
        )  # fake tensor -> what makes the real one, if it is needed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if not self._follow(tensors):
            return self._unknown(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return self._value(args[0]).item()
        if func in FROM_ALIKE:
            out = func(*args, **kwargs)
            values = self._values(args)
            with real_tensors():
                FROM_ALIKE[func](*values)
            return out
        values = self._values(args)
        named = self._values(kwargs)
        with real_tensors():
            real = func(*values, **named)
        if torch.Tag.dynamic_output_shape in func.tags:
            out = tree_map(_without_values, real)
        else:
            out = func(*args, **kwargs)
        for one, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(one, Tensor) and _whole(one):
                self._known[one] = value
        return out

    def _follow(self, tensors: Sequence[Tensor]) -> bool:
        """Whether what comes of these is known, too."""
        known = [not is_fake(one) or one in self._known for one in tensors]
        return any(known) and all(
            _whole(one) and (is_known or one in self._sources)
            for one, is_known in zip(tensors, known, strict=True)
        )

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return 1.0 if dtype.is_floating_point else True if dtype == torch.bool else 1
        out = func(*args, **kwargs)
        if func in SOURCES and _whole(out):
            self._sources[out] = partial(func, *args, **kwargs)
        elif func._schema.is_mutable:
            for argument, one in zip(func._schema.arguments, args, strict=False):
                if argument.is_write and isinstance(one, Tensor):
                    self._known.pop(one, None)
                    self._sources.pop(one, None)
        return out

    def _values(self, arguments: Any) -> Any:
        return tree_map(lambda one: self._value(one) if isinstance(one, Tensor) else one, arguments)

    def _value(self, tensor: Tensor) -> Tensor:
        if not is_fake(tensor):
            return tensor
        if tensor not in self._known:
            with real_tensors():
                self._known[tensor] = self._sources.pop(tensor)()
        found: Tensor = self._known[tensor]
        return found


def _whole(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point


def _without_values(value: Any) -> Any:
    return (
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        if isinstance(value, Tensor)
        else value
    )


# ------------------------------------------------ what arrives where every rank of a group sends
#     what this one does


def _all_to_all(
    out: Tensor, tensor: Tensor, group: Any, into: Sequence[int], sizes: Sequence[int], *_: Any
) -> None:
    group = dist.ProcessGroup.unbox(group)
    pieces = tensor.split(list(sizes)) if sizes else tensor.chunk(group.size())
    out.copy_(torch.cat([pieces[group.rank()]] * group.size()))


def _all_gather(out: Tensor, tensor: Tensor, group: Any, *_: Any) -> None:
    out.copy_(torch.cat([tensor.flatten()] * dist.ProcessGroup.unbox(group).size()).view_as(out))


def _broadcast(tensors: Sequence[Tensor], group: Any, root: int, *_: Any) -> None:
    """Into the place of rank `root` in a tensor with the pieces of all, as gloo gathers
    (`trainer.comm.gloo`)."""
    for one in tensors:
        ahead = (dist.ProcessGroup.unbox(group).rank() - root) * one.numel()
        one.copy_(one.as_strided(one.shape, one.stride(), one.storage_offset() + ahead))


def _all_reduce(tensors: Sequence[Tensor], group: Any, *_: Any) -> None:
    for one in tensors:
        one.mul_(dist.ProcessGroup.unbox(group).size())


FROM_ALIKE: dict[Any, Callable[..., None]] = {
    c10d.alltoall_base_.default: _all_to_all,
    c10d._allgather_base_.default: _all_gather,
    c10d.broadcast_.default: _broadcast,
    c10d.allreduce_.default: _all_reduce,
}
