"""Fencing: at most one plan epoch of one run may commit into a checkpoint folder.

After a network split or a lost agent an old worker may continue and try to write. The newest epoch
leaves its token in the folder; a worker with an older token notices under the folder's lock, before
its rename, and exits with 77. In an elastic run the coordinator may hold the lease on a newer epoch
whose workers have not reached the folder yet: that fences an old epoch too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
from msgspec import Struct

from orchestrator.plan.worker import WorkerEnv, lease_folder, newest_lease
from trainer.durable import sync_folder, write_atomic
from trainer.errors import CheckpointError, Fenced, SaveError

from .files import locked
from .format import FENCE


class Fence(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    run_id: str
    epoch: int
    #: The folder of the epoch leases of an elastic run.
    leases: str = msgspec.field(default="", name="claims")

    @classmethod
    def of(cls, env: WorkerEnv) -> Fence:
        """Returns the token of a worker's epoch."""
        leases = lease_folder(env.run_dir)
        return cls(
            env.run_id,
            env.epoch,
            str(leases) if leases.is_dir() else "",
        )


def acquire(folder: Path, token: Fence) -> None:
    """Makes `token` the folder's only writer and deletes the leftovers of killed saves.

    Raises Fenced if a newer epoch of the same run owns the folder. The token of another run is
    replaced, since the plan gave the folder to this run; the other run is fenced at its next save.
    """
    _make(folder)
    _check_leases(folder, token)
    with locked(folder):
        current = read(folder)
        if current and current.run_id == token.run_id and current.epoch > token.epoch:
            raise Fenced(_message(folder, current, token))
        write_atomic(folder / FENCE, msgspec.json.encode(token))
        for leftover in [*folder.glob(".tmp-*"), *folder.glob(".trash-*")]:
            shutil.rmtree(leftover, ignore_errors=True)


def hold(folder: Path, token: Fence) -> None:
    """Makes sure before a save that `token` still owns the folder. Raises Fenced.

    A folder that somebody has removed is created again and acquired, also from an older epoch that
    was faster: the state in memory can still be saved.
    """
    current = read(folder)
    if current is None or (current.run_id == token.run_id and current.epoch < token.epoch):
        acquire(folder, token)
    else:
        check(folder, token)


def _make(folder: Path) -> None:
    """Creates the folder and fsyncs every new parent, so that a power cut does not lose it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in missing:
        sync_folder(path.parent)


def check(folder: Path, token: Fence) -> None:
    """Raises Fenced unless `token` still owns the folder, SaveError if its token file was removed.
    A commit calls it under the folder's lock."""
    current = read(folder)
    if current is None:
        removed = FENCE if folder.exists() else "the folder"
        raise SaveError(
            f"{folder}: {removed} was removed while this run saved there; the next save creates it"
            " again"
        )
    if current != token:
        raise Fenced(_message(folder, current, token))
    _check_leases(folder, token)


def _check_leases(folder: Path, token: Fence) -> None:
    newest = newest_lease(token.leases) if token.leases else -1
    if newest > token.epoch:
        raise Fenced(_message(folder, Fence(token.run_id, newest), token))


def read(folder: Path) -> Fence | None:
    try:
        return msgspec.json.decode((folder / FENCE).read_bytes(), type=Fence)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / FENCE}: {error}; remove it if no run writes to this folder"
        ) from None


def _message(folder: Path, current: Fence, token: Fence) -> str:
    holder = f"epoch {current.epoch} of run {current.run_id!r}"
    return (
        f"{folder} belongs to {holder}, this is epoch {token.epoch} of {token.run_id!r}: nothing"
        " more is written"
    )
