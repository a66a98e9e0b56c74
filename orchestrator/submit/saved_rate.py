"""What a job that goes on from the checkpoints of another plan should know: where its learning rate
breaks."""

from __future__ import annotations

import contextlib

import msgspec
from msgspec import Struct

from orchestrator.plan import Plan
from orchestrator.plan.learning_rate import jump
from orchestrator.plan.worker import CHECKPOINT, MANIFEST, checkpoint_dir, committed


class _Head(Struct):
    """Of a manifest, what is asked here."""

    schema: str
    step: int
    scalars: dict[str, float] = {}


def rate_jump(plan: Plan, run_dir: str) -> list[str]:
    """One line where the newest checkpoint in the job's folder was made with another learning rate
    than its plan gives that step. None where the folder is empty or cannot be read here, and for a
    checkpoint that remembers no rate."""
    with contextlib.suppress(OSError):
        for step, path in committed(checkpoint_dir(plan.job.checkpoint.dir, run_dir)):
            try:
                head = msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Head)
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
                continue  # damaged: the run says so, and goes on from the one before
            if (head.schema, head.step) == (CHECKPOINT, step):
                message = jump(head.scalars, step, plan.job.optim, plan.job.train.steps)
                return [message] if message else []
    return []
