"""Epoch leases: the right to write a run's state, one file per epoch in the run folder
(`claims/<epoch>`).

The coordinator of an elastic run is the process that has claimed the newest epoch; the epoch is its
fencing token. A process that holds an older one, because it was paused or cut off, finds the newer
claim before it writes. Claims are made by `link(2)`, which is atomic and exclusive, also on NFS,
and shows a claim only when it is whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets

import msgspec

from orchestrator.plan.document import Frozen
from orchestrator.plan.worker import lease_folder, newest_lease

from .folder import RunFolder, make_private_folder, sync_folder, write_private


class LeaseLost(Exception):
    """Another process has claimed a newer epoch: the holder of an older one is fenced and must not
    write."""


class Claim(Frozen):
    epoch: int
    node: str
    pid: int


class EpochLease:
    """One process's lease on the epochs of one run. `held`: the newest epoch that it has claimed,
    -1 for none."""

    def __init__(self, folder: RunFolder, node: str):
        self._folder = lease_folder(folder.path)
        self._node = node
        self.held = -1

    @property
    def newest(self) -> int:
        return newest_lease(self._folder)

    def take(self, epoch: int) -> None:
        """Claims `epoch`, durably. Raises LeaseLost if another process has claimed it or a newer
        one."""
        make_private_folder(self._folder)
        path = self._folder / str(epoch)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        claim = Claim(epoch=epoch, node=self._node, pid=os.getpid())
        write_private(draft, msgspec.json.encode(claim))
        try:
            os.link(draft, path)
        except FileExistsError:
            raise LeaseLost(f"epoch {epoch} was claimed by another node") from None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        self.held = (
            epoch  # also where the next line fails: who tries again has not lost it to itself
        )
        sync_folder(self._folder)
        self.check()

    def check(self) -> None:
        """To be called before every write. Raises LeaseLost if another process has claimed a newer
        epoch."""
        if (newest := self.newest) > self.held:
            raise LeaseLost(f"epoch {newest} was claimed by another node, this is {self.held}")
