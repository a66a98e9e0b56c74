"""Bytes of memory by category: exact where tensors are known by identity, tracked where they come and go.

`params`, `grads`, `optimizer` and `buffers` are the storages of tensors that the trainer registers. `activations` is
everything else that was alive at the step's peak: outputs kept for the backward pass, received hidden states, logits
and temporaries. `total` is their sum at the peak.

On CUDA the allocator knows its own peak. On CPU nobody does, so a dispatch mode watches every storage that an operator
creates until it is freed; it costs some microseconds an operator and runs only on the steps that are measured.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from trainer.compat import DispatchMode, storage_key, tree_leaves

CATEGORIES = ("params", "grads", "optimizer", "activations", "buffers")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`: views of one buffer count once, and whole."""
    return sum({storage_key(storage): storage.nbytes() for storage in _storages(tensors)}.values())


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")


class StorageTracker(DispatchMode):
    """Live and peak bytes of the storages that operators create while the mode is on.

    A storage first met as an input was there before and is not counted; a storage is uncounted when torch frees it,
    whether by the end of a Python variable or by autograd releasing a saved tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, int] = {}  # address of the storage object -> bytes counted for it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        self._meet((args, kwargs), counted=False)
        out = func(*args, **kwargs)
        self._meet(out, counted=True)
        return out

    def _meet(self, tree: object, counted: bool) -> None:
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            key = storage_key(storage)
            if key in self._known:
                continue
            size = storage.nbytes() if counted else 0
            self._known[key] = size
            weakref.finalize(storage, self._forget, key).atexit = False
            self.live += size
            self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key)


class StepMemory:
    """Measures one step. `registered` names, per category, who can list the tensors that live across steps."""

    def __init__(self, device: torch.device, registered: Mapping[str, Callable[[], Iterable[Tensor]]]):
        unknown = set(registered) - set(CATEGORIES)
        if unknown:
            raise ValueError(f"unknown memory category {sorted(unknown)[0]!r}; they are {', '.join(CATEGORIES)}")
        self.device, self.registered = device, registered

    @contextlib.contextmanager
    def measure(self, enabled: bool = True) -> Iterator[dict[str, int]]:
        """Yields a dict that is filled with bytes by category when the block ends; left empty when not `enabled`."""
        result: dict[str, int] = {}
        if not enabled:
            yield result
        elif self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            yield result
            known = self._known()
            peak = torch.cuda.max_memory_allocated(self.device)
            result.update(known, activations=max(peak - sum(known.values()), 0), total=peak)
        else:
            with StorageTracker() as tracker:
                yield result
            known = self._known()
            result.update(known, activations=tracker.peak, total=tracker.peak + sum(known.values()))

    def _known(self) -> dict[str, int]:
        return {name: storage_bytes(tensors()) for name, tensors in self.registered.items()}
