"""Wall time of `orch --help` and `orch plan` beside a bare `python -c pass`, interleaved in one
run.

    .venv/bin/python benchmarks/cli_startup.py [--repeats 15] [--check]

Every round times each command once, so that a busy machine slows all of them alike; medians, the
best of all rounds and the ratio to bare Python go to stdout and to
benchmarks/results/cli_startup.json. Times are of whole processes, from fork to exit. "cold" finds
nothing in the cache, "composed before" its configuration, all others what a first use of the same
words has left there. `--check` fails (exit 1) when a median is over its limit: 0.15 s for help, 1 s
for a plan.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORCH = str(Path(sys.executable).with_name("orch"))
JOB = ["+cluster=h100x64", "parallel=tp8_pp4_zero1", "model=llama3_70b"]
KUBERNETES = ["backend=kubernetes", "backend.options.image=example.org/orch:1"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "orch --help": [ORCH, "--help"],
    "orch completion (group names)": [ORCH, "completion", "--line", "orch plan cluster="],
    "import hydra": [sys.executable, "-c", "from hydra import compose, initialize_config_dir"],
    "orch plan h100x64, cold": [ORCH, "plan", *JOB],
    "orch plan h100x64, composed before": [ORCH, "plan", *JOB],
    "orch plan h100x64": [ORCH, "plan", *JOB],
    "orch submit --dry-run, Kubernetes": [ORCH, "submit", "--dry-run", "--json", *JOB, *KUBERNETES],
    "orch plan h100x16384": [
        ORCH,
        "plan",
        "+cluster=h100x16384",
        "model=llama3_405b",
        "parallel=llama3_405b",
    ],
}
LIMITS_S = {"orch --help": 0.15, "orch plan h100x64": 1.0}


def once(name: str, command: list[str], cache: Path) -> float:
    if name.endswith(("cold", "composed before")):
        shutil.rmtree(
            cache / "orch" / ("plan" if name.endswith("before") else ""), ignore_errors=True
        )
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True, timeout=120, env=env)
    return time.perf_counter() - start


def measure(repeats: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: Path(folder, str(index)) for index, name in enumerate(COMMANDS)}
        for name, command in COMMANDS.items():
            once(
                name, command, caches[name]
            )  # writes byte code and warms the file cache, as a second use finds them
        rounds = [
            {name: once(name, command, caches[name]) for name, command in COMMANDS.items()}
            for _ in range(repeats)
        ]
    bare = statistics.median(times["python -c pass"] for times in rounds)
    result = {}
    for name in COMMANDS:
        times = [found[name] for found in rounds]
        median = statistics.median(times)
        result[name] = {
            "median_s": round(median, 4),
            "best_s": round(min(times), 4),
            "worst_s": round(max(times), 4),
            "ratio_to_bare_python": round(median / bare, 2),
        }
    return result


def conditions(repeats: int, load_before: float) -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": commit,
        "repeats": repeats,
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average_before": round(load_before, 2),
        "python": platform.python_version(),
        "versions": {
            name: version(name) for name in ("hydra-core", "omegaconf", "msgspec", "numpy")
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "cli_startup.json"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 when a median is over its limit"
    )
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    result = measure(args.repeats)
    print(f"{'command':<36}{'median':>9}{'best':>9}{'worst':>9}{'x bare':>9}{'limit':>9}")
    for name, row in result.items():
        limit = f"{LIMITS_S[name]:.2f} s" if name in LIMITS_S else ""
        seconds = "".join(f"{row[key]:>7.3f} s" for key in ("median_s", "best_s", "worst_s"))
        print(f"{name:<36}{seconds}{row['ratio_to_bare_python']:>9.1f}{limit:>9}")
    over = [name for name, limit in LIMITS_S.items() if result[name]["median_s"] > limit]
    report = {
        "conditions": conditions(args.repeats, load_before),
        "limits_s": LIMITS_S,
        "results": result,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"load average before: {load_before:.2f}; written to {os.path.relpath(args.out)}")
    if args.check and over:
        print(f"over the limit: {', '.join(over)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
