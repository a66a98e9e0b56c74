"""Imports what workers need, in the fork server that workers are forked from
(orchestrator/agent/node)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed

# what a worker's first backward imports: half a second
import torch.fx.experimental.symbolic_shapes

from . import compat, train  # noqa: F401

_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


class _Parallel(msgspec.Struct):
    zero: int


class _Train(msgspec.Struct):
    recompute: str
    compile: bool


class _Job(msgspec.Struct):
    train: _Train


class _Needs(msgspec.Struct):
    """The fields of a plan that decide what a worker imports."""

    parallel: _Parallel
    job: _Job


def prepare(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Before a worker is forked: import the optional modules that its plan needs.

    Raises whatever reading the plan raises; the worker itself reports such errors better.
    """
    words = list(arguments)
    path = words[words.index("--plan") + 1] if "--plan" in words else environment["ORCH_PLAN"]
    plan = msgspec.json.decode(Path(path).read_bytes(), type=_Needs)
    with _driver_left_alone():
        if plan.parallel.zero == 3:
            from .parallel.data import fsdp  # noqa: F401
        if plan.parallel.zero == 3 or plan.job.train.compile or plan.job.train.recompute != "none":
            compat.import_compiler()


@contextlib.contextmanager
def _driver_left_alone() -> Iterator[None]:
    """Inside, a module of torch that asks whether there are GPUs is answered by NVML.

    CUDA cannot be used in a process that is forked from one that has asked CUDA's driver.
    """
    before = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ASK_NVML]
        else:
            os.environ[_ASK_NVML] = before


def after_fork() -> None:
    """In a new worker, before its first operation: the parent's thread pool did not survive the
    fork."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
