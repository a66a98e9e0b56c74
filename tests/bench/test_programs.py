"""Programs that measure are run by people, and not by the suite: here they are at least imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: `together` is what ranks of torchrun run, and reads their environment.
IMPORT_ALL = """
import importlib, pkgutil, benchmarks
for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
    if not module.name.endswith(("__main__", "together")):
        importlib.import_module(module.name)
"""


def test_every_benchmark_can_be_imported():
    """One used names of the trainer that had been renamed."""
    subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, check=True, timeout=300)
