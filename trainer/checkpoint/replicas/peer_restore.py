"""Peer restore: finds the newest replica of which every file is left on some node, and sends nodes
what they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from orchestrator.plan import Plan
from orchestrator.plan.worker import MANIFEST
from trainer.checkpoint.format import Manifest, StatePiece, decode, rank_file
from trainer.checkpoint.load import VerifiedCheckpoint, check_file
from trainer.checkpoint.restore import StoredState
from trainer.checkpoint.save import layout_of
from trainer.comm.control import WORLD, ControlPath, first_problem
from trainer.errors import CheckpointError

from . import transfer
from .peers import nodes_of
from .store import ReplicaStore


class _NodeReplica(Struct, frozen=True):
    """The files of one replica that one rank has verified on its node."""

    name: str  # of the replica's folder
    hash: str  # of its manifest
    epoch: int
    step: int
    files: int  # of the whole replica, on all nodes together
    good: list[str]


@dataclass(frozen=True)
class Replica:
    """A complete replica: every file is intact on some node."""

    name: str
    epoch: int
    step: int
    holders: dict[str, list[int]]  # file -> ranks whose node has it, one a node, ascending
    source: int  # a rank whose node has the manifest

    @property
    def version(self) -> tuple[int, int]:
        """As `VerifiedCheckpoint.version`."""
        return self.epoch, self.step


class IncompleteReplica(NamedTuple):
    """A replica that has lost files."""

    version: tuple[int, int]
    text: str


class Survey(NamedTuple):
    """The replicas that all nodes hold together."""

    whole: Replica | None  # the newest complete replica, by (epoch, step)
    incomplete: IncompleteReplica | None  # the newest of all, if it is not complete


class ReplicaInventory:
    """The replicas that nodes hold. `nodes`: the ranks on each, ascending. Every method is
    collective."""

    def __init__(
        self,
        nodes: Mapping[str, Sequence[int]],
        rank: int,
        run_id: str,
        store: ReplicaStore | None,
        control: ControlPath = WORLD,
    ):
        self.nodes = nodes
        self.rank = rank
        self.run_id = run_id
        self.store = store
        self.control = control
        self.node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
        self.leader_of = {rank: nodes[node][0] for rank, node in self.node_of.items()}

    def newest(self) -> Replica | None:
        """The complete replica with the newest (epoch, step); None if there is none."""
        return self.survey().whole

    def survey(self) -> Survey:
        """The newest complete replica, and the newest of all if that one has lost files."""
        raw = self.control.all_gather_bytes(msgspec.json.encode(self._held()))
        found: dict[tuple[int, int, str], dict[str, set[int]]] = {}
        about: dict[tuple[int, int, str], tuple[_NodeReplica, int]] = {}
        for rank, held in enumerate(
            msgspec.json.decode(one, type=list[_NodeReplica]) for one in raw
        ):
            for one in held:
                key = one.epoch, one.step, one.hash
                about.setdefault(key, (one, rank))
                for file in one.good:
                    found.setdefault(key, {}).setdefault(file, set()).add(self.leader_of[rank])
        whole = max(
            (key for key, (one, _) in about.items() if len(found.get(key, {})) == one.files),
            default=None,
        )
        incomplete = None
        if about and (newest := max(about)) != whole:
            one, _ = about[newest]
            missing = one.files - len(found.get(newest, {}))
            text = (
                f"replica of step {one.step}: {missing} of {one.files} files were lost with their"
                " nodes"
            )
            incomplete = IncompleteReplica(newest[:2], text)
        if whole is None:
            return Survey(None, incomplete)
        one, source = about[whole]
        holders = {file: sorted(leaders) for file, leaders in found[whole].items()}
        return Survey(
            Replica(one.name, one.epoch, one.step, holders, self.leader_of[source]), incomplete
        )

    def _held(self) -> list[_NodeReplica]:
        """This rank's share of the replicas on its node: the ranks of a node divide the hashing of
        its files."""
        mates = self.nodes[self.node_of[self.rank]]
        held = []
        for path in sorted(self.store.replicas()) if self.store is not None else []:
            try:
                manifest = decode((path / MANIFEST).read_bytes())
            except (OSError, CheckpointError):
                continue  # not finished, or damaged: other nodes may have it
            if manifest.run_id == self.run_id:
                mine = manifest.files[mates.index(self.rank) :: len(mates)]
                good = [
                    one.file
                    for one in mine
                    if (path / one.file).exists() and check_file(path, one) is None
                ]
                held.append(
                    _NodeReplica(
                        path.name,
                        manifest.hash,
                        manifest.epoch,
                        manifest.step,
                        len(manifest.files),
                        good,
                    )
                )
        return held

    def manifest(self, replica: Replica) -> Manifest:
        raw = b""
        if self.store is not None and self.rank == replica.source:
            with contextlib.suppress(OSError):  # deleted since: no rank can then decode it
                raw = (self.store.folder / replica.name / MANIFEST).read_bytes()
        return decode(self.control.broadcast_bytes(raw, src=replica.source))


class PeerRestore(ReplicaInventory):
    """Restores the ranks of a plan from replicas that its nodes still hold. Every method is
    collective."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        run_id: str,
        store: ReplicaStore | None,
        control: ControlPath = WORLD,
    ):
        super().__init__(nodes_of(plan), rank, run_id, store, control)
        self.plan = plan

    def fetch(self, replica: Replica, pieces: Iterable[StatePiece]) -> VerifiedCheckpoint:
        """The replica on this node, completed by all files that hold this rank's pieces, and on an
        unchanged layout its random state. Raises CheckpointError on every rank if any rank cannot
        get its files."""
        manifest = self.manifest(replica)
        folder = Path()
        problems = list[str]()
        needed: set[str] = set()
        try:
            folder = self._replica_folder(replica)
            needed = StoredState(VerifiedCheckpoint(folder, manifest)).files(pieces)
        except (CheckpointError, OSError) as error:
            problems = [str(error)]
        self._agree(replica, problems)
        own = rank_file(self.rank)
        if manifest.layout == layout_of(self.plan) and own in replica.holders:
            needed.add(own)
        raw = self.control.all_gather_bytes(msgspec.json.encode(sorted(needed)))
        wants = [msgspec.json.decode(one, type=list[str]) for one in raw]
        missing: dict[int, set[str]] = {}
        for rank, files in enumerate(wants):
            leader = self.leader_of[rank]
            missing.setdefault(leader, set()).update(
                f for f in files if leader not in replica.holders[f]
            )
        sizes = {record.file: record.bytes for record in manifest.files}
        for leader in sorted(missing):
            for file in sorted(missing[leader]):
                source = replica.holders[file][(leader + len(file)) % len(replica.holders[file])]
                if self.rank == source:
                    problems += transfer.run([transfer.Sending(folder / file, sizes[file], leader)])
                elif self.rank == leader:
                    problems += transfer.run(
                        [transfer.Receiving(folder / file, sizes[file], source)]
                    )
        if self.rank in missing:
            records = (record for record in manifest.files if record.file in missing[self.rank])
            problems += [problem for record in records if (problem := check_file(folder, record))]
        self._agree(replica, problems)
        return VerifiedCheckpoint(folder, manifest)

    def _agree(self, replica: Replica, problems: list[str]) -> None:
        if failed := self.control.judge("; ".join(problems).encode(), first_problem):
            raise CheckpointError(f"replica of step {replica.step} in memory: {failed}")

    def _replica_folder(self, replica: Replica) -> Path:
        if self.store is None:
            raise CheckpointError("this node has no memory for replicas")
        folder = self.store.folder / replica.name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
