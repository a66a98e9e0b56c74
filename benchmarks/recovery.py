"""Faults in elastic runs, one a trial: does the run go on, how soon is it noticed, how soon do
steps go on?

    python benchmarks/recovery.py [--trials 3] [--faults kill_agent,stop_coordinator] [--trainer]

Three simulated nodes of one rank each on this machine, real agents and workers. The workers are
stand-ins that step every 0.1 s and save when told (tests/beds/worker.py), so the figures are those
of the machinery: what a node loss costs besides the program's own start; --trainer runs the bundled
one. A trial succeeds when workers of a later epoch step beyond where the run had been, and the run
then ends well when it is cancelled. Prints a table and writes benchmarks/results/recovery.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests" / "beds" / "worker.py"
HEARTBEAT_TIMEOUT_S = 3.0
LIMIT_S = 120.0
#: what is hit, which of them, with which signal
FAULTS = {
    "kill_worker": ("worker", "other", signal.SIGKILL),
    "stop_worker": ("worker", "other", signal.SIGSTOP),
    "kill_agent": ("agent", "other", signal.SIGKILL),
    "stop_agent": ("agent", "other", signal.SIGSTOP),
    "drain_node": ("agent", "other", signal.SIGTERM),
    "kill_coordinator": ("agent", "coordinator", signal.SIGKILL),
    "stop_coordinator": ("agent", "coordinator", signal.SIGSTOP),
    "drain_coordinator": ("agent", "coordinator", signal.SIGTERM),
}
NOTICED = ("node_lost", "coordinator_lost", "worker_ended", "fault_detected", "notice")


class Trial:
    def __init__(self, home: Path, run_id: str, trainer: bool):
        self.folder = home / "runs" / run_id
        self.environment = os.environ | {"ORCH_HOME": str(home)}
        wishes = {"ORCH_TEST_STEPS": "100000", "ORCH_TEST_STEP_S": "0.1", "ORCH_TEST_SAVE": "1"}
        self.environment |= wishes
        names = [word for name in wishes for word in ("--env", name)]
        size = [
            "cluster=local_nodes",
            "nodes=1..3",
            "cluster.nodes=3",
            "cluster.gpus_per_node=1",
            "train.global_batch_samples=6",
        ]
        backend = [f"backend.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}", "backend.max_restarts=3"]
        train = ["train.steps=100000", "train.seq_len=64", "checkpoint.every_steps=5"]
        command = [] if trainer else ["--in-place", *names, "--", sys.executable, str(WORKER)]
        self.orch("submit", *size, *backend, *train, "--run-id", run_id, *command)

    def orch(self, *words: str) -> None:
        argv = [sys.executable, "-m", "orchestrator.cli.main", *words]
        done = subprocess.run(argv, env=self.environment, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"orch {words[0]}: {done.stderr.strip()}")

    def lines(self, part: str) -> list[dict]:
        found = []
        for path in (self.folder / part).glob("*.jsonl"):
            for line in path.read_bytes().splitlines():
                try:
                    found.append(json.loads(line))
                except ValueError:  # being written
                    continue
        return found

    @property
    def state(self) -> dict:
        return json.loads((self.folder / "state.json").read_bytes())

    def wait(self, condition, what: str):
        end = time.monotonic() + LIMIT_S
        while not (value := condition()):
            if time.monotonic() > end or self.state["exit_code"] is not None:
                raise TimeoutError(f"{what}: run is {self.state['state']}: {self.state['reason']}")
            time.sleep(0.05)
        return value

    def hit(self, fault: str) -> tuple[float, int]:
        """(when, epoch that was hit)"""
        what, which, signum = FAULTS[fault]
        state = self.state
        others = sorted(
            node for node, one in state["nodes"].items() if one["ranks"] and node != state["writer"]
        )
        node = state["writer"] if which == "coordinator" else others[-1]
        pid = json.loads((self.folder / "backend.json").read_bytes())["agents"][node]
        if what == "worker":
            pid = self.worker(pid)
        now = time.time()
        os.kill(pid, signum)
        return now, state["epoch"]

    @staticmethod
    def worker(agent: int) -> int:
        """The one worker below an agent: the worker supervisor's child that is not the fork
        server."""

        def children(pid: int) -> list[int]:
            return [
                int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            ]

        supervisor = children(agent)[0]
        fork_server = "orchestrator.agent.node.fork_server"
        found = [
            pid
            for pid in children(supervisor)
            if fork_server not in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        forked = [
            pid
            for pid in children(supervisor)
            if Path(f"/proc/{pid}/comm").read_text().startswith("orch-rank-")
        ]
        return (forked or found)[0]

    def run(self, fault: str) -> dict:
        self.wait(
            lambda: self.state["state"] == "running" and len(self.lines("metrics")) > 9,
            "first steps",
        )
        at, epoch = self.hit(fault)
        before = max(line["step"] for line in self.lines("metrics"))

        def further() -> list[float]:
            later = [
                line
                for line in self.lines("metrics")
                if line["epoch"] > epoch and line["step"] > before
            ]
            return [line["at"] for line in later]

        self.wait(further, "steps after the fault")
        again = [line["at"] for line in self.lines("metrics") if line["epoch"] > epoch]
        noticed = [e["at"] for e in self.lines("events") if e["name"] in NOTICED and e["at"] >= at]
        time.sleep(0.5)
        if self.state["exit_code"] is not None:
            raise RuntimeError(f"the run ended: {self.state['reason']}")
        return {"noticed_s": min(noticed) - at, "stepping_s": min(again) - at}

    def end(self, run_id: str) -> None:
        self.orch("cancel", run_id)
        end = time.monotonic() + LIMIT_S
        while self.state["exit_code"] is None:
            if time.monotonic() > end:
                raise TimeoutError("cancel")
            time.sleep(0.05)
        if self.state["state"] != "cancelled":
            raise RuntimeError(f"cancelled, it is {self.state['state']}: {self.state['reason']}")


def measure(fault: str, trials: int, home: Path, trainer: bool) -> dict:
    good = []
    failures = []
    for index in range(trials):
        run_id = f"{fault.replace('_', '-')}-{index}"
        try:
            trial = Trial(home, run_id, trainer)
            found = trial.run(fault)
            trial.end(run_id)
            good.append(found)
        except (TimeoutError, RuntimeError, OSError) as error:
            failures.append(f"{run_id}: {error}")
            print(f"  failed: {failures[-1]}", file=sys.stderr)
            subprocess.run(
                [sys.executable, "-m", "orchestrator.cli.main", "cancel", "--force", run_id],
                env=os.environ | {"ORCH_HOME": str(home)},
                cwd=ROOT,
                capture_output=True,
            )
    row = {"trials": trials, "recovered": len(good), "failures": failures}
    for name in ("noticed_s", "stepping_s"):
        values = sorted(one[name] for one in good)
        if values:
            row[name] = {"p50": round(statistics.median(values), 2), "max": round(values[-1], 2)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--trainer", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "recovery.json"
    )
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    rows = {}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(prefix="orch-recovery-") as home:
        for fault in args.faults.split(","):
            row = rows[fault] = measure(fault, args.trials, Path(home), args.trainer)
            load.append(os.getloadavg()[0])
            seen = row.get("noticed_s", {})
            again = row.get("stepping_s", {})
            times = [
                f"{what} {t.get('p50')} s (max {t.get('max')})"
                for what, t in (("noticed", seen), ("steps", again))
            ]
            print(f"{fault:18} {row['recovered']} of {args.trials}  {', '.join(times)}", flush=True)
    document = {
        "workers": "the bundled trainer" if args.trainer else "stand-ins",
        "nodes": 3,
        "commit": commit,
        "machine": f"{os.cpu_count()} CPUs {platform.machine()}, Linux {platform.release()}",
        "load_average": {"least": round(min(load), 1), "most": round(max(load), 1)},
        "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
        "faults": rows,
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
