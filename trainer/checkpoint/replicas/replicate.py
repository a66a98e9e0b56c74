"""Replicates each rank's state into the memory of its own node and of its peer's, on all nodes or
on none.

A replica is a checkpoint (same files, same manifest) spread over the nodes. All ranks make it
together and delete the previous one only after all have succeeded. So one complete replica exists
at any moment, and it survives the loss of any node, or of several nodes of which no two are peers.

On each rank a thread makes it while training continues, over process groups of its own. State in
the memory of a GPU is first copied to page-locked memory, on a separate stream; state in host
memory is read in place. Training waits only before an update: until the thread has read the state
that the update changes, or, if the next replica is due after that step, until this one is complete.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Work

from orchestrator.plan.worker import MANIFEST
from trainer.checkpoint.background import Snapshot
from trainer.checkpoint.format import (
    Manifest,
    StatePiece,
    coverage_problem,
    decode,
    encode,
    rank_file,
)
from trainer.checkpoint.save import Contents, RankOutcome, Target, gather, manifest_of, write
from trainer.comm.connect import connect_thread
from trainer.comm.control import ControlPath, Group, first_problem, run_all
from trainer.errors import TrainerError
from trainer.worker.reporter import Reporter

from . import transfer
from .peers import assign_peers, nodes_of
from .store import ReplicaStore, replica_name


def open_replica_store(folder: Path, reporter: Reporter) -> ReplicaStore | None:
    """Opens this node's memory for replicas. Returns None, after the event `replica_failed`, if it
    has none."""
    try:
        return ReplicaStore(folder)
    except OSError as error:
        reporter.event(
            "replica_failed", error=f"{error.filename or folder}: {error.strerror or error}"
        )
        return None


class InMemoryReplicas:
    """Makes at most one replica at a time. Every method but `before_update` is collective."""

    def __init__(self, target: Target, store: ReplicaStore | None, reporter: Reporter):
        """`target` is that of the durable checkpoints; it names the writers. If `store` is None on
        any node, no node makes replicas."""
        self.target = target
        self.store = store
        self.reporter = reporter
        self.peer_of = assign_peers(target.plan)
        node = target.plan.ranks[target.rank].node
        # one rank per node writes the files of which a node has one
        self.leader = nodes_of(target.plan)[node][0] == target.rank
        self.possible = target.control.sum_ints([int(store is None)]) == [0]
        self._control: ControlPath | None = None
        self._group: Group | None = None
        if self.possible:
            self._connect()
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="replica")
        self._step = 0  # of the replica that is being made
        self._read: Future[Any] | None = None  # done when the state may change
        #: the problem of the replica that is being made, "" if it is complete
        self._made: Future[str] | None = None

    def _connect(self) -> None:
        """Makes every connection that replicas use. A rank notices that its peer has closed a
        connection, but would wait for a peer that left before the first use."""
        self._control, self._group = connect_thread(
            "replicas", self.target.plan.cluster.gpus_per_node
        )
        self._control.judge(b"", first_problem)
        own_rank = self.target.rank
        operations = list[Callable[[], Work]]()
        messages = {rank: torch.zeros(1) for rank in self.peer_of}
        for rank, peer in self.peer_of.items():
            assert self._group is not None
            if rank == own_rank:
                operations.append(partial(self._group.send, [messages[rank]], peer, 0))
            elif peer == own_rank:
                operations.append(partial(self._group.recv, [messages[rank]], rank, 0))
        run_all(operations)

    def start(
        self,
        pieces: Sequence[StatePiece],
        step: int,
        samples: int,
        scalars: Mapping[str, float] = {},
    ) -> bool:
        """Begins to replicate the state after `step`, which must not change until `before_update`
        has returned. Waits for the previous replica first. Returns False if there are no
        replicas."""
        self.settle()
        if not self.possible:
            return False
        copied_first = [piece for piece in pieces if _is_copied_first(piece)]
        copies = iter(self._snapshot.take(copied_first))
        stable_pieces = [next(copies) if _is_copied_first(piece) else piece for piece in pieces]
        contents = Contents(
            step,
            samples,
            stable_pieces,
            dict(scalars),
            read_back=False,
        )
        copied = self._thread.submit(self._snapshot.wait)
        written = self._thread.submit(self._write, contents)
        self._step = step
        self._read = copied if len(copied_first) == len(pieces) else written
        self._made = self._thread.submit(self._share, contents, written)
        return True

    def before_update(self, step: int) -> None:
        """Waits until the current replica has read the state that the update of `step` changes; if
        the next replica is due after that step, until the current one is complete."""
        if step % self.target.plan.job.checkpoint.memory_every_steps == 0:
            self.settle()
        elif self._read is not None:
            wait([self._read])

    def settle(self) -> bool:
        """Waits for the replica that is being made. Returns False, after the event
        `replica_failed`, if any rank has failed."""
        if self._made is None:
            return True
        failed = self._made.result()
        self._made = None
        if failed and (self.target.rank == 0 or not self.possible):
            self.reporter.event("replica_failed", self._step, error=failed)
        return not failed

    def _folder(self, contents: Contents) -> Path:
        assert self.store is not None
        return self.store.folder / replica_name(contents.step, self.target.token.epoch)

    def _write(self, contents: Contents) -> RankOutcome:
        """Writes this rank's file."""
        assert self.store is not None
        folder = self._folder(contents)
        try:
            if self.store.renew() and self.leader:
                self.reporter.event(
                    "replicas_deleted",
                    contents.step,
                    folder=str(self.store.folder),
                )
            folder.mkdir(mode=0o700, exist_ok=True)
            (folder / rank_file(self.target.rank)).unlink(missing_ok=True)
            return write(folder, self.target.rank, contents)
        except (OSError, RuntimeError, MemoryError) as error:
            return RankOutcome(record=None, error=f"{folder.name}: {_one_line(error)}")

    def _share(self, contents: Contents, written: Future[RankOutcome]) -> str:
        """Turns the ranks' files into a replica. Returns the problem, or "".

        If this rank cannot even report a failure to the others (a connection has failed, there is
        no memory for a message), it closes the process groups of replicas: the other ranks, which
        would wait for it, then fail too, and training continues without replicas.
        """
        try:
            return self._complete(contents, written.result())
        except Exception as error:
            problem = f"{_one_line(error)}; no more replicas before the next start"
        self.possible = False
        self._control = self._group = None
        return problem

    def _complete(self, contents: Contents, own_outcome: RankOutcome) -> str:
        assert self.store is not None and self._control is not None
        folder = self._folder(contents)
        # Listed before the ranks synchronise: afterwards another rank of this node may already have
        # begun the next replica.
        older = [path for path in self.store.replicas() if path != folder]
        problem = self._exchange(folder, contents, own_outcome)
        failed = self._control.judge(problem.encode(), first_problem)
        if failed:
            shutil.rmtree(folder, ignore_errors=True)
        elif self.leader:
            for path in older:
                shutil.rmtree(path, ignore_errors=True)
        return failed

    def _exchange(self, folder: Path, contents: Contents, own_outcome: RankOutcome) -> str:
        """Exchanges files with the peers and writes the manifest. Returns the problems, or ""."""
        manifest, problem = self._manifest(own_outcome, contents)
        if manifest is None:
            return problem
        problems = transfer.run(self._transfers(folder, manifest), self._group)
        if self.leader:
            try:
                (folder / MANIFEST).write_bytes(encode(manifest))
            except OSError as error:
                problems.append(f"{MANIFEST}: {error.strerror}")
        return "; ".join(problems)

    def _manifest(
        self,
        own_outcome: RankOutcome,
        contents: Contents,
    ) -> tuple[Manifest | None, str]:
        """Returns (the manifest of all ranks' files, equal on each rank, "") or (None, problem)."""
        assert self._control is not None
        outcomes = gather(self._control, own_outcome)
        raw = b""
        if self.target.rank == 0:
            failed = [
                f"rank {rank} wrote nothing: {outcome.error}"
                for rank, outcome in enumerate(outcomes)
                if outcome.error
            ]
            if not failed:
                manifest = manifest_of(self.target, contents, outcomes)
                failed = [problem for problem in [coverage_problem(manifest)] if problem]
            raw = b"!" + failed[0].encode() if failed else encode(manifest)
        raw = self._control.broadcast_bytes(raw)
        if raw.startswith(b"!"):
            return None, raw[1:].decode()
        try:
            return decode(raw), ""
        except TrainerError as error:
            return None, str(error)

    def _transfers(
        self,
        folder: Path,
        manifest: Manifest,
    ) -> list[transfer.Sending | transfer.Receiving]:
        sizes = {record.file: record.bytes for record in manifest.files}
        own_rank = self.target.rank
        transfers: list[transfer.Sending | transfer.Receiving] = []
        for rank, peer in sorted(self.peer_of.items()):
            name = rank_file(rank)
            if rank == own_rank:
                transfers.append(transfer.Sending(folder / name, sizes[name], peer))
            elif peer == own_rank:
                transfers.append(transfer.Receiving(folder / name, sizes[name], rank))
        return transfers

    def remove(self) -> None:
        """Frees the memory on every node: the run has ended or its state is on disk."""
        self.settle()
        if self.leader and self.store is not None:
            self.store.remove()


def _is_copied_first(piece: StatePiece) -> bool:
    """Whether a piece is copied before it is written: state on a device, and state without
    gradient, which is small and which a forward may change."""
    return piece.data.is_cuda or piece.kind == "state"


def _one_line(error: BaseException) -> str:
    """Describes an error in one line."""
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
