"""One run's checkpoints as the training loop sees them: claim, resume, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestrator.plan import Plan
from trainer.metrics.report import Reporter

from .fence import Fence
from .format import Manifest, Piece
from .load import newest, restore
from .save import claim, save, set_aside


class Checkpoints:
    """Every method is collective: all ranks call it at the same step."""

    def __init__(self, folder: Path, plan: Plan, token: Fence, rank: int, reporter: Reporter, data: str = ""):
        """`data`: key of the token files; a resume on other text than the checkpoint's is reported, not refused."""
        self.data = data
        self.folder, self.plan, self.token, self.rank, self.reporter = folder, plan, token, rank, reporter
        self.saved_step: int | None = None  # newest step that is on disk and was verified or written by this process

    def resume(self, pieces: Callable[[], Sequence[Piece]]) -> Manifest | None:
        """Claim the folder for this epoch, then fill `pieces()` from the newest verified checkpoint, if there is one.

        Newer ones that do not verify are reported (event `checkpoint_rejected`) and set aside under another name.
        Raises Fenced, CheckpointError.
        """
        claim(self.folder, self.token, self.rank)
        start, rejected = time.perf_counter(), []

        def reject(path: Path, problem: str) -> None:
            rejected.append(path)
            if self.rank == 0:
                self.reporter.event("checkpoint_rejected", path=str(path), problem=problem)

        found = newest(self.folder, self.rank, reject)
        if found is None:
            return None
        restore(found, pieces(), self.rank)
        if self.rank == 0:
            for path in rejected:
                set_aside(path, self.token)
            self.reporter.event(
                "resumed",
                found.manifest.step,
                path=str(found.path),
                samples=found.manifest.samples,
                seconds=time.perf_counter() - start,
                same_plan=found.manifest.plan_hash == self.plan.hash,
                same_data=found.manifest.data == self.data,
            )
        self.saved_step = found.manifest.step
        return found.manifest

    def save(self, pieces: Sequence[Piece], step: int, samples: int, scalars: Mapping[str, float] = {}) -> None:
        """Commit the checkpoint of `step`, unless that step is on disk already. Raises SaveError, Fenced."""
        if step == self.saved_step:
            return
        start = time.perf_counter()
        size = save(
            self.folder,
            self.plan,
            self.token,
            self.rank,
            pieces,
            step=step,
            samples=samples,
            scalars=scalars,
            data=self.data,
            keep_last=self.plan.job.checkpoint.keep_last,
            protected=self.saved_step,
        )
        self.saved_step = step
        if self.rank == 0:
            seconds = time.perf_counter() - start
            self.reporter.event("checkpoint_saved", step, bytes=size, seconds=seconds, folder=str(self.folder))
