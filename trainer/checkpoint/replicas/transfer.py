"""Sends files from rank to rank, directly between the memories that hold them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.control import Group, run_all

#: Bytes of one message.
CHUNK = 256 << 20


class Sending:
    """A file to send: its bytes, or zeros of the same size if it cannot be read (the receiver's
    hash check then fails)."""

    def __init__(self, path: Path, size: int, to: int):
        self.to = to
        self.problem = ""
        try:
            self.data = torch.from_file(
                str(path),
                shared=False,
                size=size,
                dtype=torch.uint8,
            )
        except (OSError, RuntimeError) as error:
            self.data = torch.zeros(size, dtype=torch.uint8)
            self.problem = f"{path.name}: {error}".splitlines()[0]

    def start(self, offset: int, group: Group) -> dist.Work:
        return group.send([self.data[offset : offset + CHUNK]], self.to, 0)


class Receiving:
    """A file to receive, directly into the memory that keeps it; its bytes are discarded if there
    is no room for them."""

    def __init__(self, path: Path, size: int, source: int):
        self.source = source
        self.problem = ""
        self.path = path
        self._temporary = path.with_name(f".{path.name}.tmp")
        try:
            self._temporary.unlink(missing_ok=True)
            with self._temporary.open("xb") as file:
                # Without it, writing to the mapping would raise SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
            self.data: Tensor = torch.from_file(
                str(self._temporary),
                shared=True,
                size=size,
                dtype=torch.uint8,
            )
        except (OSError, RuntimeError) as error:  # torch's if the file was deleted
            self._temporary.unlink(missing_ok=True)
            reason = (getattr(error, "strerror", "") or str(error)).splitlines()[0]
            self.data = torch.empty(size, dtype=torch.uint8)
            self.problem = f"{path.name}: {reason}"

    def start(self, offset: int, group: Group) -> dist.Work:
        return group.recv([self.data[offset : offset + CHUNK]], self.source, 0)

    def finish(self) -> None:
        if not self.problem:
            try:
                self._temporary.rename(self.path)
            except OSError as error:
                self.problem = f"{self.path.name}: {error.strerror}"


def run(transfers: list[Sending | Receiving], group: Group | None = None) -> list[str]:
    """Runs all transfers at once, chunk by chunk, over `group` (default: torch's), and returns the
    problems. Peers must list shared transfers in the same order. Raises the first error of a
    connection once all transfers of the chunk have ended."""
    group = group or dist.group.WORLD
    offset = 0
    longest = max((current.data.numel() for current in transfers), default=0)
    while offset < longest:
        assert group is not None
        run_all(
            [
                partial(current.start, offset, group)
                for current in transfers
                if offset < current.data.numel()
            ]
        )
        offset += CHUNK
    for current in transfers:
        if isinstance(current, Receiving):
            current.finish()
    return [current.problem for current in transfers if current.problem]
