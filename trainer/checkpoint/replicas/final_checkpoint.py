"""The final checkpoint: the remaining nodes of a run write the newest in-memory replica to disk
before the run ends.

`python -m trainer --final-checkpoint` runs one process per remaining node, without a rank of the
plan, a model or a GPU. The newest replica of which some node still holds every file becomes a
checkpoint like any other, under this epoch: same files, same hashes, same fence, same commit.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs

from orchestrator.plan import Plan
from orchestrator.plan.worker import PINS, WorkerEnv, checkpoint_dir, pin_file, replica_dir
from trainer.checkpoint.fence import Fence
from trainer.checkpoint.files import sha256_from_disk, write_chunks
from trainer.checkpoint.format import FileRecord, Manifest
from trainer.checkpoint.load import newest_committed
from trainer.checkpoint.pins import remember
from trainer.checkpoint.save import (
    RankOutcome,
    Target,
    acquire,
    begin,
    gather,
    on_rank_zero,
    publish,
)
from trainer.comm.connect import connect
from trainer.errors import SaveError
from trainer.worker.reporter import Reporter

from .peer_restore import Replica, ReplicaInventory
from .replicate import open_replica_store
from .store import ReplicaStore

_CHUNK = 16 << 20


def run_final_checkpoint(plan: Plan, env: WorkerEnv, reporter: Reporter) -> None:
    """Saves the newest state that these nodes hold together in memory, if no checkpoint has it.

    In `env`, rank and world size count the saving processes, one per node. Raises SaveError,
    Fenced, and torch's network errors when another node is lost.
    """
    control = connect(env, torch.device("cpu"))
    folder = checkpoint_dir(plan.job.checkpoint.dir, env.run_dir)
    target = Target(
        folder,
        Fence.of(env),
        plan,
        env.rank,
        control=control,
    )
    store = open_replica_store(replica_dir(env.run_dir, env.node), reporter)
    step = save_newest_replica(
        target,
        env.world_size,
        store,
        plan.job.checkpoint.keep_last,
        reporter,
    )
    if step is not None and env.rank == 0:
        with contextlib.suppress(OSError):  # the next start records the checkpoint
            remember(pin_file(env.run_dir, PINS["fresh-start"]), folder, step)
    control.barrier()  # no process leaves while another still reads from it
    dist.destroy_process_group()


def save_newest_replica(
    target: Target,
    world: int,
    store: ReplicaStore | None,
    keep_last: int,
    reporter: Reporter,
) -> int | None:
    """Saves the newest complete replica if it is newer than all checkpoints. Returns its step, or
    None if there was no need.

    Collective over `world` processes, one per node; `target.rank` is the number of this process.
    Frees the nodes' memory once its content is on disk. Raises Fenced, or SaveError on every rank
    if a replica is newer than the disk but cannot be saved (some files were only on lost nodes, the
    disk is full).
    """
    start = time.perf_counter()
    acquire(target)
    nodes = {str(node): [node] for node in range(world)}
    inventory = ReplicaInventory(
        nodes,
        target.rank,
        target.token.run_id,
        store,
        target.control,
    )
    replica, incomplete = inventory.survey()
    on_disk = newest_committed(target.folder, target.rank, target.control)
    if replica is None or replica.version <= on_disk:
        if incomplete is not None and incomplete.version > on_disk:
            raise SaveError(incomplete.problem)
        # Opening the store of a spare node has created an empty one.
        if store is not None and not any(store.replicas()):
            store.remove()
        return None
    manifest = structs.replace(
        inventory.manifest(replica),
        epoch=target.token.epoch,
        created=time.time(),
    )
    size = _commit_replica(target, store, replica, manifest, keep_last)
    if store is not None:
        store.remove()
    if target.rank == 0:
        _report_saved(
            reporter,
            target,
            replica.step,
            size,
            time.perf_counter() - start,
        )
    return replica.step


def _commit_replica(
    target: Target,
    store: ReplicaStore | None,
    replica: Replica,
    manifest: Manifest,
    keep_last: int,
) -> int:
    """Copies the replica's files to disk and commits them; returns their bytes. Collective."""
    begin(target, replica.step)
    source = store.folder / replica.name if store is not None else Path()
    own_files = [
        record
        for number, record in enumerate(manifest.files)
        if _carrier(replica, record, number) == target.rank
    ]
    problem = _write(source, target.staging(replica.step), own_files)
    outcomes = gather(target.control, RankOutcome(record=None, error=problem))

    def commit() -> int:
        failed = next((outcome.error for outcome in outcomes if outcome.error), "")
        return publish(
            target,
            manifest,
            failed,
            keep_last=keep_last,
            read_back=True,
        )

    return on_rank_zero(target, commit)


def _report_saved(
    reporter: Reporter,
    target: Target,
    step: int,
    size: int,
    seconds: float,
) -> None:
    reporter.event(
        "checkpoint_saved",
        step,
        bytes=size,
        seconds=seconds,
        stall_s=seconds,
        verified=True,
        source="memory",
        folder=str(target.folder),
    )


def _carrier(replica: Replica, record: FileRecord, number: int) -> int:
    """Returns the process that writes a file: its holders take turns, so that nodes share the
    work."""
    holders = replica.holders[record.file]
    return holders[number % len(holders)]


def _write(source: Path, staging: Path, records: list[FileRecord]) -> str:
    """Copies files from memory to the staging folder. Returns the first problem, or ""."""
    for record in records:
        try:
            _carry(source / record.file, staging / record.file, record)
        except SaveError as error:
            return str(error)
        except OSError as error:
            return f"{record.file}: {error.strerror or error}"
    return ""


def _carry(source: Path, to: Path, record: FileRecord) -> None:
    """Copies one file from memory to disk: durable and read back on return. Raises OSError,
    SaveError."""
    with source.open("rb") as file:
        _, digest = write_chunks(to, iter(partial(file.read, _CHUNK), b""))
    if digest != record.sha256:
        raise SaveError(f"{record.file}: changed in memory while it was read")
    if sha256_from_disk(to) != record.sha256:
        raise SaveError(f"{record.file}: does not read back as it was written")
