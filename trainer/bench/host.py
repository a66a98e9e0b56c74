"""What the host of a GPU gives to what is offloaded there: rates of an update in its memory, of the
link, of a disk.

All ranks measure at the same time, as they all update at the same time; what a node has is their
number times the slowest of them. The disk moves records as the optimizer on a disk does, without
computing.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from orchestrator.plan.offload import SLOTS
from trainer.comm.control import ControlPath
from trainer.compat import fused_adamw_
from trainer.host.file import StateFile
from trainer.host.memory import HostMemory
from trainer.host.ring import Record, Ring

from .measure import seconds

UPDATED = 1 << 24  # parameters of an update: beyond caches
COPIED = 1 << 27  # bytes of a copy
RECORD = 8 << 20
RECORDS = 32  # records of `RECORD` bytes that a rank moves
ROUNDS = 3  # of the disk; the first writes to new space and is not timed


def host(
    device: torch.device,
    folder: Path,
    ranks: int,
    control: ControlPath,
) -> dict[str, float]:
    """Measures a node with `ranks` ranks, in bytes and bytes per second; the disk is that of
    `folder`. Collective. Raises DiskError if it cannot be written or is full."""
    memory = HostMemory(device)
    folder.mkdir(parents=True, exist_ok=True)
    free = os.statvfs(folder)
    return {
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "memory_bytes_per_s": ranks * _update(control),
        "link_bytes_per_s": _link(memory, control),
        "disk_bytes": free.f_bavail * free.f_frsize,
        "disk_bytes_per_s": ranks * _disk(memory, folder, control),
    }


def _update(control: ControlPath) -> float:
    """Returns the bytes per second that AdamW reads and writes on one rank."""
    weights, gradient, first, second = (torch.zeros(UPDATED) for _ in range(4))
    step = torch.ones(())
    skip = torch.zeros(())

    def once() -> None:
        fused_adamw_(
            [weights], [gradient], [first], [second], step,
            skip=skip, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
        )  # fmt: skip

    return 28 * UPDATED / seconds(once, torch.device("cpu"), control)


def _link(memory: HostMemory, control: ControlPath) -> float:
    """Returns the bytes per second of the slower direction between the device and page-locked
    memory."""
    host_bytes = memory.zeros(COPIED, torch.uint8)
    device_bytes = torch.zeros(COPIED, dtype=torch.uint8, device=memory.device)
    directions = ((host_bytes, device_bytes), (device_bytes, host_bytes))
    copies = (partial(target.copy_, source, non_blocking=True) for target, source in directions)
    return COPIED / max(seconds(copy, memory.device, control) for copy in copies)


def _disk(memory: HostMemory, folder: Path, control: ControlPath) -> float:
    """Returns the bytes per second that one rank reads from and writes to the disk."""
    file = StateFile(folder, RECORD * RECORDS, memory.requests)
    try:
        ring = Ring(
            file,
            [Record(at * RECORD, RECORD) for at in range(RECORDS)],
            [memory.blocks(RECORD) for _ in range(SLOTS)],
        )
        duration = 0.0
        for round_ in range(ROUNDS):
            control.barrier()
            began = perf_counter()
            for _ in range(RECORDS):
                ring.take()
                ring.give_back(lambda: None)
            ring.settle()
            duration += (perf_counter() - began) * (round_ > 0)
    finally:
        file.close()
    return 2 * RECORD * RECORDS * (ROUNDS - 1) / control.maximum(duration)
