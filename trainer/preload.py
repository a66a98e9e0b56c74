"""Everything that a worker imports, for a process that forks workers (orchestrator/agent/nursery.py)."""

from __future__ import annotations

import os

import torch
import torch.distributed

from . import train  # noqa: F401
from .parallel.data import fsdp  # noqa: F401

torch.compiler.reset()  # imports torch._dynamo, which checkpointing and FSDP2 need: once here, not in every worker


def after_fork() -> None:
    """In a new worker, before its first operation: the parent's thread pool did not survive the fork."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
