"""Measures bytes of memory by category over time, from the lifetime of every storage.

`params`, `grads` and `optimizer` are storages that the trainer registers; weights that ZeRO-3
gathers temporarily are params, too. `activations` are kept for backward: tensors that autograd
saves, that outlive the forward that made them, or that recomputation makes. `buffers` are all other
storages inside a step: temporaries, gradients not yet reduced, communication buffers. `total` is
their sum. `host` is offloaded state in host memory, which is not part of `total`.

A dispatch mode tracks every storage that an operator creates until it is freed. It costs some
microseconds per operator and runs only on measured steps. With compiled blocks it stays off, since
it would be compiled, too, or prevent compilation: then only tensors that autograd saves are
counted, and temporaries are missed.
"""

from __future__ import annotations

import contextlib
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from trainer.compat import DispatchMode, storage_key, top_saved_tensors_hook, watch_resizes

if TYPE_CHECKING:
    from trainer.engine import Engine

CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers", "host")

#: What torch's caching allocator says of itself: segments of the device, and their free pieces
#: beside pieces in use, which is fragmentation.
ALLOCATOR_STATISTICS = ("reserved", "inactive_split")

#: The last operator of `torch.tensor(data)`: its argument is new, and no operator has returned it.
LIFT = torch.ops.aten.lift_fresh.default

#: Lists, per category, the tensors that live across steps.
Registered = Mapping[str, Callable[[], Iterable[Tensor]]]
#: (number of the pipeline action that runs now, whether it is a forward), None between actions
Running = Callable[[], tuple[int, bool] | None]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")


@dataclass(slots=True)
class StorageLifetime:
    """One storage: its bytes, its category as far as it is known, and the times at which it was
    allocated and freed."""

    size: int
    category: str
    born: float
    died: float = math.inf
    forward: int | None = None  # number of the forward that made it
    recomputed: bool = False  # recomputation made it

    def __post_init__(self) -> None:
        if self.category not in CATEGORIES:
            raise ValueError(
                f"unknown memory category {self.category!r}; they are {', '.join(CATEGORIES)}"
            )


class Point(NamedTuple):
    """Bytes held from `at` (seconds of the tracker's clock) until the next point."""

    at: float
    held: dict[str, int]  # bytes by category

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.held.values()) - self.held.get("host", 0)


class StorageTracker(DispatchMode):
    """Tracks registered storages and every storage that is created while the mode is on.

    A storage that is neither registered nor made by an operator existed before and is not counted.
    `running` returns the number of the current pipeline action and whether it is a forward, or None
    between actions. `opaque` means that there are compiled blocks, so autograd may save storages
    that no operator has returned.
    """

    def __init__(
        self,
        registered: Registered | None = None,
        running: Running = lambda: None,
        opaque: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__()
        self.lifetimes: list[StorageLifetime] = []
        self._registered = registered or {}
        self._running = running
        self._opaque = opaque
        self._clock = clock
        self._known: dict[int, StorageLifetime | None] = {}  # by storage; None: existed before
        self._finalizers: list[weakref.finalize] = []

    def __enter__(self) -> StorageTracker:
        now = self._clock()
        for category, storage in self._list():
            if storage_key(storage) not in self._known:
                self._follow(storage, StorageLifetime(storage.nbytes(), category, now))
        self._contexts = contextlib.ExitStack()
        self._contexts.enter_context(warnings.catch_warnings())
        # The warning is about tensors that the hooks keep alive; `_classify` finds those.
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
        self._contexts.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
        self._contexts.enter_context(watch_resizes(self._resized))
        return self if self._opaque else super().__enter__()

    def __exit__(self, *error: object) -> None:
        if not self._opaque:
            super().__exit__(*error)
        self._contexts.close()
        for category, storage in self._list():  # registered only during the step
            if lifetime := self._known.get(storage_key(storage)):
                lifetime.category = category
        for lifetime in self.lifetimes:
            if math.isinf(lifetime.died):
                self._classify(lifetime)
        for finalizer in self._finalizers:  # the storages outlive this tracker
            finalizer.detach()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not LIFT:
            self._note_storages(_tensors(args), new=False)
        if kwargs:
            self._note_storages(_tensors(kwargs.values()), new=False)
        out = func(*args, **kwargs)
        self._note_storages(_tensors((out,)), new=True)
        return out

    # -------------------------------------------------------------------------------------------
    #     results

    @property
    def live(self) -> int:
        """Bytes held now."""
        return sum(lifetime.size for lifetime in self.lifetimes if math.isinf(lifetime.died))

    @property
    def peak(self) -> int:
        """The most bytes held at once so far."""
        return max((point.total for point in self.points()), default=0)

    def points(self) -> list[Point]:
        """Returns one point for each moment at which a storage was allocated or freed."""
        changes = [
            (lifetime.born, lifetime.size, lifetime.category)
            for lifetime in self.lifetimes
            if lifetime.size
        ]
        changes += [
            (lifetime.died, -lifetime.size, lifetime.category)
            for lifetime in self.lifetimes
            if math.isfinite(lifetime.died)
        ]
        held = dict.fromkeys(CATEGORIES, 0)
        points = list[Point]()
        for at, size, category in sorted(changes, key=lambda change: change[0]):
            held = held | {category: held[category] + size}
            if points and points[-1].at == at:
                points.pop()
            points.append(Point(at, held))
        return points

    # -------------------------------------------------------------------------------------------
    #     events

    def _list(self) -> Iterator[tuple[str, torch.UntypedStorage]]:
        for category, tensors in self._registered.items():
            for storage in _storages(tensors()):
                yield category, storage

    def _note_storages(self, tensors: Iterator[Tensor], new: bool) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage_key(storage) not in self._known:
                self._follow(storage, self._new_storage(storage.nbytes()) if new else None)

    def _new_storage(self, size: int) -> StorageLifetime:
        number, is_forward = self._running() or (None, False)
        recomputed = self._recomputes()
        return StorageLifetime(
            size,
            category="activations" if recomputed else "buffers",
            born=self._clock(),
            forward=number if is_forward else None,
            recomputed=recomputed,
        )

    def _recomputes(self) -> bool:
        """Whether recomputation runs, inside a backward: it puts its own hooks above ours."""
        running = self._running()
        hook = top_saved_tensors_hook()
        return running is not None and not running[1] and hook not in (None, self._saved)

    def _follow(self, storage: torch.UntypedStorage, lifetime: StorageLifetime | None) -> None:
        key = storage_key(storage)
        self._known[key] = lifetime
        if lifetime is not None:
            self.lifetimes.append(lifetime)
        finalizer = weakref.finalize(storage, self._forget, key)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def _forget(self, key: int) -> None:
        lifetime = self._known.pop(key)
        if lifetime is not None:
            self._classify(lifetime)
            # A temporary of the recomputation ends before backward uses it.
            if lifetime.recomputed and self._recomputes():
                lifetime.category = "buffers"
            lifetime.died = self._clock()

    def _classify(self, lifetime: StorageLifetime) -> None:
        """Counts a storage that outlives the forward that made it as an activation."""
        if lifetime.category != "buffers" or lifetime.forward is None:
            return
        if self._running() != (lifetime.forward, True):
            lifetime.category = "activations"

    def keep(self, tensor: Tensor) -> None:
        """Counts `tensor` as an activation: it is kept for a later part of backward."""
        lifetime = self._known.get(storage_key(tensor.untyped_storage()))
        if lifetime is not None and lifetime.category == "buffers":
            lifetime.category = "activations"

    def _saved(self, tensor: Tensor) -> Tensor:
        """The hook that autograd calls when it saves a tensor for backward."""
        storage = tensor.untyped_storage()
        lifetime = self._known.get(storage_key(storage))
        if lifetime is not None:
            lifetime.category = (
                "activations" if lifetime.category == "buffers" else lifetime.category
            )
        elif self._opaque and storage_key(storage) not in self._known:
            self._follow(
                storage,
                StorageLifetime(
                    storage.nbytes(),
                    "activations",
                    self._clock(),
                ),
            )
        return tensor

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """The hook for resized storages, into which FSDP2 gathers weights."""
        key = storage_key(storage)
        now = self._clock()
        previous = self._known.get(key)
        if previous is not None:
            previous.died = now
        resized = StorageLifetime(storage.nbytes(), "params", now)
        if key in self._known:
            self._known[key] = resized
            self.lifetimes.append(resized)
        else:
            self._follow(storage, resized)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors among an operator's arguments or results; torch's own tree flattening
    would double a step's time."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def downsample(points: list[Point], limit: int) -> list[Point]:
    """Returns about `limit` of the points at most: the largest, smallest and last of each time
    interval."""
    if len(points) <= limit:
        return points
    start = points[0].at
    width = (points[-1].at - points[0].at) / (limit // 2) or 1.0
    bins: dict[int, list[Point]] = {}
    for point in points:
        bins.setdefault(int((point.at - start) / width), []).append(point)
    sampled = []
    for interval in bins.values():
        extremes = (
            min(interval, key=_total),
            max(interval, key=_total),
            interval[-1],
        )
        distinct = {id(point): point for point in extremes}
        sampled += sorted(distinct.values(), key=lambda point: point.at)
    return sampled


def _total(point: Point) -> int:
    return point.total


class StepMemory:
    """Measures steps. `registered`, `running` and `opaque` are those of `StorageTracker`."""

    def __init__(
        self,
        device: torch.device,
        registered: Registered,
        running: Running = lambda: None,
        opaque: bool = False,
    ):
        unknown = set(registered) - set(CATEGORIES)
        if unknown:
            raise ValueError(
                f"unknown memory category {sorted(unknown)[0]!r}; they are {', '.join(CATEGORIES)}"
            )
        self.device = device
        self.registered = registered
        self.running = running
        self.opaque = opaque
        self.tracker = StorageTracker()

    @classmethod
    def of_engine(cls, engine: Engine) -> StepMemory:
        """Measures the steps of an engine. Gradients that wait for a later W count as activations,
        too."""

        def optimizer() -> list[Tensor]:
            return [*engine.optimizer.tensors(), *(tensor for _, tensor in engine.part.states())]

        lists = (engine.buckets.param_tensors, engine.buckets.grad_tensors, optimizer)
        registered = dict(zip(("params", "grads", "optimizer"), lists, strict=True))
        registered["buffers"] = engine.buckets.buffer_tensors
        if engine.reserved is not None:
            reserved = engine.reserved
            registered["activations"] = lambda: reserved.tensors
        if engine.host is not None:
            host = engine.host  # first: a gradient shard on the host is not on the device
            registered = {"host": lambda: host.tensors, **registered}
            if host.weights is not None:  # pages of a disk
                registered = {name: registered[name] for name in ("host", "optimizer")}
        running = engine.pipeline.action_times.running
        opaque = engine.plan.job.train.compile
        memory = cls(engine.device, registered, running, opaque)
        engine.pipeline.weight_grads.on_defer = lambda grad: memory.tracker.keep(grad)
        if engine.store is not None:
            engine.store.on_fetch = lambda tensor: memory.tracker.keep(tensor)
        return memory

    def points(self) -> list[Point]:
        """The points of the latest measured step."""
        return self.tracker.points()

    @contextlib.contextmanager
    def measure(self, result: dict[str, int]) -> Iterator[None]:
        """Fills `result`, when the block ends, with bytes by category and their `total` at the
        step's peak.

        On CUDA the total is the allocator's peak; the part that was not tracked (rounding, library
        workspaces) counts as buffers. Its own statistics are there, too: the most bytes that it has
        `reserved`, and the most in free pieces of segments in use, `inactive_split`.
        """
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tracker = StorageTracker(self.registered, self.running, self.opaque)
        with self.tracker:
            yield
        empty = Point(0.0, dict.fromkeys(CATEGORIES, 0))
        peak = max(self.points(), key=_total, default=empty)
        untracked = 0
        if cuda:
            untracked = max(torch.cuda.max_memory_allocated(self.device) - peak.total, 0)
        held = {name: size for name, size in peak.held.items() if name != "host" or size}
        result.update(
            held,
            buffers=held["buffers"] + untracked,
            total=peak.total + untracked,
        )
        if cuda:
            statistics = torch.cuda.memory_stats(self.device)
            result.update(
                {name: statistics.get(f"{name}_bytes.all.peak", 0) for name in ALLOCATOR_STATISTICS}
            )
