"""Replicates each rank's state into the memory of its own node and of its peer's, on all nodes or on none.

A replica is a checkpoint (same files, same manifest) spread over the nodes. All ranks make it together between two
steps and delete the previous one only after all have succeeded. So one complete replica exists at any moment, and it
survives the loss of any node, or of several nodes of which no two are peers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.plan.worker import MANIFEST
from trainer.checkpoint.format import Manifest, StatePiece, coverage_problem, decode, encode, rank_file
from trainer.checkpoint.save import Contents, RankOutcome, Target, gather, manifest_of, write
from trainer.comm.control import first_problem
from trainer.errors import TrainerError
from trainer.worker.reporter import Reporter

from . import transfer
from .peers import assign_peers, nodes_of
from .store import ReplicaStore, replica_name


def open_replica_store(folder: Path, reporter: Reporter) -> ReplicaStore | None:
    """This node's memory for replicas; None, with the event `replica_failed`, if it has none."""
    try:
        return ReplicaStore(folder)
    except OSError as error:
        reporter.event("replica_failed", error=f"{error.filename or folder}: {error.strerror or error}")
        return None


class InMemoryReplicas:
    """Every method is collective."""

    def __init__(self, target: Target, store: ReplicaStore | None, reporter: Reporter):
        """`target`: that of the durable checkpoints, which says who writes. If `store` is None on any node, there are
        no replicas on any."""
        self.target, self.store, self.reporter = target, store, reporter
        self.peer_of = assign_peers(target.plan)
        node = target.plan.ranks[target.rank].node
        self.leader = nodes_of(target.plan)[node][0] == target.rank  # one rank per node writes what a node has once
        self.possible = target.control.sum_ints([int(store is None)]) == [0]

    def replicate(
        self, pieces: Sequence[StatePiece], step: int, samples: int, scalars: Mapping[str, float] = {}
    ) -> bool:
        """Replicate the state after `step`. False, with the event `replica_failed`, if any rank could not."""
        if not self.possible or self.store is None:
            return False
        contents = Contents(step, samples, pieces, dict(scalars), read_back=False)
        folder = self.store.folder / replica_name(step, self.target.token.epoch)
        try:
            if self.store.renew() and self.leader:
                self.reporter.event("replicas_deleted", step, folder=str(self.store.folder))
        except OSError:
            pass  # then `_make` fails, and says why
        # listed before the ranks synchronise: after that, another rank of this node may have begun the next replica
        older = [path for path in self.store.replicas() if path != folder]
        problem = self._make(folder, contents)
        failed = self.target.control.judge(problem.encode(), first_problem)
        if failed:
            shutil.rmtree(folder, ignore_errors=True)
        elif self.leader:
            for path in older:
                shutil.rmtree(path, ignore_errors=True)
        if failed and self.target.rank == 0:
            self.reporter.event("replica_failed", step, error=failed)
        return not failed

    def _make(self, folder: Path, contents: Contents) -> str:
        """Write this rank's files; the problems, "" if none."""
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / rank_file(self.target.rank)).unlink(missing_ok=True)
            mine = write(folder, self.target.rank, contents)
        except OSError as error:
            mine = RankOutcome(record=None, error=f"{folder.name}: {error.strerror or error}")
        manifest, problem = self._manifest(mine, contents)
        if manifest is None:
            return problem
        problems = transfer.run(self._transfers(folder, manifest))
        if self.leader:
            try:
                (folder / MANIFEST).write_bytes(encode(manifest))
            except OSError as error:
                problems.append(f"{MANIFEST}: {error.strerror}")
        return "; ".join(problems)

    def _manifest(self, mine: RankOutcome, contents: Contents) -> tuple[Manifest | None, str]:
        """(manifest of all ranks' files, equal on each, "") or (None, why there is none)."""
        outcomes, raw = gather(self.target, mine), b""
        if self.target.rank == 0:
            failed = [f"rank {rank} wrote nothing: {one.error}" for rank, one in enumerate(outcomes) if one.error]
            if not failed:
                manifest = manifest_of(self.target, contents, outcomes)
                failed = [problem for problem in [coverage_problem(manifest)] if problem]
            raw = b"!" + failed[0].encode() if failed else encode(manifest)
        raw = self.target.control.broadcast_bytes(raw)
        if raw.startswith(b"!"):
            return None, raw[1:].decode()
        try:
            return decode(raw), ""
        except TrainerError as error:
            return None, str(error)

    def _transfers(self, folder: Path, manifest: Manifest) -> list[transfer.Sending | transfer.Receiving]:
        sizes, mine = {record.file: record.bytes for record in manifest.files}, self.target.rank
        todo: list[transfer.Sending | transfer.Receiving] = []
        for rank, peer in sorted(self.peer_of.items()):
            name = rank_file(rank)
            if rank == mine:
                todo.append(transfer.Sending(folder / name, sizes[name], peer))
            elif peer == mine:
                todo.append(transfer.Receiving(folder / name, sizes[name], rank))
        return todo

    def remove(self) -> None:
        """Free the memory on every node: the run has ended or its state is on disk."""
        if self.leader and self.store is not None:
            self.store.remove()
