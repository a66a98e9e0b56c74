"""What `parallel=auto` costs, process start included, on one core; beside a bare Python and the
import of numpy.

    .venv/bin/python benchmarks/search.py [--repeats 7] [--table runs.csv]

CPU seconds (user + system) of whole processes, from fork to exit, all commands in turn in every
round: other work on the machine stretches wall time, CPU time much less. "cold" composes its
configuration with Hydra, all others find it in the cache of configurations, and only "planned
before" finds its plan in the cache of plans, too: all others search. With `--table`, rows of `orch
predict` a second as well, imports included. Goes to stdout and benchmarks/results/search.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORCH = str(Path(sys.executable).with_name("orch"))
SMALL = ["+cluster=h100x64", "parallel=auto"]
LARGE = ["+cluster=h100x16384", "model=llama3_405b", "parallel=auto"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import numpy": [sys.executable, "-c", "import numpy"],
    "orch plan, 70B on 64, cold": [ORCH, "plan", *SMALL],
    "orch plan, 70B on 64": [ORCH, "plan", *SMALL],
    "orch plan, 70B on 64, planned before": [ORCH, "plan", *SMALL],
    "orch tune, 70B on 64": [ORCH, "tune", *SMALL],
    "orch plan, 405B on 16,384": [ORCH, "plan", *LARGE],
}
TARGETS_S = {"orch plan, 70B on 64": 0.3, "orch plan, 405B on 16,384": 1.0}


def cpu_seconds(command: list[str], cache: str) -> float:
    # no scheduler within reach: where there is one, `orch plan` also asks it when the job could
    # start
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": cache,
        "PATH": str(Path(sys.executable).parent),
    }
    env.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # with it every process would compile all that it imports anew
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=env)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {child.returncode}")
    return used.ru_utime + used.ru_stime


def measure(commands: dict[str, list[str]], repeats: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as warm:
        for command in commands.values():
            cpu_seconds(command, warm)  # byte code, file cache, and the cache of configurations
        for _ in range(repeats):
            for name, command in commands.items():
                if not name.endswith("planned before"):
                    shutil.rmtree(Path(warm, "orch", "plan"), ignore_errors=True)
                with tempfile.TemporaryDirectory() as empty:
                    found[name].append(
                        cpu_seconds(command, empty if name.endswith("cold") else warm)
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--table", type=Path, help="a table for `orch predict`")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "search.json")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    commands = dict(COMMANDS)
    load = os.getloadavg()[0]
    if args.table:
        commands["orch predict"] = [ORCH, "predict", "--table", str(args.table.resolve())]
    found = measure(commands, args.repeats)
    results: dict[str, dict[str, float]] = {
        name: {"median_s": round(statistics.median(times), 3), "best_s": round(min(times), 3)}
        for name, times in found.items()
    }
    if args.table:
        with args.table.open(newline="") as file:
            rows = sum(1 for _ in csv.DictReader(file))
        results["orch predict"] |= {
            "rows": rows,
            "rows_per_s": round(rows / min(found["orch predict"])),
        }
    print(f"{'CPU seconds of the whole process':<38}{'median':>9}{'best':>9}{'target':>9}")
    for name, row in results.items():
        target = f"{TARGETS_S[name]:.1f}" if name in TARGETS_S else ""
        print(f"{name:<38}{row['median_s']:>9.2f}{row['best_s']:>9.2f}{target:>9}")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    conditions = {
        "commit": commit,
        "repeats": args.repeats,
        "python": platform.python_version(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "used": 1,
        "load_average_before": round(load, 2),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"conditions": conditions, "targets_s": TARGETS_S, "results": results}, indent=1)
        + "\n"
    )
    print(f"load average before: {load:.2f}; written to {os.path.relpath(args.out)}")


if __name__ == "__main__":
    main()
