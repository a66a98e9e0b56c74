"""The same job with tensor parallelism inside nodes and across them, predicted and measured, on
shaped links.

`cluster=local_shaped` gives every simulated node a network namespace and one link of a given rate.
`orch bench` measures links and cores; then both placements are planned and trained. `--check` fails
unless the planner's own order is the faster one in fact, and predicted communication is within 25 %
of what the workers measured. Root and iproute2 needed. It takes the cores for itself where it
computes (real-time priority) for about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORCH = [sys.executable, "-m", "orchestrator.cli.main"]
CLUSTER = ["cluster=local_shaped", "cluster.gpus_per_node=2"]
JOB = ["train.global_batch_samples=16", "checkpoint=end_only"]
AXES = ("tp", "dp")
PLACEMENTS = {
    "inside": [],  # what the planner chooses
    "across": ["parallel.order=[dp,cp,ep,pp,tp]", "parallel.allow_tp_across_nvlink=true"],
}
WITHIN = 0.25
WARM_UP = 2  # steps


def orch(*words: str) -> str:
    done = subprocess.run([*ORCH, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"orch {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def measured(run_dir: Path) -> dict:
    """Medians over steps of the mean over ranks, seconds: the step, and what each axis'
    communication stood in the way of computing, as the workers book it."""
    lines = [
        json.loads(line) for path in sorted(run_dir.glob("metrics/*.jsonl")) for line in path.open()
    ]
    lines = [line for line in lines if line["kind"] == "step" and line["step"] > WARM_UP]

    def median(of) -> float:
        steps = {line["step"] for line in lines}
        return statistics.median(
            statistics.fmean(of(x) for x in lines if x["step"] == step) for step in steps
        )

    by_axis = {
        axis: median(lambda line, axis=axis: line.get("comm_s", {}).get(axis, 0.0)) for axis in AXES
    }
    return {
        "step_s": median(lambda line: line["step_s"]),
        "comm_s": sum(by_axis.values()),
        "comm_s_by_axis": by_axis,
    }


def once(name: str, words: list[str], steps: int) -> dict:
    plan = json.loads(orch("plan", "--json", *words))
    sent = json.loads(
        orch("submit", "--json", "--in-place", f"train.steps={WARM_UP + steps}", *words)
    )
    state = {"state": "pending"}
    while state["state"] not in ("done", "failed", "cancelled", "stopped"):
        time.sleep(1.0)
        state = json.loads(orch("status", "--json", sent["run_id"]))
        state = state.get("state") if isinstance(state.get("state"), dict) else state
    if state["state"] != "done":
        raise SystemExit(f"{name}: {state}")
    predicted = {axis: s for axis, s in plan["time"]["exposed_comm_s"].items() if s}
    return {
        "placement": name,
        "order": plan["parallel"]["order"],
        "tp_within": plan["placement"]["tp"]["worst_level"],
        "predicted": {
            "step_s": plan["time"]["step_s"],
            "comm_s": sum(predicted.values()),
            "comm_s_by_axis": predicted,
        },
        "measured": measured(Path(sent["run_dir"])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="timed ones")
    parser.add_argument("--gbit", type=float, default=0.03, help="rate of a node's link")
    parser.add_argument("--parallel", default="tp2_dp2_sp0", help="with tp2 on four processes")
    parser.add_argument(
        "--share", action="store_true", help="no real-time priority: other work takes part"
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "placement_felt.json"
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if (
        not args.share
    ):  # else what is measured is how long the ranks wait for the cores of a busy machine
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    loads = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="orch-placement-") as home:
        os.environ["ORCH_HOME"] = home
        os.chdir(home)
        cluster = [*CLUSTER, f"cluster.nic.gbit_per_s={args.gbit}"]
        job = [f"parallel={args.parallel}", *JOB]
        bench = json.loads(orch("bench", "--json", *cluster))
        rows = []
        for name, words in PLACEMENTS.items():
            rows.append(once(name, [*cluster, *job, *words], args.steps))
            loads.append(os.getloadavg()[0])
            print(json.dumps(rows[-1]), flush=True)
    inside, across = rows
    for row in rows:
        row["comm_error"] = row["predicted"]["comm_s"] / row["measured"]["comm_s"] - 1
        row["step_error"] = row["predicted"]["step_s"] / row["measured"]["step_s"] - 1
        p = row["predicted"]
        m = row["measured"]
        print(
            f"TP {row['placement']:<7} step {p['step_s']:.3f} s predicted, {m['step_s']:.3f} s"
            f" measured; communication {p['comm_s']:.3f} s predicted, {m['comm_s']:.3f} s measured"
            f" ({row['comm_error']:+.0%})"
        )
    gain = across["measured"]["step_s"] / inside["measured"]["step_s"]
    foreseen = across["predicted"]["step_s"] / inside["predicted"]["step_s"]
    print(f"TP inside nodes is {gain:.2f} times as fast ({foreseen:.2f} predicted)")
    page = {
        "machine": f"{os.cpu_count()} CPUs {platform.machine()}, Linux {platform.release()}",
        "commit": (
            subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
            ).stdout.strip()
        ),
        "scheduling": "shared" if args.share else "first in, first out, real-time priority 1",
        "load": [round(load, 1) for load in loads],
        "cluster": cluster,
        "job": job,
        "steps": args.steps,
        "links": bench["links"],
        "rows": rows,
        "times_as_fast": {"measured": gain, "predicted": foreseen},
    }
    args.out.write_text(json.dumps(page, indent=1) + "\n")
    good = gain > 1 and foreseen > 1 and all(abs(row["comm_error"]) <= WITHIN for row in rows)
    return int(args.check and not good)


if __name__ == "__main__":
    sys.exit(main())
