"""A background save: on each rank a thread writes, on rank 0 it then commits, and step boundaries
coordinate.

Threads only touch files. Ranks coordinate where they synchronise anyway: the small all-reduce at
each step boundary also sums `vote`, and when all ranks have finished a phase, all start the next
one together:

    WRITING    every rank's file is durable and read back   -> rank 0 gathers all hashes and commits
        in its thread
    COMMITTING rank 0's rename is durable, or has failed    -> rank 0 broadcasts the outcome

So a save is complete at most two steps after its last file, no second process group is needed, and
a rank that dies leaves only a staging folder, never one with a step's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from .format import StatePiece
from .save import (
    CommitOutcome,
    Contents,
    RankOutcome,
    Target,
    begin,
    broadcast_outcome,
    commit,
    gather,
    outcome_of,
    write,
)


class BackgroundSave:
    """At most one save in progress. All ranks must call the methods marked "Collective"
    together."""

    def __init__(self, target: Target, keep_last: int):
        self.target = target
        self.keep_last = keep_last
        self.contents: Contents | None = None  # of the save in progress
        self._snapshots = Snapshots()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[RankOutcome] | None = None
        self._committing: Future[CommitOutcome] | None = None  # on rank 0 alone
        self._protected: int | None = None

    def start(self, contents: Contents, protected: int | None) -> None:
        """Copy the pieces and start to write them. No other save may be in progress. Collective.
        Raises Fenced, SaveError."""
        begin(self.target, contents.step)
        pieces: Sequence[StatePiece] = self._snapshots.take(contents.pieces)
        self.contents = replace(contents, pieces=pieces)
        self._protected = protected
        self._writing = self._thread.submit(self._write, self.contents)

    def _write(self, contents: Contents) -> RankOutcome:
        self._snapshots.wait()
        return write(self.target.staging(contents.step), self.target.rank, contents)

    @property
    def copied(self) -> torch.cuda.Event | None:
        """Happens when the copies of the save in progress are complete; until then what is saved
        must not change."""
        return self._snapshots.copied

    @property
    def vote(self) -> int:
        """1 if this rank has finished the current phase, else 0; the sum over all ranks goes to
        `advance`."""
        one = self._writing or self._committing
        return int(one is not None and one.done())

    def advance(self, votes: int) -> int | None:
        """Start the next phase if all ranks have finished this one. Returns the bytes of a save
        that is now complete, else None. Collective. Raises SaveError, Fenced on every rank; the
        save has then ended too.
        """
        if self._writing is not None:
            if votes == self.target.control.world_size:
                self._commit()
        elif self.contents is not None and votes:
            return self._end()
        return None

    def settle(self) -> int | None:
        """Wait for the save in progress; its bytes, None if there is none. Collective. Raises as
        `advance`."""
        if self._writing is not None:
            self._commit()
        return self._end() if self.contents is not None else None

    def _commit(self) -> None:
        assert self._writing is not None and self.contents is not None
        mine = self._writing.result()
        self._writing = None
        outcomes = gather(self.target.control, mine)
        if self.target.rank == 0:
            last = self.target, self.contents, outcomes, self.keep_last, self._protected
            self._committing = self._thread.submit(outcome_of, lambda: commit(*last))

    def _end(self) -> int:
        outcome = self._committing.result() if self._committing is not None else CommitOutcome()
        self.contents = self._committing = None
        return broadcast_outcome(self.target, outcome)


class Snapshots:
    """Takes one copy after another into the same memory, allocated by the first.

    Copies from a GPU go into page-locked memory, on a stream of their own: neither the host nor the
    computation waits. `copied` is the event after them. Whoever reads the copies waits for it, and
    so must the stream that next writes what is copied.
    """

    def __init__(self) -> None:
        self.copied: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._kept: list[Tensor] = []

    def take(self, pieces: Iterable[StatePiece]) -> list[StatePiece]:
        """The pieces with their data copied. Overwrites the previous copy."""
        pieces = list(pieces)
        if [(one.dtype, one.shape) for one in self._kept] != [
            (one.data.dtype, one.data.shape) for one in pieces
        ]:
            self._kept = [self._room(piece.data) for piece in pieces]
        device = next((piece.data.device for piece in pieces if piece.data.is_cuda), None)
        pairs = list(zip(self._kept, pieces, strict=True))
        if device is None:
            _copy(pairs)
        else:
            self._stream = self._stream or torch.cuda.Stream(device)
            _copy(
                [pair for pair in pairs if pair[1].kind == "state"]
            )  # small, and a forward may change it
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _copy([pair for pair in pairs if pair[1].kind != "state"])
                self.copied = torch.cuda.Event(blocking=True)
                self.copied.record()
        return [replace(piece, data=kept) for kept, piece in pairs]

    def wait(self) -> None:
        """Wait until the copies are complete."""
        if self.copied is not None:
            self.copied.synchronize()

    @staticmethod
    def _room(data: Tensor) -> Tensor:
        return torch.empty(data.shape, dtype=data.dtype, pin_memory=data.device.type == "cuda")


def _copy(pairs: Iterable[tuple[Tensor, StatePiece]]) -> None:
    for kept, piece in pairs:
        kept.copy_(piece.data, non_blocking=True)
