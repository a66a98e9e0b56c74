"""Epoch leases: the right to write a run's state, one file per epoch in the run folder
(`claims/<epoch>`).

The coordinator of an elastic run is the process that holds the lease on the newest epoch; the
epoch is its fencing token. A process that holds the lease on an older epoch, because it was
paused or cut off, finds the newer lease before it writes. A lease is created by `link(2)`, which
is atomic and exclusive, also on NFS, and shows a lease only when its file is complete.
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
    """Another process holds the lease on a newer epoch: the holder of an older one is fenced and
    must not write."""


class LeaseFile(Frozen):
    """The content of `claims/<epoch>`: the process that holds the lease on that epoch."""

    epoch: int
    node: str
    pid: int


class EpochLease:
    """Takes and checks the leases of one process on the epochs of one run. `held`: the newest
    epoch that it holds, -1 for none."""

    def __init__(self, folder: RunFolder, node: str):
        self._folder = lease_folder(folder.path)
        self._node = node
        self.held = -1

    @property
    def newest(self) -> int:
        """Returns the newest epoch that any process holds the lease on."""
        return newest_lease(self._folder)

    def take(self, epoch: int) -> None:
        """Takes the lease on `epoch`, durably. Raises LeaseLost if another process holds it, or
        a newer one."""
        make_private_folder(self._folder)
        path = self._folder / str(epoch)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        content = LeaseFile(epoch=epoch, node=self._node, pid=os.getpid())
        write_private(draft, msgspec.json.encode(content))
        try:
            os.link(draft, path)
        except FileExistsError:
            raise LeaseLost(f"epoch {epoch} is leased to another node") from None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        # The lease is held even if the next line fails, so a second attempt does not lose it to
        # this process itself.
        self.held = epoch
        sync_folder(self._folder)
        self.check()

    def check(self) -> None:
        """Checks the lease; every write calls this first. Raises LeaseLost if another process
        holds a newer epoch."""
        if (newest := self.newest) > self.held:
            raise LeaseLost(f"epoch {newest} is leased to another node, this is {self.held}")
