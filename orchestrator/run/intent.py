"""What people have asked of a run: one file a request (`intents/000001.json`), numbered in the
order of asking.

A request is on disk before anybody acts on it, and the newest one counts. Supervisor and
coordinator look at every tick whether it is newer than the one that their attempt began with
(`RunState.intent`), so it is obeyed whoever dies in between; a verb that meets a run whose
processes are all gone takes it up. A number is taken by `link(2)`, which is atomic and exclusive,
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

#: To agents that no supervisor looks after, where the disk does not take a request for the end; the
#: second: by force. Neither schedulers nor terminals send them.
END = signal.SIGALRM
END_BY_FORCE = signal.SIGVTALRM


class Intent(Frozen):
    """One request. `want`: the run is to end, or to run."""

    number: int  # from 1
    want: Literal["end", "run"]
    at: float  # Unix seconds
    uid: int
    force: bool = False  # of an end: nothing is saved
    nodes: int | None = None  # of a run: its size; None: as before

    @property
    def text(self) -> str:
        """What was asked for, in words."""
        if self.want == "end":
            return "cancelled by force" if self.force else "cancelled by the user"
        return f"resize to {self.nodes} nodes" if self.nodes else "resume"


def newest(folder: RunFolder) -> Intent | None:
    """The newest request that can be read, None for none, or where the disk does not answer: it is
    asked again soon."""
    try:
        numbers = _numbers(folder)
    except OSError:
        return None
    for number in sorted(numbers, reverse=True):
        with contextlib.suppress(OrchError):
            return read_json(_path(folder, number), Intent)
    return None


def due(folder: RunFolder, began_with: int) -> Intent | None:
    """The newest request, where the attempt that began with number `began_with` has to end for it,
    else None."""
    intent = newest(folder)
    return (
        intent
        if intent and intent.number > began_with and (intent.want == "end" or intent.nodes)
        else None
    )


def unwritten_end(force: bool) -> Intent:
    """A request for the end that the disk has not taken, newer than all that it has."""
    return Intent(number=sys.maxsize, want="end", at=time.time(), uid=os.geteuid(), force=force)


def wants_end(folder: RunFolder) -> Intent | None:
    """The newest request, where it is one for the run's end."""
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
    """Writes a request, durably; returns it, or the newest one if that asks for the same and is not
    obeyed yet.

    `began_with`: of the run's last attempt, which has obeyed all requests up to that number.
    OrchError (76) when the disk does not take it.
    """
    try:
        return _ask(folder, want, force, nodes, began_with)
    except OSError as error:
        raise OrchError(
            f"the request cannot be written to {folder.intents}: {error.strerror}", Exit.CAPACITY
        ) from None


def _ask(
    folder: RunFolder, want: Literal["end", "run"], force: bool, nodes: int | None, began_with: int
) -> Intent:
    make_private_folder(folder.intents)
    least = 1  # a listing of a shared folder may be a minute old, a link is not
    while True:
        numbers = _numbers(folder)
        last = newest(folder)
        if last and (last.want == "end" or last.number > began_with):
            stronger = last.force or not force
            if last.want == want and last.nodes == nodes and stronger:
                return last
        number = max(least, max(numbers, default=0) + 1)
        intent = Intent(
            number=number, want=want, at=time.time(), uid=os.geteuid(), force=force, nodes=nodes
        )
        draft = folder.intents / f".{number}.{os.urandom(4).hex()}"
        write_private(draft, msgspec.json.encode(intent))
        try:
            os.link(draft, _path(folder, number))
        except FileExistsError:  # somebody else has asked in this moment
            least = number + 1
            continue
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(folder.intents)
        return intent


def withdraw(folder: RunFolder, intent: Intent) -> None:
    """Takes back a request that nobody acts on."""
    _path(folder, intent.number).unlink(missing_ok=True)


def _numbers(folder: RunFolder) -> list[int]:
    try:
        names = os.listdir(folder.intents)
    except FileNotFoundError:
        return []
    return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdigit()]


def _path(folder: RunFolder, number: int) -> Path:
    return folder.intents / f"{number:06d}.json"
