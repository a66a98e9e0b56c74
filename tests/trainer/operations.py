"""The order in which matrix products and collectives start, as torch dispatches them."""

from __future__ import annotations

from trainer.compat import DispatchMode


class Order(DispatchMode):
    """`seen`: names, without underscores; collectives begin with "c10d."."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        space, name = (part.strip("_") for part in str(op).split(".")[:2])
        if name in ("mm", "addmm"):
            self.seen.append(name)
        elif space == "c10d":
            self.seen.append(f"c10d.{name}")
        return op(*args, **(kwargs or {}))


class Kernels(DispatchMode):
    """`seen`: names of the operators that compute or copy; those that make views or only allocate are not kernels."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if not (
            op.is_view or op._schema.name.rpartition("::")[2] in ("empty", "empty_like", "empty_strided", "detach")
        ):
            self.seen.append(op._schema.name.rpartition("::")[2])
        return out
