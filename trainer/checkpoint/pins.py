"""Pins: records of a run's first start and latest save, so that a later start cannot silently train
something else.

`<run folder>/pins` holds two JSON files: `data.json`, the tokens that the run trains on, and
`saved.json`, its newest durable checkpoint. `orch resume --allow` removes one; the next start then
writes it again.
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


def pin_data(path: Path, current: DataPin, name: str) -> str:
    """Pins the run to the data `current` if it has no pin yet. Returns "" if the run may train on
    `current`, else the problem in one line.

    `name` is the data as the user named it. Raises DataError if the file cannot be read, OSError if
    it cannot be written.
    """
    try:
        pinned = msgspec.json.decode(path.read_bytes(), type=DataPin)
    except FileNotFoundError:
        _write(path, current)
        return ""
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read ({error}); it says which data the run began with"
        ) from None
    if pinned.tokens == current.tokens:
        return ""
    changed = "the text" if pinned.key != current.key else "the token files of the same text"
    return (
        f"{changed} in {name} is not what this run began with (key {pinned.key[:12]} then,"
        f" {current.key[:12]} now); put it back, or train on the current data: orch resume --allow"
        " changed-data"
    )


def saved(path: Path) -> SavedPin | None:
    """Reads the pin that `remember` has written; None if the run has never saved. Raises
    CheckpointError if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=SavedPin)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it says whether the run has saved before"
        ) from None


def saved_before(path: Path, folder: Path) -> str:
    """Explains in one line why a run that finds no checkpoint in `folder` must not start: it has
    saved before, and nobody has allowed it to start over. Returns "" if it has never saved."""
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
    """Records that the checkpoint of `step` is in `folder`. Raises OSError."""
    _write(path, SavedPin(str(folder), step))


def _write(path: Path, pin: Struct) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(path, msgspec.json.encode(pin))
