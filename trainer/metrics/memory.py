"""Measures bytes of memory by category over time, from the lifetime of every storage.

`params`, `grads` and `optimizer` are storages that the trainer registers; weights that ZeRO-3
gathers temporarily are params too. `activations` are kept for backward: what autograd saves, what
outlives the forward that made it, what recomputation computes again. `buffers` is everything else
inside a step: temporaries, gradients not yet reduced, communication buffers. `total` is their sum.
`host` is what was offloaded there, and no part of it.

A dispatch mode tracks every storage that an operator creates until it is freed. It costs some
microseconds per operator and runs only on measured steps. With compiled blocks it stays off, since
it would be compiled too or prevent compilation: then only what autograd saves is counted, and
temporaries are missed.
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

#: What `torch.tensor(data)` does last: its argument has just been made and no operator has shown it
#: yet.
LIFT = torch.ops.aten.lift_fresh.default

#: Lists, per category, the tensors that live across steps.
Registered = Mapping[str, Callable[[], Iterable[Tensor]]]
#: (number of the pipeline action that runs now, whether it is a forward), None between actions
Running = Callable[[], tuple[int, bool] | None]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")


@dataclass(slots=True)
class StorageLife:
    """One storage: its bytes, its category as far as known, and when it was allocated and freed."""

    size: int
    category: str
    born: float
    died: float = math.inf
    forward: int | None = None  # number of the forward that made it
    again: bool = False  # recomputation made it

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
        """On the device."""
        return sum(self.held.values()) - self.held.get("host", 0)


class StorageTracker(DispatchMode):
    """Tracks registered storages and every storage that is created while the mode is on.

    A storage that is neither registered nor made by an operator existed before and is not counted.
    `running` gives the number of the current pipeline action and whether it is a forward, None
    between actions. `opaque`: there are compiled blocks, so autograd may save storages that no
    operator has shown.
    """

    def __init__(
        self,
        registered: Registered | None = None,
        running: Running = lambda: None,
        opaque: bool = False,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__()
        self.lives: list[StorageLife] = []
        self._registered = registered or {}
        self._running = running
        self._opaque = opaque
        self._clock = clock
        self._known: dict[int, StorageLife | None] = {}  # by storage; None: existed before
        self._finalizers: list[weakref.finalize] = []

    def __enter__(self) -> StorageTracker:
        now = self._clock()
        for category, storage in self._list():
            if storage_key(storage) not in self._known:
                self._follow(storage, StorageLife(storage.nbytes(), category, now))
        self._around = contextlib.ExitStack()
        self._around.enter_context(warnings.catch_warnings())
        warnings.filterwarnings(
            "ignore", "A saved_tensors_hooks context", FutureWarning
        )  # what it keeps, `_classify` sees
        self._around.enter_context(saved_tensors_hooks(self._saved, lambda tensor: tensor))
        self._around.enter_context(watch_resizes(self._resized))
        return self if self._opaque else super().__enter__()

    def __exit__(self, *error: object) -> None:
        if not self._opaque:
            super().__exit__(*error)
        self._around.close()
        for category, storage in self._list():  # registered only during the step
            if life := self._known.get(storage_key(storage)):
                life.category = category
        for life in self.lives:
            if math.isinf(life.died):
                self._classify(life)
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
        return sum(life.size for life in self.lives if math.isinf(life.died))

    @property
    def peak(self) -> int:
        """The most bytes held at once so far."""
        return max((point.total for point in self.points()), default=0)

    def points(self) -> list[Point]:
        """One point for each moment at which a storage was allocated or freed."""
        changes = [(life.born, life.size, life.category) for life in self.lives if life.size]
        changes += [
            (life.died, -life.size, life.category)
            for life in self.lives
            if math.isfinite(life.died)
        ]
        held = dict.fromkeys(CATEGORIES, 0)
        found = list[Point]()
        for at, size, category in sorted(changes, key=lambda change: change[0]):
            held = held | {category: held[category] + size}
            if found and found[-1].at == at:
                found.pop()
            found.append(Point(at, held))
        return found

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

    def _new_storage(self, size: int) -> StorageLife:
        number, forward = self._running() or (None, False)
        again = self._again()
        category = "activations" if again else "buffers"
        return StorageLife(
            size, category, self._clock(), forward=number if forward else None, again=again
        )

    def _again(self) -> bool:
        """Whether recomputation runs, inside a backward: it puts hooks of its own above ours."""
        running = self._running()
        hook = top_saved_tensors_hook()
        return running is not None and not running[1] and hook not in (None, self._saved)

    def _follow(self, storage: torch.UntypedStorage, life: StorageLife | None) -> None:
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
            self._classify(life)
            if (
                life.again and self._again()
            ):  # a temporary of the recomputation: backward never saw it
                life.category = "buffers"
            life.died = self._clock()

    def _classify(self, life: StorageLife) -> None:
        """A storage that outlives the forward that made it is an activation."""
        if (
            life.category == "buffers"
            and life.forward is not None
            and self._running() != (life.forward, True)
        ):
            life.category = "activations"

    def keep(self, tensor: Tensor) -> None:
        """Count `tensor` as an activation: it is kept for a later part of backward."""
        life = self._known.get(storage_key(tensor.untyped_storage()))
        if life is not None and life.category == "buffers":
            life.category = "activations"

    def _saved(self, tensor: Tensor) -> Tensor:
        """Hook: autograd saves a tensor for backward."""
        storage = tensor.untyped_storage()
        life = self._known.get(storage_key(storage))
        if life is not None:
            life.category = "activations" if life.category == "buffers" else life.category
        elif self._opaque and storage_key(storage) not in self._known:
            self._follow(storage, StorageLife(storage.nbytes(), "activations", self._clock()))
        return tensor

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Hook: FSDP2 gathers weights into storages that it resizes."""
        key = storage_key(storage)
        now = self._clock()
        before = self._known.get(key)
        if before is not None:
            before.died = now
        after = StorageLife(storage.nbytes(), "params", now)
        if key in self._known:
            self._known[key] = after
            self.lives.append(after)
        else:
            self._follow(storage, after)


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """Tensors among an operator's arguments or results; torch's own tree flattening would double a
    step's time."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def downsample(points: list[Point], most: int) -> list[Point]:
    """At most about `most` of the points: the largest, smallest and last of each time interval."""
    if len(points) <= most:
        return points
    start = points[0].at
    width = (points[-1].at - points[0].at) / (most // 2) or 1.0
    bins: dict[int, list[Point]] = {}
    for point in points:
        bins.setdefault(int((point.at - start) / width), []).append(point)
    kept = []
    for some in bins.values():
        ends = {
            id(point): point for point in (min(some, key=_total), max(some, key=_total), some[-1])
        }
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
        """Measures the steps of an engine. Gradients that wait for a later W are kept for backward
        too."""

        def optimizer() -> list[Tensor]:
            return [*engine.optimizer.tensors(), *(tensor for _, tensor in engine.part.states())]

        lists = (engine.buckets.param_tensors, engine.buckets.grad_tensors, optimizer)
        registered = dict(zip(("params", "grads", "optimizer"), lists, strict=True))
        if engine.host is not None:
            host = engine.host  # first: a gradient shard that is there is not on the device
            registered = {"host": lambda: host.tensors, **registered}
            if engine.offload.weights:  # pages of a disk
                registered = {name: registered[name] for name in ("host", "optimizer")}
        running = engine.pipeline.action_times.running
        opaque = engine.plan.job.train.compile
        found = cls(engine.device, registered, running, opaque)
        engine.pipeline.weight_grads.on_defer = lambda grad: found.tracker.keep(grad)
        if engine.store is not None:
            engine.store.on_fetch = lambda tensor: found.tracker.keep(tensor)
        return found

    def points(self) -> list[Point]:
        """The points of the latest measured step."""
        return self.tracker.points()

    @contextlib.contextmanager
    def measure(self, result: dict[str, int]) -> Iterator[None]:
        """When the block ends, fills `result` with bytes by category, and their `total`, at the
        step's peak.

        On CUDA the total is the allocator's peak; the part that was not tracked (rounding, library
        workspaces) counts as buffers.
        """
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        self.tracker = StorageTracker(self.registered, self.running, self.opaque)
        with self.tracker:
            yield
        highest = max(self.points(), key=_total, default=Point(0.0, dict.fromkeys(CATEGORIES, 0)))
        unseen = max(torch.cuda.max_memory_allocated(self.device) - highest.total, 0) if cuda else 0
        held = {name: size for name, size in highest.held.items() if name != "host" or size}
        result.update(held, buffers=held["buffers"] + unseen, total=highest.total + unseen)
