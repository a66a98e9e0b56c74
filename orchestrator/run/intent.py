"""Intents: what people have requested of a run, one file per request (`intents/000001.json`),
numbered in the order of the requests.

A request is on disk before anybody acts on it, and the newest one counts. Supervisor and
coordinator check at every tick whether it is newer than the one that their attempt began with
(`RunState.intent`), so it is obeyed whichever process dies in between; a verb that finds a run
without processes carries it out. A number is taken by `link(2)`, which is atomic and exclusive,
also on NFS.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.document import Frozen
from orchestrator.plan.exits import Exit

from .folder import RunFolder, make_private_folder, read_json, sync_folder, write_private

#: Signals to agents without a supervisor that ask for the run's end if the request cannot be
#: written to disk; the second one ends it by force. Neither schedulers nor terminals send them.
END = signal.SIGALRM
END_BY_FORCE = signal.SIGVTALRM


class Intent(Frozen):
    """One request. `want`: the run is to end, or to run."""

    number: int  # from 1
    want: Literal["end", "run"]
    at: float  # Unix seconds
    uid: int
    force: bool = False  # an end without saving
    nodes: int | None = None  # the size to run at; None: as before

    @property
    def text(self) -> str:
        """Describes the request in words."""
        if self.want == "end":
            return "cancelled by force" if self.force else "cancelled by the user"
        return f"resize to {self.nodes} nodes" if self.nodes else "resume"


def newest(folder: RunFolder) -> Intent | None:
    """Returns the newest request that can be read. None if there is none, or if the disk does
    not answer: callers ask again soon."""
    try:
        numbers = _numbers(folder)
    except OSError:
        return None
    for number in sorted(numbers, reverse=True):
        with contextlib.suppress(OrchError):
            return read_json(_path(folder, number), Intent)
    return None


def due(folder: RunFolder, began_with: int) -> Intent | None:
    """Returns the newest request if the attempt that began with number `began_with` has to end
    for it, else None."""
    intent = newest(folder)
    if intent and intent.number > began_with and (intent.want == "end" or intent.nodes):
        return intent
    return None


def unwritten_end(force: bool) -> Intent:
    """Returns a request for the end that could not be written, newer than all that are on disk."""
    return Intent(
        number=sys.maxsize,
        want="end",
        at=time.time(),
        uid=os.geteuid(),
        force=force,
    )


def wants_end(folder: RunFolder) -> Intent | None:
    """Returns the newest request if it asks for the run's end."""
    intent = newest(folder)
    return intent if intent and intent.want == "end" else None


def ask(
    folder: RunFolder,
    want: Literal["end", "run"],
    *,
    force: bool = False,
    nodes: int | None = None,
    began_with: int = 0,
) -> Intent:
    """Writes a request durably and returns it, or returns the newest one if that asks for the same
    and is not yet obeyed.

    `began_with`: the newest request when the run's last attempt began; all up to that number are
    obeyed. OrchError (76) if the disk refuses it.
    """
    try:
        return _ask(folder, want, force, nodes, began_with)
    except OSError as error:
        raise OrchError(
            f"the request cannot be written to {folder.intents}: {error.strerror}", Exit.CAPACITY
        ) from None


def _ask(
    folder: RunFolder,
    want: Literal["end", "run"],
    force: bool,
    nodes: int | None,
    began_with: int,
) -> Intent:
    make_private_folder(folder.intents)
    lowest = 1  # the listing of a shared folder may be a minute old, a link is not
    while True:
        numbers = _numbers(folder)
        last = newest(folder)
        if last and (last.want == "end" or last.number > began_with):
            stronger = last.force or not force
            if last.want == want and last.nodes == nodes and stronger:
                return last
        number = max(lowest, max(numbers, default=0) + 1)
        intent = Intent(
            number=number,
            want=want,
            at=time.time(),
            uid=os.geteuid(),
            force=force,
            nodes=nodes,
        )
        draft = folder.intents / f".{number}.{os.urandom(4).hex()}"
        write_private(draft, msgspec.json.encode(intent))
        try:
            os.link(draft, _path(folder, number))
        except FileExistsError:  # somebody else has just taken this number
            lowest = number + 1
            continue
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(folder.intents)
        return intent


def withdraw(folder: RunFolder, intent: Intent) -> None:
    """Removes a request that nobody acts on."""
    _path(folder, intent.number).unlink(missing_ok=True)


def _numbers(folder: RunFolder) -> list[int]:
    try:
        names = os.listdir(folder.intents)
    except FileNotFoundError:
        return []
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]


def _path(folder: RunFolder, number: int) -> Path:
    return folder.intents / f"{number:06d}.json"
