"""Gives numbers to tensors without values.

A number that is read from a fake tensor is one: so a norm is finite and a loss exists. Integers
that follow from a real tensor, as choices of experts do, are known: they are computed along with
their fake tensors. So are those that other ranks send: all ranks are taken to have the same
integers.
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
#: Operations that create known integers without inputs.
SOURCES = {
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.zeros.default,
    aten.ones.default,
}


class Numbers(DispatchMode):
    """The dispatch mode, to be entered inside fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._known = WeakTensorKeyDictionary()  # fake tensor -> real one
        self._sources = WeakTensorKeyDictionary()  # fake tensor -> function that makes the real one

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._follow(tensors):
            return self._unknown(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            value = self._value(args[0])
            with real_tensors():
                return value.item()
        if func in COLLECTIVES:
            out = func(*args, **kwargs)
            values = self._values(args)
            with real_tensors():
                COLLECTIVES[func](*values)
            return out
        values = self._values(args)
        named = self._values(kwargs)
        with real_tensors():
            real = func(*values, **named)
        if torch.Tag.dynamic_output_shape in func.tags:
            out = tree_map(_without_values, real)
        else:
            out = func(*args, **kwargs)
        for leaf, value in zip(tree_leaves(out), tree_leaves(real), strict=True):
            if isinstance(leaf, Tensor) and _is_integer(leaf):
                self._known[leaf] = value
        return out

    def _follow(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the results of an operation on these tensors are known, too."""
        known_flags = [not is_fake(tensor) or tensor in self._known for tensor in tensors]
        return any(known_flags) and all(
            _is_integer(tensor) and (is_known or tensor in self._sources)
            for tensor, is_known in zip(tensors, known_flags, strict=True)
        )

    def _unknown(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten._local_scalar_dense.default:
            dtype = args[0].dtype
            if dtype == torch.bool:
                return True
            return 1.0 if dtype.is_floating_point else 1
        out = func(*args, **kwargs)
        if func in SOURCES and _is_integer(out):
            self._sources[out] = partial(func, *args, **kwargs)
        elif func._schema.is_mutable:
            for argument, tensor in zip(func._schema.arguments, args, strict=False):
                if argument.is_write and isinstance(tensor, Tensor):
                    self._known.pop(tensor, None)
                    self._sources.pop(tensor, None)
        return out

    def _values(self, arguments: Any) -> Any:
        return tree_map(
            lambda argument: self._value(argument) if isinstance(argument, Tensor) else argument,
            arguments,
        )

    def _value(self, tensor: Tensor) -> Tensor:
        if not is_fake(tensor):
            return tensor
        if tensor not in self._known:
            with real_tensors():
                self._known[tensor] = self._sources.pop(tensor)()
        real: Tensor = self._known[tensor]
        return real


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point


def _without_values(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


# ------------------------------------------------------------------------------------------------
#     results of collectives in which every rank of a group sends the same as this one


def _all_to_all(
    out: Tensor,
    tensor: Tensor,
    group: Any,
    into: Sequence[int],
    sizes: Sequence[int],
    *_: Any,
) -> None:
    group = dist.ProcessGroup.unbox(group)
    pieces = tensor.split(list(sizes)) if sizes else tensor.chunk(group.size())
    out.copy_(torch.cat([pieces[group.rank()]] * group.size()))


def _all_gather(out: Tensor, tensor: Tensor, group: Any, *_: Any) -> None:
    out.copy_(torch.cat([tensor.flatten()] * dist.ProcessGroup.unbox(group).size()).view_as(out))


def _broadcast(tensors: Sequence[Tensor], group: Any, root: int, *_: Any) -> None:
    """Copies each tensor to the position of rank `root` in the tensor with the pieces of all ranks,
    as gloo gathers (`trainer.comm.gloo`)."""
    for tensor in tensors:
        distance = (dist.ProcessGroup.unbox(group).rank() - root) * tensor.numel()
        tensor.copy_(
            tensor.as_strided(
                tensor.shape,
                tensor.stride(),
                tensor.storage_offset() + distance,
            )
        )


def _all_reduce(tensors: Sequence[Tensor], group: Any, *_: Any) -> None:
    for tensor in tensors:
        tensor.mul_(dist.ProcessGroup.unbox(group).size())


COLLECTIVES: dict[Any, Callable[..., None]] = {
    c10d.alltoall_base_.default: _all_to_all,
    c10d._allgather_base_.default: _all_gather,
    c10d.broadcast_.default: _broadcast,
    c10d.allreduce_.default: _all_reduce,
}
