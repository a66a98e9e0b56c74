"""The right to write, epoch by epoch: one file an epoch in the run folder, which exactly one process can make.

A coordinator of an elastic run is who has claimed the newest epoch. Whoever holds an older one, frozen meanwhile or cut
off, finds that out before it writes. `link(2)` is atomic and exclusive, also on NFS, and shows a claim only when whole.
"""

from __future__ import annotations

import contextlib
import os
import secrets

import msgspec

from orchestrator.plan.document import Frozen
from orchestrator.plan.worker import claims_folder, newest_claim

from .folder import RunFolder, make_private_folder, sync_folder, write_private


class Deposed(Exception):
    """A newer epoch has been claimed by somebody else: nothing more may be written for an older one."""


class Claim(Frozen):
    epoch: int
    node: str
    pid: int


class Claims:
    """One process's rights in one run."""

    def __init__(self, folder: RunFolder, node: str):
        self._folder, self._node = claims_folder(folder.path), node
        self.held = -1

    @property
    def newest(self) -> int:
        return newest_claim(self._folder)

    def take(self, epoch: int) -> None:
        """Claim `epoch`, durably. Deposed: it, or a newer one, is somebody else's."""
        make_private_folder(self._folder)
        path = self._folder / str(epoch)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        claim = Claim(epoch=epoch, node=self._node, pid=os.getpid())
        write_private(draft, msgspec.json.encode(claim))
        try:
            os.link(draft, path)
        except FileExistsError:
            raise Deposed(f"epoch {epoch} was claimed by another node") from None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
        sync_folder(self._folder)
        self.held = epoch
        self.check()

    def check(self) -> None:
        """Before every write. Deposed: the right is gone."""
        if (newest := self.newest) > self.held:
            raise Deposed(f"epoch {newest} was claimed by another node, this is {self.held}")
