"""Inputs of recomputed layers in one buffer that a rank reserves before its first step.

ZeRO-R's memory defragmentation, MD (arXiv 1910.02054, section 6.3): checkpoints of activations live
from forward to backward and everything else is freed soon, so among the short-lived tensors the
long-lived ones would cut free memory into pieces. Here each input is copied into a slot of the
buffer, and the recomputation reads it there. The slots are as many as the pipeline's schedule keeps
at once.

The input that a pipeline stage has received is not copied: it must live until its gradient is sent,
and is held where it arrived.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from orchestrator.plan import Plan
from orchestrator.plan.offload import slot_bytes


class Reserved:
    """An input in the buffer; its slot becomes free when nothing refers to this."""

    __slots__ = ("__weakref__", "view")

    def __init__(self, view: Tensor):
        self.view = view


class ReservedInputs:
    """The buffer, behind the interface of `trainer.host.activations.ActivationStore`."""

    def __init__(self, size: int, device: torch.device):
        """`size`: the bytes of one input, or of this rank's share of it."""
        self.size = size
        self.device = device
        #: The buffer's storage, for memory metrics.
        self.tensors = list[Tensor]()
        self._slots = list[Tensor]()
        self._free = list[int]()

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ReservedInputs:
        """Returns the buffer of a rank, without slots yet; inputs have `dtype`."""
        par = plan.parallel
        sequence = plan.job.train.seq_len // par.cp // (par.tp if par.sp else 1)
        elements = par.micro_batch_size * sequence * plan.model.hidden
        if plan.job.train.partition_activations is True and not par.sp:
            elements = -(-elements // par.tp)
        return cls(elements * dtype.itemsize, device)

    def reserve(self, slots: int) -> None:
        """Allocates the buffer."""
        distance = slot_bytes(self.size)
        buffer = torch.empty(
            slots * distance,
            dtype=torch.uint8,
            device=self.device,
        )
        self.tensors = [buffer]
        # `data`: a write into one slot leaves the others' version counters alone, by which autograd
        # tells whether a tensor that it saved was overwritten.
        for start in range(0, slots * distance, distance):
            stop = start + self.size
            self._slots.append(buffer[start:stop].data)
        self._free = list(range(slots))

    def put(self, tensor: Tensor) -> Reserved:
        """Copies an input into a free slot."""
        if not self._free:
            raise RuntimeError(f"more than {len(self._slots)} inputs of recomputed layers at once")
        slot = self._free.pop()
        view = self._slots[slot].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        reserved = Reserved(view)
        release = weakref.finalize(
            reserved,
            self._free.append,
            slot,
        )
        release.atexit = False
        return reserved

    def get(self, reserved: Reserved) -> Tensor:
        """Returns an input, where it is."""
        return reserved.view
