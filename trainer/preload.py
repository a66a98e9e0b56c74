"""Imports the modules of workers in the fork server that starts them (orchestrator/agent/node)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed

# The first backward of a worker would import it, which takes half a second.
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
    """Imports the optional modules that a plan needs, before its workers are forked.

    Raises any error of reading the plan; the worker itself reports such errors better.
    """
    options = list(arguments)
    path = options[options.index("--plan") + 1] if "--plan" in options else environment["ORCH_PLAN"]
    plan = msgspec.json.decode(Path(path).read_bytes(), type=_Needs)
    with _driver_left_alone():
        if plan.parallel.zero == 3:
            from .parallel.data import fsdp  # noqa: F401
        if plan.parallel.zero == 3 or plan.job.train.compile or plan.job.train.recompute != "none":
            compat.import_compiler()


@contextlib.contextmanager
def _driver_left_alone() -> Iterator[None]:
    """Has torch ask NVML, not CUDA's driver, whether there are GPUs.

    CUDA cannot be used in a process that is forked from one that has asked the driver.
    """
    previous = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_ASK_NVML]
        else:
            os.environ[_ASK_NVML] = previous


def after_fork() -> None:
    """Sets the threads of a new worker before its first operation: the parent's thread pool did not
    survive the fork."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
