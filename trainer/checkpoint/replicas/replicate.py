"""Keeping copies: each rank's share of the state in its own node's memory and in its buddy's, whole or not at all.

A copy is a checkpoint (same files, same manifest) that is spread over the nodes. All ranks make it together between two
steps, and the copy before it is let go only when all have said that theirs is there: at any moment one whole copy
exists, and it survives the loss of any node, or of several no two of which are buddies.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.checkpoint.format import MANIFEST, Manifest, Piece, coverage_problem, decode, encode, rank_file
from trainer.checkpoint.save import Answer, Contents, Target, gather, manifest_of, write
from trainer.comm import messages
from trainer.errors import TrainerError
from trainer.worker.reporter import Reporter

from . import transfer
from .peers import nodes_of, wards
from .store import NodeMemory, copy_name


def open_memory(folder: Path, reporter: Reporter) -> NodeMemory | None:
    """This node's memory for copies; None, with the event `memory_copy_failed`, where it has none to offer."""
    try:
        return NodeMemory(folder)
    except OSError as error:
        reporter.event("memory_copy_failed", error=f"{error.filename or folder}: {error.strerror or error}")
        return None


class MemoryCopies:
    """Every method is collective."""

    def __init__(self, target: Target, memory: NodeMemory | None, reporter: Reporter):
        """`target`: of the durable checkpoints, for who writes. `memory` is None where the node has none to offer:
        then there are no copies on any node."""
        self.target, self.memory, self.reporter = target, memory, reporter
        self.keepers = wards(target.plan)
        node = target.plan.ranks[target.rank].node
        self.leader = nodes_of(target.plan)[node][0] == target.rank  # one rank a node writes what the node has once
        self.possible = messages.sum_ints([int(memory is None)]) == [0]

    def keep(self, pieces: Sequence[Piece], step: int, samples: int, scalars: Mapping[str, float] = {}) -> bool:
        """Make a copy of the state after `step`. False, with the event `memory_copy_failed`, if a rank could not."""
        if not self.possible or self.memory is None:
            return False
        contents = Contents(step, samples, pieces, dict(scalars), read_back=False)
        place = self.memory.folder / copy_name(step, self.target.token.epoch)
        # listed before the ranks agree: after that, another of this node may be at the next copy already
        older = [path for path in self.memory.copies() if path != place]
        problem = self._make(place, contents)
        problems = [raw.decode() for raw in messages.all_gather_bytes(problem.encode())]
        failed = next((f"rank {rank}: {one}" for rank, one in enumerate(problems) if one), "")
        if failed:
            shutil.rmtree(place, ignore_errors=True)
        elif self.leader:
            for path in older:
                shutil.rmtree(path, ignore_errors=True)
        if failed and self.target.rank == 0:
            self.reporter.event("memory_copy_failed", step, error=failed)
        return not failed

    def _make(self, place: Path, contents: Contents) -> str:
        """What went wrong here."""
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            (place / rank_file(self.target.rank)).unlink(missing_ok=True)
            mine = write(place, self.target.rank, contents)
        except OSError as error:
            mine = Answer(record=None, error=f"{place.name}: {error.strerror or error}")
        manifest, problem = self._manifest(mine, contents)
        if manifest is None:
            return problem
        problems = transfer.run(self._transfers(place, manifest))
        if self.leader:
            try:
                (place / MANIFEST).write_bytes(encode(manifest))
            except OSError as error:
                problems.append(f"{MANIFEST}: {error.strerror}")
        return "; ".join(problems)

    def _manifest(self, mine: Answer, contents: Contents) -> tuple[Manifest | None, str]:
        """The manifest of all ranks' files, the same bytes on each; or why there is none."""
        answers, raw = gather(mine), b""
        if self.target.rank == 0:
            failed = [f"rank {rank} wrote nothing: {one.error}" for rank, one in enumerate(answers) if one.error]
            if not failed:
                manifest = manifest_of(self.target, contents, answers)
                failed = [problem for problem in [coverage_problem(manifest)] if problem]
            raw = b"!" + failed[0].encode() if failed else encode(manifest)
        raw = messages.broadcast_bytes(raw)
        if raw.startswith(b"!"):
            return None, raw[1:].decode()
        try:
            return decode(raw), ""
        except TrainerError as error:
            return None, str(error)

    def _transfers(self, place: Path, manifest: Manifest) -> list[transfer.Sending | transfer.Receiving]:
        sizes, mine = {record.file: record.bytes for record in manifest.files}, self.target.rank
        todo: list[transfer.Sending | transfer.Receiving] = []
        for rank, keeper in sorted(self.keepers.items()):
            name = rank_file(rank)
            if rank == mine:
                todo.append(transfer.Sending(place / name, sizes[name], keeper))
            elif keeper == mine:
                todo.append(transfer.Receiving(place / name, sizes[name], rank))
        return todo

    def remove(self) -> None:
        """The run is over or its state is on the disk: every node gives the memory back."""
        if self.leader and self.memory is not None:
            self.memory.remove()
