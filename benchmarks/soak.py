"""A long run with a fault now and then, and what was left of the time: its ETTR.

    python benchmarks/soak.py --minutes 60 --fault-every-s 60 [--trainer] [--seed 0]

Four nodes of one rank each and a spare on this machine; faults and victims are drawn by the seed
from those of `orch drill` that a run gets over by itself. Then the run is cancelled, and its own
report is read: ETTR, seconds by state, faults, lost steps, and the ledger, which must have each
sample once. Writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.backends.base import get_backend  # noqa: E402
from orchestrator.drill.faults import Injection  # noqa: E402
from orchestrator.drill.targets import LocalTargets  # noqa: E402
from orchestrator.drill.trial import DrilledRun  # noqa: E402
from orchestrator.errors import OrchError  # noqa: E402
from orchestrator.run.folder import RunFolder  # noqa: E402
from orchestrator.run.request import read_request  # noqa: E402

FAULTS = (
    "kill_worker",
    "stop_worker",
    "slow_worker",
    "kill_agent",
    "stop_agent",
    "kill_node",
    "stop_node",
)
WITH_CHECKPOINTS = (*FAULTS, "disk_full", "bit_flip")


def submit(home: Path, trainer: bool) -> RunFolder:
    words = [
        "submit",
        "cluster=local_nodes",
        "nodes=2..4",
        "cluster.nodes=4",
        "cluster.gpus_per_node=1",
        "train.seq_len=64",
    ]
    words += [
        "train.global_batch_samples=12",
        "train.steps=10000000",
        "backend.heartbeat_timeout_s=3",
    ]
    words += [
        "backend.max_restarts=100000",
        "checkpoint.every_steps=20",
        "checkpoint.memory_every_steps=1",
    ]
    words += ["backend.options.restart_lost_nodes_after_s=2", "backend.options.grow_after_s=5"]
    words += ["backend.options.spare_nodes=1", "--run-id", "soak"]
    command = (
        []
        if trainer
        else ["--in-place", "--", sys.executable, str(ROOT / "benchmarks" / "together.py")]
    )
    orch(home, *words, *command)
    return RunFolder(home / "runs" / "soak")


def orch(home: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "orchestrator.cli.main", *words]
    environment = os.environ | {"ORCH_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        argv, env=environment, cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def soak(
    folder: RunFolder, seconds: float, every_s: float, seed: int, faults: tuple[str, ...]
) -> tuple[int, list[str]]:
    """(faults that were injected, what did not go on)."""
    request = read_request(folder)
    drilled = DrilledRun(folder, get_backend("local"), request, 120.0)
    targets = LocalTargets(folder, request)
    draw = random.Random(seed)
    end = time.monotonic() + seconds
    injection = 0
    problems = []
    while time.monotonic() + every_s < end:
        time.sleep(every_s - time.monotonic() % every_s)
        fault = draw.choice(faults)
        try:
            trial = drilled.run_trial(Injection(fault, "any", draw.random()), targets, 5.0)
        except OrchError as error:
            if fault == "bit_flip" and "two yet" in error.message:
                continue
            return injection, [*problems, error.message]
        injection += 1
        problems += [f"{fault}: {trial.problem}"] if not trial.ok else []
        left = f"{(end - time.monotonic()) / 60:.0f} min left"
        print(
            f"{injection:>4} {fault:<12} rank {trial.rank} on {trial.node:<9} ok={trial.ok} {left}",
            flush=True,
        )
    time.sleep(max(0.0, end - time.monotonic()))
    return injection, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--fault-every-s", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trainer", action="store_true", help="the bundled trainer instead of stand-ins"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.json")
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="orch-soak-", ignore_cleanup_errors=True) as temporary:
        home = Path(temporary)
        folder = submit(home, args.trainer)
        faults = WITH_CHECKPOINTS if args.trainer else FAULTS
        injection, problems = soak(folder, args.minutes * 60, args.fault_every_s, args.seed, faults)
        load.append(os.getloadavg()[0])
        orch(home, "cancel", "soak")
        print(orch(home, "report", "soak").partition("Speed")[0])
        report = json.loads(orch(home, "report", "soak", "--json"))
    hurt = [fault for fault in report["faults"] if not fault["planned"]]
    document = {
        "minutes": args.minutes,
        "fault_every_s": args.fault_every_s,
        "seed": args.seed,
        "workers": "the bundled trainer" if args.trainer else "stand-ins",
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} CPUs {platform.machine()}, Linux {platform.release()}",
        "load_average": [round(value, 1) for value in load],
        "injected": injection,
        "not_recovered": problems,
        "ettr": report["goodput"]["ettr"],
        "seconds": report["goodput"]["seconds"],
        "faults": len(hurt),
        "planned_changes": len(report["faults"]) - len(hurt),
        "lost_steps": sum(fault["lost_steps"] or 0 for fault in hurt),
        "steps": report["steps"]["completed"],
        "samples": report["samples"],
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
