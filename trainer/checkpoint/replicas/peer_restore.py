"""Peer restore: finds the newest replica of which some node still holds every file, and sends each
node the files that it needs."""

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

#: (epoch, step, hash of the manifest) of a replica
_Key = tuple[int, int, str]


class _NodeReplica(Struct, frozen=True):
    """The files of one replica that one rank has verified on its node."""

    name: str  # of the replica's folder
    hash: str  # of its manifest
    epoch: int
    step: int
    files: int  # of the whole replica, on all nodes together
    intact: list[str]


@dataclass(frozen=True)
class Replica:
    """A complete replica: every file is intact on some node."""

    name: str
    epoch: int
    step: int
    holders: dict[str, list[int]]  # file -> ranks whose node has it, one per node, ascending
    source: int  # a rank whose node has the manifest

    @property
    def version(self) -> tuple[int, int]:
        """(epoch, step), as in `VerifiedCheckpoint.version`."""
        return self.epoch, self.step


class IncompleteReplica(NamedTuple):
    """A replica that has lost files."""

    version: tuple[int, int]
    problem: str


class Survey(NamedTuple):
    """The replicas that all nodes hold together."""

    complete: Replica | None  # the newest complete replica, by (epoch, step)
    incomplete: IncompleteReplica | None  # the newest of all, if it is not complete


class ReplicaInventory:
    """Lists the replicas that nodes hold. `nodes` maps a node to its ranks, ascending. Every method
    is collective."""

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
        """Returns the complete replica with the newest (epoch, step), or None."""
        return self.survey().complete

    def survey(self) -> Survey:
        """Returns the newest complete replica, and the newest of all if that one has lost files."""
        gathered = self.control.all_gather_bytes(msgspec.json.encode(self._held()))
        leaders_of: dict[_Key, dict[str, set[int]]] = {}  # of each file of a replica
        descriptions: dict[_Key, tuple[_NodeReplica, int]] = {}
        for rank, raw in enumerate(gathered):
            for held in msgspec.json.decode(raw, type=list[_NodeReplica]):
                key = held.epoch, held.step, held.hash
                descriptions.setdefault(key, (held, rank))
                for file in held.intact:
                    leaders = leaders_of.setdefault(key, {}).setdefault(file, set())
                    leaders.add(self.leader_of[rank])

        def missing_files(key: _Key) -> int:
            return descriptions[key][0].files - len(leaders_of.get(key, {}))

        complete = max((key for key in descriptions if not missing_files(key)), default=None)
        newest = max(descriptions, default=None)
        incomplete = None
        if newest is not None and newest != complete:
            described, _ = descriptions[newest]
            problem = (
                f"replica of step {described.step}: {missing_files(newest)} of"
                f" {described.files} files were lost with their nodes"
            )
            incomplete = IncompleteReplica(newest[:2], problem)
        if complete is None:
            return Survey(None, incomplete)
        described, source = descriptions[complete]
        replica = Replica(
            name=described.name,
            epoch=described.epoch,
            step=described.step,
            holders={file: sorted(leaders) for file, leaders in leaders_of[complete].items()},
            source=self.leader_of[source],
        )
        return Survey(replica, incomplete)

    def _held(self) -> list[_NodeReplica]:
        """Verifies this rank's share of the replicas on its node: the ranks of a node divide the
        hashing of its files."""
        node_ranks = self.nodes[self.node_of[self.rank]]
        held = []
        for path in sorted(self.store.replicas()) if self.store is not None else []:
            try:
                manifest = decode((path / MANIFEST).read_bytes())
            except (OSError, CheckpointError):
                continue  # not finished, or damaged: other nodes may have it
            if manifest.run_id == self.run_id:
                own_files = manifest.files[node_ranks.index(self.rank) :: len(node_ranks)]
                intact = [
                    record.file
                    for record in own_files
                    if (path / record.file).exists() and check_file(path, record) is None
                ]
                held.append(
                    _NodeReplica(
                        name=path.name,
                        hash=manifest.hash,
                        epoch=manifest.epoch,
                        step=manifest.step,
                        files=len(manifest.files),
                        intact=intact,
                    )
                )
        return held

    def manifest(self, replica: Replica) -> Manifest:
        """Returns the replica's manifest on every rank. Raises CheckpointError."""
        raw = b""
        if self.store is not None and self.rank == replica.source:
            with contextlib.suppress(OSError):  # deleted meanwhile: then no rank can decode it
                raw = (self.store.folder / replica.name / MANIFEST).read_bytes()
        return decode(self.control.broadcast_bytes(raw, src=replica.source))


class PeerRestore(ReplicaInventory):
    """Restores the ranks of a plan from the replicas that its nodes still hold. Every method is
    collective."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        run_id: str,
        store: ReplicaStore | None,
        control: ControlPath = WORLD,
    ):
        super().__init__(
            nodes_of(plan),
            rank,
            run_id,
            store,
            control,
        )
        self.plan = plan

    def fetch(self, replica: Replica, pieces: Iterable[StatePiece]) -> VerifiedCheckpoint:
        """Returns the replica on this node, completed by all files that hold this rank's pieces
        and, on an unchanged layout, its random state. Raises CheckpointError on every rank if any
        rank cannot get its files."""
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
        own_file = rank_file(self.rank)
        if manifest.layout == layout_of(self.plan) and own_file in replica.holders:
            needed.add(own_file)
        missing = self._missing_files(replica, needed)
        problems += self._send_missing(replica, folder, manifest, missing)
        if self.rank in missing:
            records = (record for record in manifest.files if record.file in missing[self.rank])
            problems += [problem for record in records if (problem := check_file(folder, record))]
        self._agree(replica, problems)
        return VerifiedCheckpoint(folder, manifest)

    def _missing_files(self, replica: Replica, needed: set[str]) -> dict[int, set[str]]:
        """Returns, by leader of a node, the files that its ranks need and the node does not
        hold."""
        gathered = self.control.all_gather_bytes(msgspec.json.encode(sorted(needed)))
        missing: dict[int, set[str]] = {}
        for rank, raw in enumerate(gathered):
            leader = self.leader_of[rank]
            files = msgspec.json.decode(raw, type=list[str])
            lacking = {file for file in files if leader not in replica.holders[file]}
            missing.setdefault(leader, set()).update(lacking)
        return missing

    def _send_missing(
        self,
        replica: Replica,
        folder: Path,
        manifest: Manifest,
        missing: Mapping[int, set[str]],
    ) -> list[str]:
        """Sends each missing file from one of its holders to the node's leader; returns the
        problems."""
        problems = list[str]()
        sizes = {record.file: record.bytes for record in manifest.files}
        for leader in sorted(missing):
            for file in sorted(missing[leader]):
                holders = replica.holders[file]
                source = holders[(leader + len(file)) % len(holders)]
                path = folder / file
                if self.rank == source:
                    problems += transfer.run([transfer.Sending(path, sizes[file], leader)])
                elif self.rank == leader:
                    problems += transfer.run([transfer.Receiving(path, sizes[file], source)])
        return problems

    def _agree(self, replica: Replica, problems: list[str]) -> None:
        if failed := self.control.judge("; ".join(problems).encode(), first_problem):
            raise CheckpointError(f"replica of step {replica.step} in memory: {failed}")

    def _replica_folder(self, replica: Replica) -> Path:
        if self.store is None:
            raise CheckpointError("this node has no memory for replicas")
        folder = self.store.folder / replica.name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
