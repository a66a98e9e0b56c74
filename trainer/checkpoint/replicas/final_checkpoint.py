"""The final checkpoint: what is left of a run writes the newest in-memory replica to disk before
the run ends.

`python -m trainer --final-checkpoint` runs one process per node, on whichever nodes are left: no
rank of the plan, no model, no GPU. The newest replica of which every file is left on some node
becomes a checkpoint like any other, under this epoch: same files, same hashes, same fence, same
commit.
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
from trainer.checkpoint.files import sha256_from_disk, write_parts
from trainer.checkpoint.format import FileRecord
from trainer.checkpoint.load import newest_committed
from trainer.checkpoint.pins import remember
from trainer.checkpoint.save import RankOutcome, Target, begin, claim, gather, on_rank_zero, publish
from trainer.comm.connect import connect
from trainer.errors import SaveError
from trainer.worker.reporter import Reporter, Scalar

from .peer_restore import Replica, ReplicaInventory
from .replicate import open_replica_store
from .store import ReplicaStore

_CHUNK = 16 << 20


def run_final_checkpoint(plan: Plan, env: WorkerEnv, reporter: Reporter) -> None:
    """Save the newest state that these nodes' memories hold together, if no checkpoint has it.

    `env` counts nodes: rank and world size are those of the saving processes, one per node. Raises
    SaveError, Fenced, and torch's network errors when another node is lost.
    """
    control = connect(env, torch.device("cpu"))
    folder = checkpoint_dir(plan.job.checkpoint.dir, env.run_dir)
    target = Target(folder, Fence.of(env), plan, env.rank, control=control)
    store = open_replica_store(replica_dir(env.run_dir, env.node), reporter)
    step = save_newest_replica(
        target, env.world_size, store, plan.job.checkpoint.keep_last, reporter
    )
    if step is not None and env.rank == 0:
        with contextlib.suppress(OSError):  # the next start notes what it finds
            remember(pin_file(env.run_dir, PINS["fresh-start"]), folder, step)
    control.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


def save_newest_replica(
    target: Target, world: int, store: ReplicaStore | None, keep_last: int, reporter: Reporter
) -> int | None:
    """Save the newest complete replica if it is newer than all checkpoints; its step, None if there
    was no need.

    Collective over `world` processes, one per node; `target.rank` is this one's number. Frees the
    nodes' memory once its content is on disk. Raises SaveError on every rank if a replica is newer
    than the disk but cannot be saved (some files were only on lost nodes, the disk is full),
    Fenced.
    """
    start = time.perf_counter()
    claim(target)
    nodes = {str(one): [one] for one in range(world)}
    inventory = ReplicaInventory(nodes, target.rank, target.token.run_id, store, target.control)
    replica, incomplete = inventory.survey()
    on_disk = newest_committed(target.folder, target.rank, target.control)
    if replica is None or replica.version <= on_disk:
        if incomplete is not None and incomplete.version > on_disk:
            raise SaveError(incomplete.text)
        if store is not None and not any(store.replicas()):  # a spare node's, created by opening it
            store.remove()
        return None
    manifest = structs.replace(
        inventory.manifest(replica), epoch=target.token.epoch, created=time.time()
    )
    begin(target, replica.step)
    source = store.folder / replica.name if store is not None else Path()
    mine = [
        record
        for at, record in enumerate(manifest.files)
        if _carrier(replica, record, at) == target.rank
    ]
    problem = _write(source, target.staging(replica.step), mine)
    outcomes = gather(target.control, RankOutcome(record=None, error=problem))

    def commit() -> int:
        failed = next((outcome.error for outcome in outcomes if outcome.error), "")
        return publish(target, manifest, failed, keep_last, read_back=True)

    size = on_rank_zero(target, commit)
    if store is not None:
        store.remove()
    if target.rank == 0:
        seconds = time.perf_counter() - start
        about: dict[str, Scalar] = {
            "bytes": size,
            "seconds": seconds,
            "stall_s": seconds,
            "verified": True,
            "source": "memory",
        }
        reporter.event("checkpoint_saved", replica.step, **about, folder=str(target.folder))
    return replica.step


def _carrier(replica: Replica, record: FileRecord, at: int) -> int:
    """The process that writes a file: its holders take turns, so that nodes share the work."""
    holders = replica.holders[record.file]
    return holders[at % len(holders)]


def _write(source: Path, staging: Path, records: list[FileRecord]) -> str:
    """Copy files from memory to the staging folder; the first problem, "" if none."""
    for record in records:
        try:
            _carry(source / record.file, staging / record.file, record)
        except SaveError as error:
            return str(error)
        except OSError as error:
            return f"{record.file}: {error.strerror or error}"
    return ""


def _carry(source: Path, to: Path, record: FileRecord) -> None:
    """Copy one file from memory to disk: durable and read back on return. Raises OSError,
    SaveError."""
    with source.open("rb") as file:
        _, digest = write_parts(to, iter(partial(file.read, _CHUNK), b""))
    if digest != record.sha256:
        raise SaveError(f"{record.file}: changed in memory while it was read")
    if sha256_from_disk(to) != record.sha256:
        raise SaveError(f"{record.file}: does not read back as it was written")
