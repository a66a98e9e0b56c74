"""What workers import, for a process that forks workers (orchestrator/agent/node/fork_server.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed
import torch.fx.experimental.symbolic_shapes  # what a worker's first backward imports: half a second

from . import train  # noqa: F401


class _Parallel(msgspec.Struct):
    zero: int


class _Train(msgspec.Struct):
    recompute: str
    compile: bool


class _Job(msgspec.Struct):
    train: _Train


class _Needs(msgspec.Struct):
    """The part of a plan that says what is imported for it."""

    parallel: _Parallel
    job: _Job


def prepare(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Before the fork of a worker: import what not every plan needs, and this one does.

    Raises whatever reading the plan raises; the worker itself has the better words for it.
    """
    words = list(arguments)
    path = words[words.index("--plan") + 1] if "--plan" in words else environment["ORCH_PLAN"]
    plan = msgspec.json.decode(Path(path).read_bytes(), type=_Needs)
    if plan.parallel.zero == 3:
        from .parallel.data import fsdp  # noqa: F401
    if plan.parallel.zero == 3 or plan.job.train.compile or plan.job.train.recompute != "none":
        torch.compiler.reset()  # imports torch._dynamo: seconds of processor time


def after_fork() -> None:
    """In a new worker, before its first operation: the parent's thread pool did not survive the fork."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
