"""Small control messages between all ranks of the default group: checks, outcomes, manifests, step counts.

Uses CPU tensors, hence gloo. Without a process group the world size is 1.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_ints(values: list[int]) -> list[int]:
    """Element-wise sums over all ranks."""
    total = torch.tensor(values, dtype=torch.int64)
    if world_size() > 1:
        dist.all_reduce(total)
    return total.tolist()


def all_gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's `data`, by rank, on every rank. Lengths may differ."""
    world = world_size()
    if world == 1:
        return [data]
    sizes, width = _sizes(len(data), world)
    table = torch.empty(world * width, dtype=torch.uint8)
    dist.all_gather_into_tensor(table, _tensor(data, width))
    return _rows(table, sizes, width)


def gather_bytes(data: bytes) -> list[bytes]:
    """Every rank's `data`, by rank, on rank 0; an empty list on the others."""
    world = world_size()
    if world == 1:
        return [data]
    sizes, width = _sizes(len(data), world)
    rows = [torch.empty(width, dtype=torch.uint8) for _ in range(world)] if dist.get_rank() == 0 else None
    dist.gather(_tensor(data, width), rows, dst=0)
    return [] if rows is None else _rows(torch.cat(rows), sizes, width)


def _sizes(mine: int, world: int) -> tuple[torch.Tensor, int]:
    """(every rank's length, the width of a row that holds any of them)."""
    sizes = torch.empty(world, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([mine], dtype=torch.int64))
    return sizes, max(int(sizes.max()), 1)


def broadcast_bytes(data: bytes, src: int = 0) -> bytes:
    """The `data` of rank `src` on every rank; what the others pass is ignored."""
    if world_size() == 1:
        return data
    size = torch.tensor([len(data)], dtype=torch.int64)
    dist.broadcast(size, src=src)
    width = max(int(size), 1)
    row = _tensor(data, width) if dist.get_rank() == src else torch.empty(width, dtype=torch.uint8)
    dist.broadcast(row, src=src)
    return _rows(row, size, width)[0]


def _tensor(data: bytes, width: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)


def _rows(table: torch.Tensor, sizes: torch.Tensor, width: int) -> list[bytes]:
    raw = table.numpy().tobytes()
    return [raw[index * width : index * width + size] for index, size in enumerate(sizes.tolist())]
