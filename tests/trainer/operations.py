"""What torch dispatches: the order of matrix products and collectives, what kernels read and write,
how large it is."""

from __future__ import annotations

import math

import torch

from trainer.compat import DispatchMode


class Order(DispatchMode):
    """`seen`: names, without underscores; collectives begin with "c10d."."""

    def __init__(self, products: tuple[str, ...] = ("mm", "addmm")):
        super().__init__()
        self.products = products
        self.seen: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        space, name = (label.strip("_") for label in str(op).split(".")[:2])
        if name in self.products:
            self.seen.append(name)
        elif space == "c10d":
            self.seen.append(f"c10d.{name}")
        return op(*args, **(kwargs or {}))


FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "lift_fresh")
#: Whose first argument is written and not read.
WRITES = ("copy_", "fill_", "zero_", "normal_")


class Kernels(DispatchMode):
    """`seen`: names of the operators that compute or copy, `bytes` what each reads and writes, each
    tensor once; those that make views or only allocate are free. While `muted` nothing is noted."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.bytes: list[int] = []
        self.muted = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        name = op._schema.name.rpartition("::")[2]
        if not (op.is_view or name in FREE or self.muted):
            inputs = [tensor for tensor in _flat(args[name in WRITES :])]
            inputs += [
                tensor
                for key, value in kwargs.items()
                if key not in ("out", "grad_input")
                for tensor in _flat([value])
            ]
            self.note(name, inputs, _flat([out]))
        return out

    def note(self, name, read, written):
        self.seen.append(name)
        self.bytes.append(sum(map(size, read)) + sum(map(size, written)))


def _flat(values):
    """The tensors in nested lists."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _flat(value)
    return tensors


def size(tensor):
    """Bytes of the elements of a tensor, those that are repeated by a stride of 0 once."""
    shape = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(many if stride else 1 for many, stride in shape) * tensor.element_size()


class LargestTensor(DispatchMode):
    """Elements of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(tensor.numel() for tensor in _flat([output]))])
        return output
