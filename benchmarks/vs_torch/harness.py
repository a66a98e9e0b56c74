"""Ours and torch's take turns, step by step, in the same forked ranks: what else runs on the
machine meets both alike.

A step is timed from barrier to barrier, in wall time and in processor time of all ranks (which a
busy machine cannot stretch, but which counts a thread that spins). Both sides start from the same
weights and see the same tokens, and their losses are compared step by step: a side that does other
work does not get to be faster.
"""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.plan import Plan
from trainer.verify.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
WARM_UP = 2
SIDES = ("ours", "torch")
Step = Callable[[], Tensor]  # one training step; this rank's share of the loss, a scalar


@dataclass(frozen=True)
class Case:
    """`build(rank, plan)` gives our step and torch's, on one rank."""

    name: str
    native: str  # what of torch it is measured against
    plan: Plan
    build: Callable[[int, Plan], tuple[Step, Step]]


@dataclass(frozen=True)
class Result:
    """Seconds of each round by side, [rounds]; `cpu` summed over ranks."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]
    loss_difference: float  # relative, the worst of all steps and ranks

    def ratios(self, seconds: dict[str, list[float]]) -> list[float]:
        return [
            ours / native for ours, native in zip(seconds["ours"], seconds["torch"], strict=True)
        ]

    def record(self) -> dict[str, float]:
        wall = self.ratios(self.wall)
        cpu = self.ratios(self.cpu)
        numbers = {
            "ratio": statistics.median(wall),
            "ratio_min": min(wall),
            "ratio_max": max(wall),
            "best_ratio": min(self.wall["ours"]) / min(self.wall["torch"]),
            "cpu_ratio": statistics.median(cpu),
            "ours_s": statistics.median(self.wall["ours"]),
            "torch_s": statistics.median(self.wall["torch"]),
            "ours_cpu_s": statistics.median(self.cpu["ours"]),
            "torch_cpu_s": statistics.median(self.cpu["torch"]),
        }
        return {name: round(value, 4) for name, value in numbers.items()} | {
            "loss_difference": self.loss_difference
        }


def measure(case: Case, rounds: int, timeout: float = 300.0) -> Result:
    """Raises RankError where a side fails."""
    ranks = run_ranks(_rank, case.plan.parallel.world_size, case, rounds, timeout=timeout)
    wall = ranks[0]["wall"]  # barriers on both ends: all ranks measure the same
    cpu = {
        side: [sum(one) for one in zip(*(rank["cpu"][side] for rank in ranks), strict=True)]
        for side in SIDES
    }
    return Result(wall, cpu, max(rank["difference"] for rank in ranks))


def _rank(rank: int, case: Case, rounds: int) -> dict:
    steps = dict(zip(SIDES, case.build(rank, case.plan), strict=True))
    wall = {side: [] for side in SIDES}
    cpu = {side: [] for side in SIDES}
    worst = 0.0
    for index in range(WARM_UP + rounds):
        losses = {}
        for side in SIDES if index % 2 == 0 else SIDES[::-1]:
            dist.barrier()
            begin = time.perf_counter()
            begin_cpu = time.process_time()
            losses[side] = steps[side]()
            dist.barrier()
            if index >= WARM_UP:
                wall[side].append(time.perf_counter() - begin)
                cpu[side].append(time.process_time() - begin_cpu)
        ours = float(losses["ours"])
        native = float(losses["torch"])
        worst = max(worst, abs(ours - native) / max(abs(native), 1e-9))
    return {"wall": wall, "cpu": cpu, "difference": worst}


def row_of(
    case: Case, rounds: int, title: str, width: int, **settings: object
) -> dict[str, object]:
    """Measure a case, print a line about it that begins with `title`, and return what is recorded
    of it."""
    before = conditions(**settings, rounds=rounds, world=case.plan.parallel.world_size)
    row = measure(case, rounds).record()
    times = f"{row['ours_s']:>7.3f}s {row['torch_s']:>7.3f}s {row['ratio']:>6.2f}"
    spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
    print(
        f"{title:<{width}} {times} {spread:>11} {row['cpu_ratio']:>6.2f} "
        f" {row['loss_difference']:.1e}",
        flush=True,
    )
    return row | {"conditions": before}


def conditions(**settings: object) -> dict[str, object]:
    """What a reader needs to judge the numbers."""

    def git(*words: str) -> str:
        if shutil.which("git") is None:  # a rented machine's image may lack it
            return ""
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in _lines("/proc/cpuinfo")
            if line.startswith("model name")
        ),
        "",
    )
    return {
        "commit": git("rev-parse", "HEAD"),
        "uncommitted_in_trainer": bool(git("status", "--porcelain", "trainer")),
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "realtime": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "settings": settings,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
