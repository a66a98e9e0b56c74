"""The final checkpoint: what is left of a run writes the newest in-memory replica to disk before the run ends.

`python -m trainer --final-checkpoint` runs one process per node, on whichever nodes are left: no rank of the plan, no
model, no GPU. The newest replica of which every file is left on some node becomes a checkpoint like any other, under
this epoch: same files, same hashes, same fence, same commit.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from msgspec import structs

from orchestrator.plan import Plan
from orchestrator.plan.worker import WorkerEnv, checkpoint_dir, memory_dir
from trainer.checkpoint.fence import Fence
from trainer.checkpoint.files import sha256_from_disk, write_parts
from trainer.checkpoint.format import FileRecord
from trainer.checkpoint.load import newest_committed
from trainer.checkpoint.save import Answer, Target, agree, begin, claim, gather, publish
from trainer.comm.connect import connect
from trainer.errors import SaveError
from trainer.worker.reporter import Reporter

from .peer_restore import Copy, Holdings
from .replicate import open_memory
from .store import NodeMemory

_CHUNK = 16 << 20


def run_final_checkpoint(plan: Plan, env: WorkerEnv, reporter: Reporter) -> None:
    """Save the newest state that these nodes' memories hold together, if no checkpoint has it.

    `env` counts nodes: rank and world size are those of the saving processes, one per node. Raises SaveError, Fenced,
    and torch's network errors when another node is lost.
    """
    connect(env, torch.device("cpu"))
    target = Target(checkpoint_dir(plan.job.checkpoint.dir, env.run_dir), Fence.of(env), plan, env.rank)
    memory = open_memory(memory_dir(env.run_dir, env.node), reporter)
    save_newest_replica(target, env.world_size, memory, plan.job.checkpoint.keep_last, reporter)
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()


def save_newest_replica(
    target: Target, world: int, memory: NodeMemory | None, keep_last: int, reporter: Reporter
) -> int | None:
    """Save the newest copy that is whole, if it is newer than all checkpoints; its step, None if there was no need.

    Collective over `world` processes, one a node; `target.rank` is this one's number. The nodes' memory is given back
    when what it held is on the disk. Raises SaveError, on every rank, where a copy is newer than the disk and cannot be
    saved: files of it were on lost nodes alone, the disk is full. Raises Fenced.
    """
    start = time.perf_counter()
    claim(target.folder, target.token, target.rank)
    holdings = Holdings({str(one): [one] for one in range(world)}, target.rank, target.token.run_id, memory)
    copy, torn = holdings.survey()
    on_disk = newest_committed(target.folder, target.rank)
    if copy is None or copy.age <= on_disk:
        if torn is not None and torn.age > on_disk:
            raise SaveError(torn.text)
        if memory is not None and not any(memory.copies()):  # a spare's, which was made by looking
            memory.remove()
        return None
    manifest = structs.replace(holdings.manifest(copy), epoch=target.token.epoch, created=time.time())
    begin(target, copy.step)
    source = memory.folder / copy.name if memory is not None else None
    mine = [record for at, record in enumerate(manifest.files) if _carrier(copy, record, at) == target.rank]
    problem = _write(source, target.place(copy.step), mine)
    answers = gather(Answer(record=None, error=problem))

    def commit() -> int:
        failed = next((answer.error for answer in answers if answer.error), "")
        return publish(target, manifest, failed, keep_last, read_back=True)

    size = agree(target.rank, commit)
    if memory is not None:
        memory.remove()
    if target.rank == 0:
        seconds = time.perf_counter() - start
        about = {"bytes": size, "seconds": seconds, "stall_s": seconds, "verified": True, "source": "memory"}
        reporter.event("checkpoint_saved", copy.step, **about, folder=str(target.folder))
    return copy.step


def _carrier(copy: Copy, record: FileRecord, at: int) -> int:
    """Of those who hold a file, who writes it: in turn, so that all nodes have about as much to do."""
    holders = copy.holders[record.file]
    return holders[at % len(holders)]


def _write(source: Path | None, place: Path, records: list[FileRecord]) -> str:
    """What went wrong."""
    for record in records:
        try:
            _carry(source / record.file, place / record.file, record)
        except SaveError as error:
            return str(error)
        except OSError as error:
            return f"{record.file}: {error.strerror or error}"
    return ""


def _carry(source: Path, to: Path, record: FileRecord) -> None:
    """One file from memory to the disk: durable, and read back, when this returns. Raises OSError, SaveError."""
    with source.open("rb") as file:
        _, digest = write_parts(to, iter(partial(file.read, _CHUNK), b""))
    if digest != record.sha256:
        raise SaveError(f"{record.file}: changed in memory while it was read")
    if sha256_from_disk(to) != record.sha256:
        raise SaveError(f"{record.file}: does not read back as it was written")
