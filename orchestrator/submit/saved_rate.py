"""A warning for jobs that continue from the checkpoints of another plan: a break of the learning
rate."""

from __future__ import annotations

import contextlib

import msgspec
from msgspec import Struct

from orchestrator.plan import Plan
from orchestrator.plan.learning_rate import jump
from orchestrator.plan.worker import CHECKPOINT, MANIFEST, checkpoint_dir, committed


class _Head(Struct):
    """The fields of a checkpoint manifest that this module reads."""

    schema: str
    step: int
    scalars: dict[str, float] = {}


def rate_jump(plan: Plan, run_dir: str) -> list[str]:
    """Returns a message if the newest checkpoint in the job's folder has another learning rate than
    the plan has at that step. Returns nothing if the folder is empty or unreadable from this
    machine, and for a checkpoint without a learning rate."""
    with contextlib.suppress(OSError):
        folder = checkpoint_dir(plan.job.checkpoint.dir, run_dir)
        for step, path in committed(folder):
            try:
                head = msgspec.json.decode((path / MANIFEST).read_bytes(), type=_Head)
            except (OSError, msgspec.MsgspecError, ValueError, RecursionError):
                continue  # a damaged checkpoint: the run reports it, and uses an earlier one
            if (head.schema, head.step) == (CHECKPOINT, step):
                message = jump(head.scalars, step, plan.job.optim, plan.job.train.steps)
                return [message] if message else []
    return []
