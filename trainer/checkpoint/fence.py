"""Fencing: at most one plan epoch of one run may commit into a checkpoint folder.

After a network split or a lost agent an old worker may resume and try to write. The newest epoch
leaves its token in the folder; a worker with an older token notices under the folder's lock, before
its rename, and exits with 77. In an elastic run the coordinator may have claimed a newer epoch
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
    claims: str = ""  # folder in which an elastic run claims its epochs

    @classmethod
    def of(cls, env: WorkerEnv) -> Fence:
        """The token of a worker's epoch."""
        claims = lease_folder(env.run_dir)
        return cls(env.run_id, env.epoch, str(claims) if claims.is_dir() else "")


def claim(folder: Path, token: Fence) -> None:
    """Become the folder's only writer and delete what killed saves left.

    Raises Fenced when a newer epoch of the same run holds it. Another run's claim is taken over,
    since the plan gave the folder to this run; the other run is fenced at its next save.
    """
    _make(folder)
    _check_claims(folder, token)
    with locked(folder):
        current = read(folder)
        if current and current.run_id == token.run_id and current.epoch > token.epoch:
            raise Fenced(_message(folder, current, token))
        write_atomic(folder / FENCE, msgspec.json.encode(token))
        for left in [*folder.glob(".tmp-*"), *folder.glob(".trash-*")]:
            shutil.rmtree(left, ignore_errors=True)


def hold(folder: Path, token: Fence) -> None:
    """Be the folder's only writer still, before a save. A folder that somebody has removed is made
    and claimed anew, also from an older epoch that was faster: what is in memory can still be
    saved. Raises Fenced."""
    current = read(folder)
    if current is None or (current.run_id == token.run_id and current.epoch < token.epoch):
        claim(folder, token)
    else:
        check(folder, token)


def _make(folder: Path) -> None:
    """Create the folder and fsync every new parent: after a power cut the folder itself must still
    be there."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for one in new:
        sync_folder(one.parent)


def check(folder: Path, token: Fence) -> None:
    """Raises Fenced unless `token` is still the folder's newest claim, SaveError if there is none
    any more. Call it under the folder's lock to commit."""
    current = read(folder)
    if current is None:
        what = FENCE if folder.exists() else "the folder"
        raise SaveError(
            f"{folder}: {what} was removed while this run saved there; the next save makes it anew"
        )
    if current != token:
        raise Fenced(_message(folder, current, token))
    _check_claims(folder, token)


def _check_claims(folder: Path, token: Fence) -> None:
    newest = newest_lease(token.claims) if token.claims else -1
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
