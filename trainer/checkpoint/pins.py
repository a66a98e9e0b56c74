"""What a run remembers of its first start and its latest save, so that a later start cannot quietly
be another run.

One JSON file each in `<run folder>/pins`: `data.json`, the tokens that the run trains on, and
`saved.json`, its newest durable checkpoint. `orch resume --allow` removes one; the next start then
writes it anew.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from trainer.durable import write_atomic
from trainer.errors import CheckpointError, DataError


class DataPin(Struct, frozen=True):
    """The data of a run."""

    key: str  # of the text: `Index.key`
    tokens: str  # of the token files: `TokenStore.identity`


class SavedPin(Struct, frozen=True):
    """The newest checkpoint that a run has on disk."""

    folder: str
    step: int


def pin_data(path: Path, now: DataPin, where: str) -> str:
    """ "" if the run may train on `now`, which is then its data for good; otherwise what is wrong,
    in one line.

    `where`: the data as the user named it. Raises DataError where the file cannot be read; OSError
    where not written.
    """
    try:
        pinned = msgspec.json.decode(path.read_bytes(), type=DataPin)
    except FileNotFoundError:
        _write(path, now)
        return ""
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); it says which data the run began with"
        ) from None
    if pinned.tokens == now.tokens:
        return ""
    what = "the text" if pinned.key != now.key else "the token files of the same text"
    return (
        f"{what} in {where} is not what this run began with (key {pinned.key[:12]} then,"
        f" {now.key[:12]} now); put it back, or go on with what is there: orch resume --allow"
        " changed-data"
    )


def saved(path: Path) -> SavedPin | None:
    """What `remember` has written; None if the run has never saved. Raises CheckpointError where it
    cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedPin)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it says whether the run has saved before"
        ) from None


def saved_before(path: Path, folder: Path) -> str:
    """What is wrong, in one line, where a run finds no checkpoint in `folder` to start from: it has
    saved before, and nobody said that it may start over. "" if it has not."""
    try:
        pinned = saved(path)
    except CheckpointError as error:
        return str(error)
    if pinned is None:
        return ""
    return (
        f"this run has saved step {pinned.step} in {pinned.folder}, and there is no checkpoint in"
        f" {folder} now; put it back, or start over from step 0: orch resume --allow fresh-start"
    )


def remember(path: Path, folder: Path, step: int) -> None:
    """Note that the checkpoint of `step` is in `folder`. Raises OSError."""
    _write(path, SavedPin(str(folder), step))


def _write(path: Path, pin: Struct) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(path, msgspec.json.encode(pin))
