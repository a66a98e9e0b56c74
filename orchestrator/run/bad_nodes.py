"""The bad nodes of a user, in `<home>/nodes.json`: later runs leave out for a while the nodes that
a run has excluded.

Nodes are identified by cluster and name. Each entry expires by itself
(`backend.remember_bad_nodes_h`) and can be removed by hand (`orch nodes --forget`). A file that
cannot be read or written never makes a run fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from orchestrator.errors import OrchError
from orchestrator.plan.codec import UNREADABLE
from orchestrator.plan.document import Frozen

from .folder import RunFolder, make_private_folder, write_private
from .request import read_request

SCHEMA = "orch.nodes/1"
_LOCK_S = 10.0  # time that other processes get to write the file


class BadNode(Frozen):
    """A node that a run has excluded. Times are Unix seconds of the host that wrote them;
    entries last for hours, so clock skew does not matter."""

    cluster: str
    node: str
    why: str  # one line
    run: str
    at: float
    until: float


class _File(Frozen):
    schema: str
    nodes: list[BadNode]


class NodeMemory:
    """Reads and changes the list of bad nodes of one user."""

    def __init__(self, home: Path):
        self.file = home / "nodes.json"

    @classmethod
    def of(cls, folder: RunFolder) -> NodeMemory:
        """Returns the list of the user who submitted a run. Raises OSError or OrchError if the
        run's request cannot be read."""
        return cls(Path(read_request(folder).discovery_dir).parent)

    def read(self, now: float, cluster: str | None = None) -> list[BadNode]:
        """Returns the entries that have not expired, oldest first; of one cluster, or of all."""
        return [
            entry for entry in self._all() if entry.until > now and cluster in (None, entry.cluster)
        ]

    def add(self, bad: BadNode) -> None:
        """Adds an entry, which replaces an earlier one of the same node. Raises OSError,
        OrchError."""
        replaced = (bad.cluster, bad.node)

        def add_or_replace(entries: list[BadNode]) -> list[BadNode]:
            unchanged = [entry for entry in entries if (entry.cluster, entry.node) != replaced]
            return [*unchanged, bad]

        self._change(bad.at, add_or_replace)

    def forget(self, now: float, chosen: Callable[[BadNode], bool]) -> list[BadNode]:
        """Removes the chosen entries and returns them. Raises OSError, OrchError."""
        forgotten = [entry for entry in self.read(now) if chosen(entry)]
        self._change(now, lambda entries: [entry for entry in entries if not chosen(entry)])
        return forgotten

    def _all(self) -> list[BadNode]:
        try:
            stored = msgspec.json.decode(self.file.read_bytes(), type=_File)
        except (OSError, *UNREADABLE):
            return []
        return stored.nodes if stored.schema == SCHEMA else []

    def _change(self, now: float, change: Callable[[list[BadNode]], list[BadNode]]) -> None:
        with self._locked():
            nodes = sorted(change(self.read(now)), key=lambda entry: entry.at)
            raw = msgspec.json.encode(_File(schema=SCHEMA, nodes=nodes))
            write_private(self.file, msgspec.json.format(raw, indent=1) + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the file, because runs end at the same time. The kernel releases the
        lock of a process that dies. Raises OSError if a stopped process keeps it: nobody waits
        for that."""
        make_private_folder(self.file.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(self.file.with_name(".nodes.lock"), flags, 0o600), "w") as file:
            deadline = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(0.02)
            yield


def remember(
    folder: RunFolder,
    node: str,
    reason: str,
    hours: float,
    now: float,
) -> bool:
    """Records that a run has found a node bad. Returns False if that was not possible, or is not
    wanted (0 hours)."""
    if not hours:
        return False
    with contextlib.suppress(OSError, OrchError):
        cluster = read_request(folder).cluster
        bad = BadNode(
            cluster=cluster,
            node=node,
            why=reason,
            run=folder.run_id,
            at=now,
            until=now + 3600 * hours,
        )
        NodeMemory.of(folder).add(bad)
        return True
    return False


def remembered(folder: RunFolder, now: float) -> dict[str, str]:
    """Returns the bad nodes of the run's cluster that have not expired, with the reason for
    each."""
    with contextlib.suppress(OSError, OrchError):
        cluster = read_request(folder).cluster
        return {
            entry.node: f"{entry.why} (run {entry.run})"
            for entry in NodeMemory.of(folder).read(now, cluster)
        }
    return {}
