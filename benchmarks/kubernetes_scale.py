"""Time from `orch submit` until every pod of a run is bound, on 1,000 simulated nodes, beside a bare Indexed Job.

The bare Job is what a user would write by hand for the same pods, sent by `kubectl apply`: the same requests, with
Kueue the same annotations. Both take turns on the same cluster, each from rest, and which goes first alternates; a
watch of the API server says when the Job is there and when the last pod is bound. Clocks start when the command is
started; the times of the cluster alone, from the Job on, are told as well. `--check` fails above 1.2 times the bare
Job's time. Root, Go and etcd are needed: tests/kubernetes/bed.py.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.launch.processes import identity, load_of  # noqa: E402
from tests.kubernetes import addons  # noqa: E402
from tests.kubernetes.bed import Bed, Shape  # noqa: E402
from tests.kubernetes.building import VERSION  # noqa: E402
from tests.kubernetes.runs import Orch  # noqa: E402
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
        "metadata": {"name": name, "namespace": "default", "labels": {"bare": name, **labels}},
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


def settle(bed: Bed) -> None:
    """Until the cluster rests: what is still to be done for the pods before counts for nobody."""
    used = processor_s(bed)
    while True:
        time.sleep(1.0)
        before, used = used, processor_s(bed)
        if used - before < 0.2:
            return


def processor_s(bed: Bed) -> float:
    """Of all processes of the bed that there are."""
    loads = [load_of(process) for process in map(identity, bed.pids()) if process]
    return sum(load.cpu_s for load in loads if load)


def timed(bed: Bed, selector: str, count: int, command: Callable[[], object]) -> tuple[float, float, float]:
    """Seconds until `count` pods are bound, of these since their Job was there, and until the command has ended."""
    settle(bed)
    argv = [*bed.enter, sys.executable, "-m", "tests.kubernetes.bound", selector, str(count)]
    env = {**bed.env, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env, cwd=bed.home) as watcher:
        if watcher.stdout.readline().strip() != "watching":
            raise SystemExit("no watch of the pods")
        started = time.monotonic()
        command()
        ended = time.monotonic()
        seen = next(line for line in watcher.stdout if line.strip() != "watching")
        job, bound = map(float, seen.split())
        return bound - started, bound - job, ended - started  # one clock for all processes


def wait_gone(bed: Bed, selector: str) -> None:
    while bed.kubectl("get", "pods", "-l", selector, "-o", "name", timeout=600):
        time.sleep(0.5)


def split_slices(pods: list[dict]) -> int:
    """Of every four neighbouring completion indices, how often not all lie under one leaf."""
    nodes = [pod["spec"]["nodeName"] for pod in pods]
    leaves = [int(node.removeprefix("sim-")) // NODES_PER_LEAF for node in nodes]
    return sum(len(set(leaves[start : start + 4])) > 1 for start in range(0, len(leaves), 4))


def by_orch(orch: Orch, words: list[str], count: int, queue: str | None, name: str) -> tuple[dict, dict[str, float]]:
    """The Job that was made, and seconds. The run is gone afterwards."""
    bed, submission = orch.bed, orch.submission({"queue": queue} if queue else {})
    if words[0].endswith("h100x4096"):
        folder = Path(submission[submission.index("--config-dir") + 1], "cluster")
        folder.mkdir()
        (folder / "h100x4096.yaml").write_text(LARGE)
    env = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(orch.home / "compiled"),
    }  # as where it is installed
    command = lambda: orch(*submission, *words, "--run-id", name, timeout=1800, env=env)  # noqa: E731
    bound, cluster, sent = timed(bed, f"orch.dev/run={name}", count, command)
    job, pods = bed.get("job", name), orch.pods(name)
    remove(bed, name, f"orch.dev/run={name}")
    split = {"split_slices": split_slices(pods)} if queue else {}  # without it ranks go where their pods came
    return job, {"orch_s": bound, "orch_since_job_s": cluster, "orch_command_s": sent} | split


def by_kubectl(bed: Bed, job: dict, name: str, count: int) -> dict[str, float]:
    body = json.dumps(bare_job(job, name))
    command = lambda: bed.kubectl("apply", "--server-side", "-f", "-", input=body, timeout=1800)  # noqa: E731
    bound, cluster, sent = timed(bed, f"bare={name}", count, command)
    remove(bed, name, f"bare={name}")
    return {"bare_job_s": bound, "bare_since_job_s": cluster, "kubectl_s": sent}


def measure(orch: Orch, words: list[str], count: int, queue: str | None, repeats: int, name: str) -> list[dict]:
    """One sample a repetition, after one that is not counted: it fills caches, and shows what Job to copy."""
    job, _ = by_orch(orch, words, count, queue, f"{name}-warm")
    by_kubectl(orch.bed, job, f"bare-{name}-warm", count)
    samples = []
    for n in range(repeats):
        if n % 2:
            bare = by_kubectl(orch.bed, job, f"bare-{name}-{n}", count)
            samples.append(by_orch(orch, words, count, queue, f"{name}-{n}")[1] | bare)
        else:
            ours = by_orch(orch, words, count, queue, f"{name}-{n}")[1]
            samples.append(ours | by_kubectl(orch.bed, job, f"bare-{name}-{n}", count))
        print(name, {key: round(value, 2) for key, value in samples[-1].items()}, flush=True)
    return samples


def remove(bed: Bed, job: str, pods: str) -> None:
    bed.kubectl("delete", "job", job, "--wait=false", timeout=600)
    bed.kubectl("delete", "pods", "-l", pods, "--grace-period=0", "--force", "--wait=false", timeout=600)
    wait_gone(bed, pods)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--without-kueue", action="store_true", help="only the cases that need no queue")
    parser.add_argument("--most", type=int, default=512, help="only the cases of at most that many nodes")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    cases = {
        "64 GPUs, Kueue": (["+cluster=h100x64"], 8, "large"),
        "64 GPUs, no queue": (["+cluster=h100x64"], 8, None),
        "4096 GPUs, Kueue": (["+cluster=h100x4096"], 512, "large"),
        "4096 GPUs, no queue": (["+cluster=h100x4096"], 512, None),
    }
    if args.without_kueue:
        cases = {case: what for case, what in cases.items() if what[2] is None}
    cases = {case: what for case, what in cases.items() if what[1] <= args.most}
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as home, Bed(Shape(simulated=1000, kueue=not args.without_kueue)) as bed:
        quota = {"cpu": "128k", "memory": "2000Ti", "nvidia.com/gpu": "8000"}
        labels = (LEVELS["spine"], LEVELS["leaf"], "kubernetes.io/hostname")
        if not args.without_kueue:
            addons.queues(bed, quota, labels, {"orch.test/kind": "simulated"}, "large")
        orch = Orch(bed, Path(home), "default", {"image": "orch.test/none:1", "levels": LEVELS})
        for index, (case, (words, count, queue)) in enumerate(cases.items()):
            samples = measure(orch, [*words, "parallel=tp8_pp4_zero1"], count, queue, args.repeats, f"c{index}")
            row = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
            row |= {"ratio": row["orch_s"] / row["bare_job_s"], "pods": count}
            row |= {"ratio_since_job": row["orch_since_job_s"] / row["bare_since_job_s"]}
            rows[case] = {name: round(value, 2) for name, value in row.items()}
            rows[case]["samples"] = [[round(sample[key], 2) for key in ("orch_s", "bare_job_s")] for sample in samples]
            print(case, rows[case], flush=True)
            write(rows, args.repeats)
    return int(args.check and max(row["ratio"] for row in rows.values()) > 1.2)


def write(rows: dict[str, dict[str, Any]], repeats: int) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    result = {
        "nodes": 1000,
        "kubernetes": VERSION,
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
