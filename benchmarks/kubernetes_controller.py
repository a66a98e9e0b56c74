"""How quickly the controller looks after 500 TrainRuns on 1,000 simulated nodes, and what memory it
takes.

All are asked for at once, eight nodes each: 125 of them fit. Their pods end some seconds after they
have begun, so that every run is placed in the end and then over. Told: quantiles of one look at one
run, of the wait from a change until that look, and of one decision (of the controller's own
histograms, so upper bounds of their buckets), the controller's largest resident memory and
processor time, and how long it took until all were done. With `--restart` it is killed in the
middle, and another one goes on. Root, Go and etcd are needed: tests/beds/kubernetes/bed.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.backends.kubernetes.train_run import Spec, body_of, planned  # noqa: E402
from tests.beds.kubernetes import controllers  # noqa: E402
from tests.beds.kubernetes.bed import Bed, Shape  # noqa: E402
from tests.beds.kubernetes.controllers import Replica  # noqa: E402
from tests.beds.kubernetes.simulate import FINISHES, LEVELS  # noqa: E402
from tests.kubernetes.test_render import request_of  # noqa: E402

SPACES = [f"team-{index}" for index in range(4)]
OPTIONS = {"image": "orch.test/none:1", "levels": LEVELS, "annotations": {FINISHES: "yes"}}


def bodies(count: int) -> list[dict]:
    """Every one with the same plan, made once: planning is measured elsewhere."""
    bundle, plan = request_of(["cluster=h100x64", "model=llama3_8b"], "scale-1")
    what = planned(bundle, [plan])
    return [
        body_of(
            f"r{index:04}", SPACES[index % len(SPACES)], Spec(planned=what, options=OPTIONS), {}, {}
        )
        for index in range(count)
    ]


def series(bed: Bed, replica: Replica) -> str:
    """Its metrics page, as it is read inside the bed."""
    read = f"print(u.urlopen('http://127.0.0.1:{replica.port}/metrics').read().decode())"
    argv = [sys.executable, "-c", f"import urllib.request as u; {read}"]
    return bed.run(*argv, timeout=120).stdout


def _apply(bed: Bed, found: list[dict]) -> None:
    """On a busy machine kubectl may take longer than its time."""
    for _ in range(5):
        try:
            return bed.apply(*found)
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError("the API server does not take them")


def cpu_s(pid: int) -> float:
    """Processor seconds of the process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def quantile(page: str, name: str, q: float) -> float:
    """The upper bound of the bucket that holds it."""
    buckets = []
    for line in page.splitlines():
        if line.startswith(f"{name}_bucket"):
            bound = line.partition('le="')[2].partition('"')[0]
            buckets.append((float(bound.replace("+Inf", "inf")), float(line.rpartition(" ")[2])))
    total = buckets[-1][1]
    return next(bound for bound, count in buckets if count >= q * total) if total else 0.0


def largest_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def measure(bed: Bed, count: int, restart: bool) -> dict:
    replica = Replica(bed, "scale", 15.0)
    bed.wait(lambda: replica.leads, 120, "a leader", "scale")
    for space in SPACES:
        bed.kubectl("create", "namespace", space, check=False)
    sent = bodies(count)
    began = time.monotonic()
    for at in range(0, count, 10):
        _apply(bed, sent[at : at + 10])
    sent_s = time.monotonic() - began
    pages = []
    memory = 0.0

    def states() -> dict[str, int]:
        text = bed.kubectl(
            "get", "trainruns", "-A", "-o", "jsonpath={.items[*].status.state}", timeout=300
        ).split()
        return {state: text.count(state) for state in set(text)}

    killed = not restart
    while (found := states()).get("done", 0) < count:
        memory = max(memory, largest_mib(replica.find()))
        if not killed and found.get("done", 0) > count // 4:
            pages.append(series(bed, replica))
            replica.kill()
            replica = Replica(bed, "scale-again", 15.0)
            killed = True
        if time.monotonic() - began > 3000:
            raise RuntimeError(f"not done: {found}")
        time.sleep(5.0)
    whole_s = time.monotonic() - began
    page = series(bed, replica)
    memory = max(memory, largest_mib(replica.find()))
    busy_s = cpu_s(replica.find())
    replica.end()
    names = ("orch_reconcile_seconds", "orch_reconcile_wait_seconds", "orch_decide_seconds")
    return {
        "runs": count,
        "restarted": restart,
        "sent_s": round(sent_s, 1),
        "all_done_s": round(whole_s, 1),
        "memory_mib": round(memory),
        "processor_s": round(busy_s, 1),
        **{
            f"{name}_p{int(q * 100)}": quantile(page, name, q)
            for name in names
            for q in (0.5, 0.95, 0.99)
        },
        "looks": int(float(page.partition("\norch_reconcile_seconds_count ")[2].split()[0])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--restart", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "kubernetes_controller.json"
    )
    args = parser.parse_args()
    with Bed(Shape(simulated=args.nodes)) as bed:
        controllers.install(bed)
        found = measure(bed, args.runs, args.restart)
    found |= {
        "nodes": args.nodes,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "load": os.getloadavg()[1],
    }
    print(json.dumps(found, indent=1))
    args.out.write_text(msgspec.json.format(json.dumps(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
