"""A background save: a thread writes each rank's file, the thread of rank 0 then commits, and
ranks agree on the phase at step boundaries.

Threads only touch files. Ranks agree where they synchronise anyway: the small all-reduce at each
step boundary also sums `vote`, and when all ranks have finished a phase, they start the next one
together:

    WRITING    every rank's file is durable and read back   -> rank 0 gathers all hashes and commits
        in its thread
    COMMITTING rank 0's rename is durable, or has failed    -> rank 0 broadcasts the outcome

So a save is complete at most two steps after its last file, no second process group is needed, and
a rank that dies leaves only a staging folder, never one with a step's name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

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


@dataclass
class CopiedSave:
    """A save whose pieces are, or will soon be, in one of the snapshots. Times are seconds."""

    contents: Contents
    snapshot: Snapshot
    started: float  # by `time.perf_counter`
    stall_s: float = 0.0  # what training has waited for it


class BackgroundSave:
    """Holds at most one save in progress, and those that are copied and wait for it. All ranks must
    call the methods marked "Collective" together."""

    def __init__(self, target: Target, keep_last: int, snapshots: int = 1):
        """`snapshots`: how many saves, with the one in progress, host memory has room for."""
        self.target = target
        self.keep_last = keep_last
        self.in_progress: CopiedSave | None = None
        self.waiting: deque[CopiedSave] = deque()
        self._snapshots = [Snapshot() for _ in range(snapshots)]
        self._newest = self._snapshots[0]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[RankOutcome] | None = None
        self._committing: Future[CommitOutcome] | None = None  # on rank 0 alone
        self._protected: int | None = None

    @property
    def has_room(self) -> bool:
        """Whether a snapshot is free."""
        return bool(self._free_snapshots())

    def _free_snapshots(self) -> list[Snapshot]:
        saves = [*self.waiting, *([self.in_progress] if self.in_progress is not None else [])]
        taken = [save.snapshot for save in saves]
        return [snapshot for snapshot in self._snapshots if snapshot not in taken]

    def copy(self, contents: Contents, started: float) -> CopiedSave:
        """Copies the pieces into a free snapshot. `start` will write them. `started`: when the save
        was asked for."""
        for snapshot in self._snapshots:  # all at the first save: memory that lacks is missed early
            snapshot.reserve(contents.pieces)
        self._newest = self._free_snapshots()[0]
        copied = replace(contents, pieces=self._newest.take(contents.pieces))
        save = CopiedSave(copied, self._newest, started)
        self.waiting.append(save)
        return save

    def start(self, protected: int | None) -> None:
        """Starts to write the copy that waits longest. No other save may be in progress.
        Collective. Raises Fenced, SaveError, and then forgets that copy."""
        save = self.waiting.popleft()
        begin(self.target, save.contents.step)
        self.in_progress = save
        self._protected = protected
        self._writing = self._thread.submit(self._write, save)

    def _write(self, save: CopiedSave) -> RankOutcome:
        save.snapshot.wait()
        return write(
            self.target.staging(save.contents.step),
            self.target.rank,
            save.contents,
        )

    @property
    def copied(self) -> torch.cuda.Event | None:
        """The event after the newest copy; until it, the saved state must not change."""
        return self._newest.copied

    @property
    def vote(self) -> int:
        """1 if this rank has finished the current phase, else 0; `advance` takes the sum over all
        ranks."""
        phase = self._writing or self._committing
        return int(phase is not None and phase.done())

    def advance(self, votes: int) -> int | None:
        """Starts the next phase if all ranks have finished this one. Returns the bytes of a save
        that is now complete, else None. Collective. Raises SaveError or Fenced on every rank, which
        also ends the save.
        """
        if self._writing is not None:
            if votes == self.target.control.world_size:
                self._commit()
        elif self.in_progress is not None and votes:
            return self._end()
        return None

    def settle(self) -> int | None:
        """Waits for the save in progress and returns its bytes, or None if there is none.
        Collective. Raises as `advance` does."""
        if self._writing is not None:
            self._commit()
        return self._end() if self.in_progress is not None else None

    def _commit(self) -> None:
        assert self._writing is not None and self.in_progress is not None
        outcome = self._writing.result()
        self._writing = None
        outcomes = gather(self.target.control, outcome)
        if self.target.rank == 0:
            action = partial(
                commit,
                self.target,
                self.in_progress.contents,
                outcomes,
                keep_last=self.keep_last,
                protected=self._protected,
            )
            self._committing = self._thread.submit(outcome_of, action)

    def _end(self) -> int:
        outcome = self._committing.result() if self._committing is not None else CommitOutcome()
        self.in_progress = None
        self._committing = None
        return broadcast_outcome(self.target, outcome)


class Snapshot:
    """A copy of state in host memory, which the first copy allocates and later ones reuse.

    Copies from a GPU go into page-locked memory, on a stream of their own: neither the host nor the
    computation waits. `copied` is the event after them. The reader of the copies waits for it, and
    so must the stream that next writes the copied state.
    """

    def __init__(self) -> None:
        self.copied: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._copies: list[Tensor] = []

    def reserve(self, pieces: Sequence[StatePiece]) -> None:
        """Allocates the memory for a copy of pieces like these."""
        allocated = [(tensor.dtype, tensor.shape) for tensor in self._copies]
        if allocated != [(piece.data.dtype, piece.data.shape) for piece in pieces]:
            self._copies = [self._allocate(piece.data) for piece in pieces]

    def take(self, pieces: Iterable[StatePiece]) -> list[StatePiece]:
        """Returns the pieces with their data copied. Overwrites the previous copy."""
        pieces = list(pieces)
        self.reserve(pieces)
        device = next((piece.data.device for piece in pieces if piece.data.is_cuda), None)
        pairs = list(zip(self._copies, pieces, strict=True))
        if device is None:
            _copy(pairs)
        else:
            self._stream = self._stream or torch.cuda.Stream(device)
            # State without gradient is small, and the next forward may change it: copied at once.
            _copy([pair for pair in pairs if pair[1].kind == "state"])
            self._stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(self._stream):
                _copy([pair for pair in pairs if pair[1].kind != "state"])
                self.copied = torch.cuda.Event(blocking=True)
                self.copied.record()
        return [replace(piece, data=copy) for copy, piece in pairs]

    def wait(self) -> None:
        """Waits until the copies are complete."""
        if self.copied is not None:
            self.copied.synchronize()

    @staticmethod
    def _allocate(data: Tensor) -> Tensor:
        return torch.empty(
            data.shape,
            dtype=data.dtype,
            pin_memory=data.device.type == "cuda",
        )


def _copy(pairs: Iterable[tuple[Tensor, StatePiece]]) -> None:
    for copy, piece in pairs:
        copy.copy_(piece.data, non_blocking=True)
