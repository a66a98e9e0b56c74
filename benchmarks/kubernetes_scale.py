"""Time from `orch submit` until every pod of a run is bound, on 1,000 simulated nodes, beside a bare Indexed Job.

The bare Job is what a user would write by hand for the same pods: the same requests, with Kueue the same annotations.
`--check` fails above 1.2 times its time. Root, Go and etcd are needed: tests/kubernetes/bed.py.
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
sys.path.insert(0, str(ROOT))

from tests.kubernetes import addons  # noqa: E402
from tests.kubernetes.bed import Bed, Shape  # noqa: E402
from tests.kubernetes.runs import Orch, Run  # noqa: E402
from tests.kubernetes.simulate import LEVELS, NODES_PER_LEAF  # noqa: E402
from tests.kubernetes.test_simulated import LARGE  # noqa: E402


def bare_job(job: dict, name: str) -> dict:
    """The Job of a run with nothing of orch's in it but its size, its requests and what it asks of Kueue."""
    template = job["spec"]["template"]
    given = template["spec"]["containers"][0]
    kueue = {k: v for k, v in template["metadata"].get("annotations", {}).items() if "/podset-" in k}
    labels = {k: v for k, v in job["metadata"]["labels"].items() if "kueue" in k}
    container = {"name": "agent", "image": "orch.test/none:1", "resources": given["resources"]}
    count = job["spec"]["completions"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "suspend": bool(labels),
            "template": {
                "metadata": {"labels": {"bare": name}, "annotations": kueue},
                "spec": {"restartPolicy": "Never", "containers": [container]},
            },
        },
    }


def wait_bound(bed: Bed, selector: str, count: int) -> None:
    columns = "jsonpath={range .items[*]}{.spec.nodeName}{'\\n'}{end}"
    while True:
        nodes = bed.kubectl("get", "pods", "-l", selector, "-o", columns, timeout=120).split()
        if len(nodes) == count:
            return
        time.sleep(0.5)


def wait_gone(bed: Bed, selector: str) -> None:
    while bed.kubectl("get", "pods", "-l", selector, "-o", "name", timeout=120):
        time.sleep(0.5)


def split_slices(pods: list[dict]) -> int:
    """Of every four neighbouring completion indices, how often not all lie under one leaf."""
    nodes = [pod["spec"]["nodeName"] for pod in pods]
    leaves = [int(node.removeprefix("sim-")) // NODES_PER_LEAF for node in nodes]
    return sum(len(set(leaves[start : start + 4])) > 1 for start in range(0, len(leaves), 4))


def once(orch: Orch, words: list[str], count: int, queue: str | None, name: str) -> dict[str, float]:
    """Seconds of orch from its command to all bound, of those until the Job was sent, and of the bare Job."""
    bed = orch.bed
    submission = orch.submission({"queue": queue} if queue else {})
    if words[0].endswith("h100x4096"):
        folder = Path(submission[submission.index("--config-dir") + 1], "cluster")
        folder.mkdir()
        (folder / "h100x4096.yaml").write_text(LARGE)
    started = time.monotonic()
    done = orch(*submission, *words, f"run.name={name}", timeout=600)
    sent = time.monotonic() - started
    run = Run(orch, json.loads(done.stdout)["run_dir"])
    wait_bound(bed, f"orch.dev/run={run.id}", count)
    ours = time.monotonic() - started
    job, split = bed.get("job", run.id), split_slices(orch.pods(run.id))
    remove(bed, run.id, f"orch.dev/run={run.id}")
    body = json.dumps(bare_job(job, f"bare-{name}"))
    started = time.monotonic()
    bed.kubectl("apply", "--server-side", "-f", "-", input=body)
    wait_bound(bed, f"bare=bare-{name}", count)
    bare = time.monotonic() - started
    remove(bed, f"bare-{name}", f"bare=bare-{name}")
    return {"orch_s": ours, "of_it_command_s": sent, "bare_job_s": bare, "split_slices": split}


def remove(bed: Bed, job: str, pods: str) -> None:
    bed.kubectl("delete", "job", job, "--wait=false")
    bed.kubectl("delete", "pods", "-l", pods, "--grace-period=0", "--force", "--wait=false", timeout=300)
    wait_gone(bed, pods)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-kueue", action="store_true", help="only the cases that need no queue")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    cases = {
        "64 GPUs, Kueue": (["+cluster=h100x64"], 8, "large"),
        "4096 GPUs, Kueue": (["+cluster=h100x4096"], 512, "large"),
        "64 GPUs, no queue": (["+cluster=h100x64"], 8, None),
        "4096 GPUs, no queue": (["+cluster=h100x4096"], 512, None),
    }
    if args.without_kueue:
        cases = {case: what for case, what in cases.items() if what[2] is None}
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as home, Bed(Shape(simulated=1000, kueue=not args.without_kueue)) as bed:
        quota = {"cpu": "128k", "memory": "2000Ti", "nvidia.com/gpu": "8000"}
        labels = (LEVELS["spine"], LEVELS["leaf"], "kubernetes.io/hostname")
        if not args.without_kueue:
            addons.queues(bed, quota, labels, {"orch.test/kind": "simulated"}, "large")
        orch = Orch(bed, Path(home), "default", {"image": "orch.test/none:1", "levels": LEVELS})
        for index, (case, (words, count, queue)) in enumerate(cases.items()):
            runs = [
                once(orch, [*words, "parallel=tp8_pp4_zero1"], count, queue, f"c{index}-{n}")
                for n in range(args.repeats)
            ]
            row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            row |= {"ratio": row["orch_s"] / row["bare_job_s"], "pods": count}
            row["ratio_after_sending"] = (row["orch_s"] - row["of_it_command_s"]) / row["bare_job_s"]
            rows[case] = {name: round(value, 2) for name, value in row.items()}
            print(case, rows[case], flush=True)
            write(rows, args.repeats)
    return int(args.check and max(row["ratio"] for row in rows.values()) > 1.2)


def write(rows: dict[str, dict[str, float]], repeats: int) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    result = {
        "nodes": 1000,
        "repeats": repeats,
        "rows": rows,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_after": [round(value, 1) for value in os.getloadavg()],
        "commit": commit.strip(),
    }
    out = ROOT / "benchmarks" / "results" / "kubernetes_scale.json"
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
