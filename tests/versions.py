"""`make test-pythons` and `make test-floor`: tests on other versions than the pinned ones.

`pythons`: quick tests of orchestrator that need no torch, under each Python of `PYTHONS` that uv
finds or can install. `floor`: the tests of the trainer, those with processes and on fake GPUs too,
and of the programs for machines with GPUs, with the oldest torch that pyproject.toml allows. Each
environment stays in `build/versions`, and one line tells what came of each.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "versions"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
ROOMS = ("cli", "config", "cluster", "planner", "run", "schedules", "observe")
TOOLS = ("pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "jsonschema", "psutil")
#: What tests of the trainer compare with, and read.
OF_TRAINER = ("transformers", "coverage")
EXTRAS = ("slurm", "kubernetes", "plot", "tokenizers")
HERE = "not slurm and not kubernetes and not full and not timing"
QUICK = f"not slow and not process and {HERE}"
#: What the pinned torch brings: an older one has others.
OF_TORCH = re.compile(r"(torch|triton|setuptools|nvidia-[\w-]+|cuda-[\w-]+)==")
_NEEDS_TORCH = re.compile(r"^\s*(import|from) (torch|trainer|tests\.trainer)\b", re.MULTILINE)


def uv() -> str:
    """The uv of PATH, else the one that `.ci/setup` has installed."""
    return shutil.which("uv") or str(ROOT / ".venv" / ".uv" / "bin" / "uv")


def environment(name: str, python: str, constraints: Path, *requirements: str) -> Path | None:
    """Makes an environment with what pyproject.toml asks for, and returns its Python; None, with
    uv's last line, where there is no such Python or package."""
    folder = ENVIRONMENTS / name
    interpreter = folder / "bin" / "python"
    extras = [f"--extra={extra}" for extra in EXTRAS]
    packages = ["-r", str(ROOT / "pyproject.toml"), *extras, *TOOLS, *requirements]
    install = ["pip", "install", "--quiet", "--python", str(interpreter), "-c", str(constraints)]
    for command in (
        ["venv", "--quiet", "--allow-existing", "--python", python, str(folder)],
        [*install, *packages],
    ):
        done = subprocess.run([uv(), *command], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["uv printed nothing"])[-1]
            print(f"{name}: not tested: {reason.strip()}", flush=True)
            return None
    return interpreter


def run_tests(name: str, python: Path, arguments: Sequence[str]) -> bool:
    """Runs pytest under an interpreter, with orch from this folder, and prints its last line.
    Returns whether all tests passed."""
    started = time.monotonic()
    done = subprocess.run(
        [str(python), "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        print(done.stdout[-8000:], done.stderr[-2000:], sep="\n")
    lines = [line for line in done.stdout.splitlines() if re.search(r"\d (passed|failed)", line)]
    summary = lines[-1] if lines else f"pytest ended with {done.returncode}"
    print(f"{name}: {summary}; {time.monotonic() - started:.0f} s in all", flush=True)
    return done.returncode == 0


def try_pythons(workers: str) -> bool:
    files = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sorted((ROOT / "tests" / room).glob("test_*.py"))
        if not _NEEDS_TORCH.search(path.read_text())
    ]
    passed = []
    for version in PYTHONS:
        name = f"python-{version}"
        python = environment(name, version, ROOT / ".ci" / "constraints.txt")
        if python is not None:
            passed.append(run_tests(name, python, ["-n", workers, "-m", QUICK, *files]))
    return bool(passed) and all(passed)


def programs_for_gpus() -> list[str]:
    """The tests of benchmarks that run on fake GPUs: a card's image brings its own torch."""
    paths = sorted((ROOT / "tests" / "bench").glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in paths if "import fakegpu" in path.read_text()]


def try_floor(workers: str) -> bool:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch, *further) = project["optional-dependencies"]["trainer"]
    floor = torch.replace(">=", "==") + ".*"
    constraints = ENVIRONMENTS / "floor.txt"
    constraints.parent.mkdir(parents=True, exist_ok=True)
    pinned = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    constraints.write_text("\n".join(line for line in pinned if not OF_TORCH.match(line)) + "\n")
    name = f"torch-{floor.partition('==')[2]}"
    python = environment(name, sys.executable, constraints, floor, *further, *OF_TRAINER)
    files = ["tests/trainer", *programs_for_gpus()]
    arguments = ["-n", workers, "--dist", "worksteal", "-m", HERE, *files]
    return python is not None and run_tests(name, python, arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=("pythons", "floor"))
    parser.add_argument("--workers", default="2")
    args = parser.parse_args()
    tests = {"pythons": try_pythons, "floor": try_floor}
    return 0 if tests[args.subject](args.workers) else 1


if __name__ == "__main__":
    sys.exit(main())
