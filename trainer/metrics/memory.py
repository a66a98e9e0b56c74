"""Bytes of memory by category over time, from the life of every storage: nothing here is a formula.

`params`, `grads` and `optimizer` are storages that the trainer registers; weights that ZeRO-3 gathers for a while are
params too. `activations` is what is kept for a backward pass: what autograd saves, what outlives the forward that made
it, what recomputation makes again. `buffers` is everything else that comes and goes inside a step: temporaries,
gradients on their way, whole buffers under communication. `total` is their sum.

A dispatch mode watches every storage that an operator creates until it is freed. It costs some microseconds an operator
and runs only on the steps that are measured. With compiled blocks it stays off, since it would be compiled itself, or
stop compilation: what autograd saves is then counted as it is saved, and temporaries are not seen.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainer.compat import DispatchMode, storage_key, watch_resizes

CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers")

#: Lists, per category, the tensors that live across steps.
Registered = Mapping[str, Callable[[], Iterable[Tensor]]]
#: (number of the pipeline action that runs now, whether it is a forward), None between actions
Running = Callable[[], tuple[int, bool] | None]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")


@dataclass(slots=True)
class Life:
    """One storage: its bytes, its category as far as it is known, and from when to when it held memory."""

    size: int
    category: str
    born: float
    died: float = math.inf
    forward: int | None = None  # number of the forward that made it

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise ValueError(f"unknown memory category {self.category!r}; they are {', '.join(CATEGORIES)}")


class Point(NamedTuple):
    """What is held from `at` (seconds of the tracker's clock) until the next point."""

    at: float
    held: dict[str, int]  # bytes by category

    @property
    def total(self) -> int:
        return sum(self.held.values())


class StorageTracker(DispatchMode):
    """Follows every storage that exists or comes into being while the mode is on.

    A storage that is neither registered nor made by an operator was there before and is not counted. `running` gives
    the number of the pipeline action that runs now and whether it is a forward, None between them. `opaque`: there are
    compiled blocks, so what autograd saves may be new.
    """

    def __init__(
        self,
        registered: Registered | None = None,
        running: Running = lambda: None,
        opaque: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__()
        self.lives: list[Life] = []
        self._registered, self._running, self._opaque, self._clock = registered or {}, running, opaque, clock
        self._known: dict[int, Life | None] = {}  # by storage; None: there before
        self._finalizers: list[weakref.finalize] = []

    def __enter__(self) -> StorageTracker:
        now = self._clock()
        for category, storage in self._list():
            if storage_key(storage) not in self._known:
                self._follow(storage, Life(storage.nbytes(), category, now))
        self._around = contextlib.ExitStack()
        self._around.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", "A saved_tensors_hooks context", FutureWarning
        )  # what it keeps, `_judge` sees
        self._around.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
        self._around.enter_context(watch_resizes(self._resized))
        return self if self._opaque else super().__enter__()

    def __exit__(self, *error: object) -> None:
        if not self._opaque:
            super().__exit__(*error)
        self._around.close()
        for category, storage in self._list():  # what became one of these during the step
            if life := self._known.get(storage_key(storage)):
                life.category = category
        for life in self.lives:
            if math.isinf(life.died):
                self._judge(life)
        for finalizer in self._finalizers:  # the storages outlive this tracker
            finalizer.detach()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        self._meet(_tensors(args), new=False)
        if kwargs:
            self._meet(_tensors(kwargs.values()), new=False)
        out = func(*args, **kwargs)
        self._meet(_tensors((out,)), new=True)
        return out

    # ------------------------------------------------------------------------------------------- what is seen

    @property
    def live(self) -> int:
        """Bytes held now."""
        return sum(life.size for life in self.lives if math.isinf(life.died))

    @property
    def peak(self) -> int:
        """The most bytes held at once so far."""
        return max((point.total for point in self.points()), default=0)

    def points(self) -> list[Point]:
        """The whole story: one point for each moment at which something changed."""
        changes = [(life.born, life.size, life.category) for life in self.lives if life.size]
        changes += [(life.died, -life.size, life.category) for life in self.lives if math.isfinite(life.died)]
        held, found = dict.fromkeys(CATEGORIES, 0), []
        for at, size, category in sorted(changes, key=lambda change: change[0]):
            held = held | {category: held[category] + size}
            if found and found[-1].at == at:
                found.pop()
            found.append(Point(at, held))
        return found

    # ------------------------------------------------------------------------------------------- events

    def _list(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        for category, tensors in self._registered.items():
            for storage in _storages(tensors()):
                yield category, storage

    def _meet(self, tensors: Iterator[Tensor], new: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._known:
                self._follow(storage, self._newborn(storage.nbytes()) if new else None)

    def _newborn(self, size: int) -> Life:
        number, forward = self._running() or (None, False)
        again = number is not None and not forward and torch.is_grad_enabled()  # recomputation, inside a backward
        category = "activations" if again else "buffers"
        return Life(size, category, self._clock(), forward=number if forward else None)

    def _follow(self, storage: torch.UntypedStorage, life: Life | None) -> None:
        key = storage_key(storage)
        self._known[key] = life
        if life is not None:
            self.lives.append(life)
        finalizer = weakref.finalize(storage, self._forget, key)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def _forget(self, key: int) -> None:
        life = self._known.pop(key)
        if life is not None:
            self._judge(life)
            life.died = self._clock()

    def _judge(self, life: Life) -> None:
        """What outlives the forward that made it is kept for backward."""
        if life.category == "buffers" and life.forward is not None and self._running() != (life.forward, True):
            life.category = "activations"

    def keep(self, tensor: Tensor) -> None:
        """Somebody keeps `tensor` for a later part of backward."""
        life = self._known.get(storage_key(tensor.untyped_storage()))
        if life is not None and life.category == "buffers":
            life.category = "activations"

    def _saved(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor for backward."""
        storage = tensor.untyped_storage()
        life = self._known.get(storage_key(storage))
        if life is not None:
            life.category = "activations" if life.category == "buffers" else life.category
        elif self._opaque and storage_key(storage) not in self._known:
            self._follow(storage, Life(storage.nbytes(), "activations", self._clock()))
        return tensor

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 gathers weights into storages that it fills and empties."""
        key, now = storage_key(storage), self._clock()
        before = self._known.get(key)
        if before is not None:
            before.died = now
        after = Life(storage.nbytes(), "params", now)
        if key in self._known:
            self._known[key] = after
            self.lives.append(after)
        else:
            self._follow(storage, after)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Of what an operator takes or returns: its lists need no registry of tree nodes, which costs half of a step."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def thin(points: list[Point], most: int) -> list[Point]:
    """At most about `most` of the points, peaks and valleys of each stretch of time among them."""
    if len(points) <= most:
        return points
    start, width = points[0].at, (points[-1].at - points[0].at) / (most // 2) or 1.0
    bins: dict[int, list[Point]] = {}
    for point in points:
        bins.setdefault(int((point.at - start) / width), []).append(point)
    kept = []
    for some in bins.values():
        ends = {id(point): point for point in (min(some, key=_total), max(some, key=_total), some[-1])}
        kept += sorted(ends.values(), key=lambda point: point.at)
    return kept


def _total(point: Point) -> int:
    return point.total


class StepMemory:
    """Measures steps. `registered`, `running` and `opaque` as in `StorageTracker`."""

    def __init__(
        self,
        device: torch.device,
        registered: Registered,
        running: Running = lambda: None,
        opaque: bool = False,
    ):
        unknown = set(registered) - set(CATEGORIES)
        if unknown:
            raise ValueError(f"unknown memory category {sorted(unknown)[0]!r}; they are {', '.join(CATEGORIES)}")
        self.device, self.registered, self.running, self.opaque = device, registered, running, opaque
        self.tracker = StorageTracker()

    def points(self) -> list[Point]:
        """Of the step measured last."""
        return self.tracker.points()

    @contextlib.contextmanager
    def measure(self, result: dict[str, int]) -> Iterator[None]:
        """Fills `result` with bytes by category, and their `total`, at the step's peak when the block ends.

        On CUDA the total is the allocator's own peak; what it holds beyond what was seen (rounding, workspaces of
        libraries) counts as buffers.
        """
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tracker = StorageTracker(self.registered, self.running, self.opaque)
        with self.tracker:
            yield
        highest = max(self.points(), key=_total, default=Point(0.0, dict.fromkeys(CATEGORIES, 0)))
        unseen = max(torch.cuda.max_memory_allocated(self.device) - highest.total, 0) if cuda else 0
        result.update(highest.held, buffers=highest.held["buffers"] + unseen, total=highest.total + unseen)
