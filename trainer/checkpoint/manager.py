"""A run's checkpoints as the training loop uses them: own the folder, resume, save in the
background, save synchronously."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from orchestrator.plan import Plan
from trainer.comm.control import WORLD, ControlPath, first_problem
from trainer.errors import CheckpointError, SaveError
from trainer.worker.reporter import Reporter

from . import pins
from .background import BackgroundSave
from .fence import Fence
from .format import FENCE, Manifest, StatePiece
from .load import VerifiedCheckpoint, newest, newest_committed
from .replicas.peer_restore import PeerRestore, Replica
from .replicas.replicate import InMemoryReplicas, open_replica_store
from .restore import restore
from .retention import set_aside
from .save import Contents, Target, acquire, layout_of, save


class Checkpoints:
    """Resumes and saves a run. Every method is collective: all ranks call it at the same step."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        token: Fence,
        rank: int,
        reporter: Reporter,
        data: str = "",
        memory: Path | None = None,
        control: ControlPath = WORLD,
        pin: Path | None = None,
    ):
        """`data` is the key of the token files; a resume on other text than the checkpoint's is
        reported, not refused. `memory` is this node's folder for in-memory replicas, used if the
        plan asks for them. `pin` is the file that records the run's newest checkpoint
        (`trainer.checkpoint.pins`), or None for no record."""
        self.target = Target(folder, token, plan, rank, data=data, control=control)
        self.reporter = reporter
        self.replicas: InMemoryReplicas | None = None
        self._peers: PeerRestore | None = None
        if memory is not None and plan.job.checkpoint.memory_every_steps > 0:
            store = open_replica_store(memory, reporter)
            self.replicas = InMemoryReplicas(self.target, store, reporter)
            self._peers = PeerRestore(plan, rank, token.run_id, store, control)
        self._pin = pin
        self._partial_fill = ""  # why a replica filled only a part of the state
        self.keep_last = plan.job.checkpoint.keep_last
        self.saved_step: int | None = None  # newest step that is on disk
        #: newest step whose files were read back from the disk as written
        self.verified_step: int | None = None
        snapshots = 2 if plan.job.checkpoint.snapshots == 2 else 1
        self._background = BackgroundSave(self.target, self.keep_last, snapshots)

    def resume(self, pieces: Callable[[], Sequence[StatePiece]]) -> Manifest | None:
        """Acquires the folder for this epoch, then fills `pieces()` from the newest verified
        checkpoint, if there is one.

        A complete in-memory replica with a newer (epoch, step) is used instead. Newer checkpoints
        that fail verification are reported (event `checkpoint_rejected`) and renamed.

        Raises Fenced, CheckpointError; OSError if the source disappears while it fills `pieces()`
        and no other source can.
        """
        folder = self.target.folder
        rank = self.target.rank
        control = self.target.control
        acquire(self.target)
        start = time.perf_counter()
        replica = self._peers.newest() if self._peers is not None else None
        if replica is not None and replica.version > newest_committed(folder, rank, control):
            if (fetched := self._from_memory(replica, pieces)) is not None:
                return self._resumed(fetched, start, "memory")
            replica = None
        on_disk = None
        problem = None
        try:
            on_disk = self._verified()
        except CheckpointError as error:
            problem = error
        # A replica that looked older than the disk is newer if the disk's newest was damaged.
        if (
            replica is not None
            and (on_disk is None or replica.version > on_disk.version)
            and (fetched := self._from_memory(replica, pieces)) is not None
        ):
            return self._resumed(fetched, start, "memory")
        if on_disk is not None:
            plan = self.target.plan
            restore(on_disk, pieces(), rank, layout_of(plan), plan.job.train.seed)
            return self._resumed(on_disk, start, "disk")
        if problem is not None:
            raise problem
        if self._partial_fill:
            raise OSError(f"only a part of the state was filled: {self._partial_fill}")
        lost_checkpoint = control.judge(
            b"",
            lambda _: pins.saved_before(self._pin, folder) if self._pin else "",
        )
        if lost_checkpoint:
            raise CheckpointError(lost_checkpoint)
        return None

    def _remember(self, step: int) -> None:
        """Records on rank 0 that the checkpoint of `step` is on disk. A run goes on without the
        record if it cannot be written."""
        if self._pin is None or self.target.rank != 0:
            return
        try:
            pins.remember(self._pin, self.target.folder, step)
        except OSError as error:
            self.reporter.event("pin_failed", step, error=f"{self._pin}: {error.strerror or error}")

    def _verified(self) -> VerifiedCheckpoint | None:
        """Returns the newest checkpoint on disk that verifies; reports newer ones and sets them
        aside."""
        rejected = []

        def reject(path: Path, problem: str) -> None:
            rejected.append(path)
            self._rejected(str(path), problem)

        checkpoint = newest(self.target.folder, self.target.rank, reject, self.target.control)
        if self.target.rank == 0 and checkpoint is not None:
            for path in rejected:
                set_aside(path, self.target.token)
        return checkpoint

    def _from_memory(
        self, replica: Replica, pieces: Callable[[], Sequence[StatePiece]]
    ) -> VerifiedCheckpoint | None:
        """Fills `pieces()` from a replica. Returns None if any rank cannot, for example because
        its files are deleted while it reads (logind does that): then all pieces must be filled
        again."""
        assert self._peers is not None
        plan = self.target.plan
        problem = b""
        try:
            checkpoint = self._peers.fetch(replica, pieces())
        except CheckpointError as error:
            self._rejected(replica.name, str(error))
            return None
        try:
            restore(checkpoint, pieces(), self.target.rank, layout_of(plan), plan.job.train.seed)
        except (CheckpointError, OSError) as error:
            problem = str(error).encode()
        if agreed_problem := self.target.control.judge(problem, first_problem):
            self._partial_fill = f"replica of step {replica.step} in memory: {agreed_problem}"
            self._rejected(replica.name, self._partial_fill)
            return None
        return checkpoint

    def _rejected(self, path: str, problem: str) -> None:
        if self.target.rank == 0:
            self.reporter.event("checkpoint_rejected", path=path, problem=problem)

    def _resumed(self, checkpoint: VerifiedCheckpoint, start: float, source: str) -> Manifest:
        plan = self.target.plan
        rank = self.target.rank
        if source == "disk":
            self.saved_step = self.verified_step = checkpoint.manifest.step
            self._remember(checkpoint.manifest.step)
        else:  # that checkpoint is not verified, but retention must not delete it either
            self.verified_step = newest_committed(self.target.folder, rank, self.target.control)[1]
        manifest = checkpoint.manifest
        if rank == 0:
            self.reporter.event(
                "resumed",
                manifest.step,
                path=str(checkpoint.path),
                source=source,
                samples=manifest.samples,
                seconds=time.perf_counter() - start,
                same_plan=manifest.plan_hash == plan.hash,
                same_layout=manifest.layout == layout_of(plan),
                layout=str(manifest.layout),
                same_data=manifest.data == self.target.data,
            )
        return manifest

    # -------------------------------------------------------------------------------------------
    #     in the background

    def start(
        self,
        pieces: Sequence[StatePiece],
        step: int,
        samples: int,
        scalars: Mapping[str, float] = {},
    ) -> None:
        """Copies the state of `step`, and writes it after the save in progress while training
        continues. Waits for that save first if no memory is left for a copy. A failed save, of any
        step, is the event `checkpoint_failed`; the next may succeed. Raises Fenced."""
        if not self._background.has_room:
            self._follow(self._background.settle)
        if step == self.saved_step:
            return
        started = time.perf_counter()
        self._report_removed_folder(step)
        save = self._background.copy(Contents(step, samples, pieces, dict(scalars)), started)
        self._begin_next()
        save.stall_s = time.perf_counter() - started

    @property
    def copied(self) -> torch.cuda.Event | None:
        """The event until which no update may change the state that `start` saves; None if it is
        already copied (CPU)."""
        return self._background.copied

    @property
    def vote(self) -> int:
        """This rank's vote; at a step boundary `advance` takes its sum over all ranks."""
        return self._background.vote

    def advance(self, votes: int, stopping: bool = False) -> None:
        """Lets a save in progress enter its next phase, at a step boundary. A run that is
        `stopping` forgets the copies that wait: the save that follows is newer. Raises Fenced."""
        if stopping:
            self._background.waiting.clear()
        self._follow(lambda: self._background.advance(votes))

    def settle(self) -> None:
        """Waits until no save is in progress or waits for its turn. Raises Fenced."""
        while self._background.in_progress is not None:
            self._follow(self._background.settle)

    def remove_replicas(self) -> None:
        """Frees the memory of replicas."""
        if self.replicas is not None:
            self.replicas.remove()

    def before_update(self, step: int) -> None:
        """Waits until the update of `step` may change the state that a replica reads."""
        if self.replicas is not None:
            self.replicas.before_update(step)

    def _follow(self, act: Callable[[], int | None]) -> None:
        save = self._background.in_progress
        start = time.perf_counter()
        if save is None:
            return
        with self._reporting_failure(save.contents.step):
            size = act()
            save.stall_s += time.perf_counter() - start
            if size is not None:
                self._saved(save.contents, size, time.perf_counter() - save.started, save.stall_s)
        self._begin_next()

    def _begin_next(self) -> None:
        """Begins the save that waits, unless another is in progress."""
        background = self._background
        if background.in_progress is not None or not background.waiting:
            return
        save = background.waiting[0]
        begin = time.perf_counter()
        with self._reporting_failure(save.contents.step):
            background.start(self.verified_step)
        save.stall_s += time.perf_counter() - begin

    @contextlib.contextmanager
    def _reporting_failure(self, step: int) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            if self.target.rank == 0:
                self.reporter.event("checkpoint_failed", step, error=str(error))

    # -------------------------------------------------------------------------------------------
    #     now

    def save(
        self,
        pieces: Sequence[StatePiece],
        step: int,
        samples: int,
        scalars: Mapping[str, float] = {},
        read_back: bool = True,
    ) -> None:
        """Commits the checkpoint of `step` before it returns, unless that step is already on disk.

        Without `read_back` it is faster, for a termination signal; retention then also keeps the
        newest checkpoint that was read back. Raises SaveError, Fenced.
        """
        self.settle()
        if step == self.saved_step:
            return
        start = time.perf_counter()
        self._report_removed_folder(step)
        contents = Contents(step, samples, pieces, dict(scalars), read_back=read_back)
        size = save(self.target, contents, self.keep_last, self.verified_step)
        seconds = time.perf_counter() - start
        self._saved(contents, size, seconds, seconds)

    def _report_removed_folder(self, step: int) -> None:
        """Reports that somebody has removed the folder, which this save creates again. It never
        raises: a disk that fails here also fails in the save, where all ranks learn of it."""
        with contextlib.suppress(OSError):
            if self.target.rank == 0 and not (self.target.folder / FENCE).exists():
                self.reporter.event(
                    "checkpoint_folder_removed", step, folder=str(self.target.folder)
                )

    def _saved(self, contents: Contents, size: int, seconds: float, stall_s: float) -> None:
        self.saved_step = contents.step
        self._remember(contents.step)
        if contents.read_back:
            self.verified_step = contents.step
        if self.target.rank == 0:
            self.reporter.event(
                "checkpoint_saved",
                contents.step,
                bytes=size,
                seconds=seconds,
                stall_s=stall_s,
                verified=contents.read_back,
                folder=str(self.target.folder),
            )
