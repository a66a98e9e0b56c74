"""A save beside training: a thread of each rank writes, one of rank 0 commits, step boundaries carry the news.

Threads only touch files. What ranks must know of each other travels where they meet anyway: each boundary's one small
all-reduce also sums `vote`, and when the sum says that a phase has ended on all ranks, all make the next move together:

    WRITING    every rank's file is durable and read back   -> rank 0 gets all hashes, and commits in its thread
    COMMITTING rank 0's rename is durable, or has failed    -> rank 0 tells all

So a save is complete at most two steps after its last file is, no second process group is needed, and a rank that dies
leaves what a save that was killed leaves: nothing that has a step's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from trainer.comm import messages

from .format import Piece
from .save import Answer, Contents, Target, Verdict, begin, commit, gather, tell, verdict_of, write
from .snapshot import Snapshots


class BackgroundSave:
    """At most one save under way. Methods with "collective" in their description are called by all ranks together."""

    def __init__(self, target: Target, keep_last: int):
        self.target, self.keep_last = target, keep_last
        self.contents: Contents | None = None  # of the save under way
        self._snapshots = Snapshots()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Answer] | None = None
        self._committing: Future[Verdict] | None = None  # on rank 0 alone
        self._protected: int | None = None

    def start(self, contents: Contents, protected: int | None) -> None:
        """Copy the pieces and begin to write them. No save may be under way. Collective. Raises Fenced, SaveError."""
        begin(self.target, contents.step)
        pieces: Sequence[Piece] = self._snapshots.take(contents.pieces)
        self.contents, self._protected = replace(contents, pieces=pieces), protected
        self._writing = self._thread.submit(write, self.target.place(contents.step), self.target.rank, self.contents)

    @property
    def vote(self) -> int:
        """1 if this rank has done what the phase waits for; summed over all ranks for `advance`."""
        one = self._writing or self._committing
        return int(one is not None and one.done())

    def advance(self, votes: int) -> int | None:
        """Go on if the phase has ended everywhere: the bytes of a save that is now complete, else None. Collective.

        Raises SaveError, Fenced on every rank; the save is over then too.
        """
        if self._writing is not None:
            if votes == messages.world_size():
                self._commit()
        elif self.contents is not None and votes:
            return self._end()
        return None

    def settle(self) -> int | None:
        """Wait for the save under way, as `advance` would have seen it: None if there is none. Collective."""
        if self._writing is not None:
            self._commit()
        return self._end() if self.contents is not None else None

    def _commit(self) -> None:
        mine, self._writing = self._writing.result(), None
        answers = gather(mine)
        if self.target.rank == 0:
            last = self.target, self.contents, answers, self.keep_last, self._protected
            self._committing = self._thread.submit(verdict_of, lambda: commit(*last))

    def _end(self) -> int:
        verdict = self._committing.result() if self._committing is not None else Verdict()
        self.contents = self._committing = None
        return tell(verdict)
