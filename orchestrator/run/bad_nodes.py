"""Bad nodes of a user: `<home>/nodes.json`. Later runs leave out, for a while, the nodes that a run
has excluded.

Nodes are known by cluster and name. Each entry expires by itself (`backend.remember_bad_nodes_h`)
and can be forgotten by hand (`orch nodes --forget`). A file that cannot be read or written is no
reason for a run to fail.
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
_LOCK_S = 10.0  # for others to write


class BadNode(Frozen):
    """Times are Unix seconds of the host that wrote them; whole hours matter here, no skew of
    clocks."""

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
    def __init__(self, home: Path):
        self.file = home / "nodes.json"

    @classmethod
    def of(cls, folder: RunFolder) -> NodeMemory:
        """That of the user who has submitted a run. Raises OSError, OrchError where its request
        cannot be read."""
        return cls(Path(read_request(folder).discovery_dir).parent)

    def read(self, now: float, cluster: str | None = None) -> list[BadNode]:
        """Those that have not expired, oldest first; of one cluster, or of all."""
        return [one for one in self._all() if one.until > now and cluster in (None, one.cluster)]

    def add(self, bad: BadNode) -> None:
        """Adds an entry; it replaces an earlier one of the same node. Raises OSError, OrchError."""
        mine = (bad.cluster, bad.node)
        self._change(
            bad.at, lambda kept: [*(one for one in kept if (one.cluster, one.node) != mine), bad]
        )

    def forget(self, now: float, chosen: Callable[[BadNode], bool]) -> list[BadNode]:
        """Let go of the chosen ones; they are returned. Raises OSError, OrchError."""
        gone = [one for one in self.read(now) if chosen(one)]
        self._change(now, lambda kept: [one for one in kept if not chosen(one)])
        return gone

    def _all(self) -> list[BadNode]:
        try:
            found = msgspec.json.decode(self.file.read_bytes(), type=_File)
        except (OSError, *UNREADABLE):
            return []
        return found.nodes if found.schema == SCHEMA else []

    def _change(self, now: float, change: Callable[[list[BadNode]], list[BadNode]]) -> None:
        with self._locked():
            nodes = sorted(change(self.read(now)), key=lambda one: one.at)
            raw = msgspec.json.encode(_File(schema=SCHEMA, nodes=nodes))
            write_private(self.file, msgspec.json.format(raw, indent=1) + b"\n")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Runs end at the same time; the kernel lets go of the lock of one that dies. OSError where
        one that was stopped keeps it: nobody waits for that."""
        make_private_folder(self.file.parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(self.file.with_name(".nodes.lock"), flags, 0o600), "w") as file:
            end = time.monotonic() + _LOCK_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise
                time.sleep(0.02)
            yield


def remember(folder: RunFolder, node: str, why: str, hours: float, now: float) -> bool:
    """Write down what a run has found of a node; False where that was not possible, or is not
    wanted (0 hours)."""
    if not hours:
        return False
    with contextlib.suppress(OSError, OrchError):
        cluster = read_request(folder).cluster
        bad = BadNode(
            cluster=cluster, node=node, why=why, run=folder.run_id, at=now, until=now + 3600 * hours
        )
        NodeMemory.of(folder).add(bad)
        return True
    return False


def remembered(folder: RunFolder, now: float) -> dict[str, str]:
    """Bad nodes of the run's cluster that have not expired: node -> why."""
    with contextlib.suppress(OSError, OrchError):
        cluster = read_request(folder).cluster
        return {
            one.node: f"{one.why} (run {one.run})"
            for one in NodeMemory.of(folder).read(now, cluster)
        }
    return {}
