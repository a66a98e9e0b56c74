"""Holds the bundled trainer before steps, so that what a test does to a run comes before the run's
end.

ORCH_TEST_HOLD="20 40": before step 20 every rank reports the event `held` and waits until the run
folder has a file `go-20`, or a termination signal arrives; before step 40 likewise. Python runs
this file in each process that has its folder on PYTHONPATH: so the trainer is held that agents
start and fork as they do without it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "ORCH_TEST_HOLD"
TRAINING_LOOP = "trainer.train"


def environment(*steps: int) -> dict[str, str]:
    """What makes the ranks of a run with agents wait before these steps."""
    return {"PYTHONPATH": str(Path(__file__).parent), VARIABLE: " ".join(map(str, steps))}


def release(run_dir: Path, step: int) -> None:
    """Let the ranks of a run make that step, now or when they come to it."""
    (run_dir / f"go-{step}").touch()


def held(agree: Callable) -> Callable:
    """The training loop's agreement at a step boundary, which waits before the steps that are to be
    held."""

    def agree_when_released(run: Any, batches: list) -> tuple[int, bool]:
        step = run.step + 1
        go = Path(run.env.run_dir) / f"go-{step}"
        if str(step) in os.environ.get(VARIABLE, "").split() and not go.exists():
            run.reporter.event("held", step)
            while not go.exists() and not run.termination.received:
                time.sleep(0.01)
        return agree(run, batches)

    return agree_when_released


class HoldingFinder(MetaPathFinder):
    """Finds the training loop and changes its agreement once it is imported."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRAINING_LOOP:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_hold(module: ModuleType) -> None:
            execute(module)
            module.Run._agree = held(module.Run._agree)

        spec.loader.exec_module = execute_and_hold
        return spec


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, HoldingFinder())
