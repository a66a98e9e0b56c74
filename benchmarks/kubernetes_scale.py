"""Time from `orch submit` until every pod of a run is bound, on 1,000 simulated nodes, beside a
bare Indexed Job.

The bare Job asks for the same devices, memory and processors, with Kueue by the same annotations,
and holds nothing else; the Job by hand has the very pods of the run, but nothing that says where
they go. Both are sent by `kubectl apply`. The three take turns on the same cluster, each from rest,
and which goes first goes round; a watch of the API server says when the Job is there and when the
last pod is bound. Clocks start when the command is started; the times of the cluster alone, from
the Job on, are told as well. Controllers and scheduler may ask the API server 500 times a second,
but in the last cases, where it is as often as they are shipped with (20 and 50, Kueue 50).
`--check` fails above 1.2 times the bare Job's time. Root, Go and etcd are needed:
tests/beds/kubernetes/bed.py.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.run.processes import identity, load_of  # noqa: E402
from tests.beds.kubernetes import addons, controllers  # noqa: E402
from tests.beds.kubernetes.bed import Bed, Shape  # noqa: E402
from tests.beds.kubernetes.building import VERSION  # noqa: E402
from tests.beds.kubernetes.runs import Orch  # noqa: E402
from tests.beds.kubernetes.simulate import LEVELS, NODES_PER_LEAF  # noqa: E402
from tests.kubernetes.test_simulated import LARGE  # noqa: E402

MOST_S = 600


@dataclass(frozen=True)
class Case:
    name: str
    cluster: str
    pods: int
    queue: str | None = None
    own_rates: bool = False
    # submitted to charts/orch-controller's controller, which runs here, too
    controlled: bool = False


CASES = (
    Case("64 GPUs, Kueue", "h100x64", 8, "large"),
    Case("64 GPUs, no queue", "h100x64", 8),
    Case("4096 GPUs, Kueue", "h100x4096", 512, "large"),
    Case("4096 GPUs, no queue", "h100x4096", 512),
    Case("64 GPUs, controller", "h100x64", 8, controlled=True),
    Case("4096 GPUs, controller", "h100x4096", 512, controlled=True),
    Case("64 GPUs, Kueue, their own rates", "h100x64", 8, "large", own_rates=True),
    Case("4096 GPUs, Kueue, their own rates", "h100x4096", 512, "large", own_rates=True),
    Case("4096 GPUs, no queue, Kubernetes' own rates", "h100x4096", 512, own_rates=True),
)


def bare_job(job: dict, name: str) -> dict:
    """The Job of a run with nothing of orch's in it but its size, its requests and what it asks of
    Kueue."""
    template = job["spec"]["template"]
    given = template["spec"]["containers"][0]
    kueue = {
        k: v for k, v in template["metadata"].get("annotations", {}).items() if "/podset-" in k
    }
    container = {"name": "agent", "image": "orch.test/none:1", "resources": given["resources"]}
    return _job(job, name, {}, kueue, {"restartPolicy": "Never", "containers": [container]})


def job_by_hand(job: dict, name: str) -> dict:
    """The same pods, written down by somebody who leaves it to the scheduler where they go."""
    template = job["spec"]["template"]
    labels = {
        key: value for key, value in template["metadata"]["labels"].items() if "orch" in key + value
    }
    notes = template["metadata"].get("annotations", {})
    annotations = {k: v for k, v in notes.items() if k != "kueue.x-k8s.io/workload"}
    given = (
        "affinity",
        "nodeSelector",
        "schedulingGates",
    )  # by orch, or by Kueue once it had admitted the run
    pod = {field: value for field, value in template["spec"].items() if field not in given}
    return _job(job, name, labels, annotations, pod)


def _job(
    job: dict, name: str, labels: dict[str, str], annotations: dict[str, str], pod: dict
) -> dict:
    queue = {k: v for k, v in job["metadata"]["labels"].items() if "kueue" in k}
    count = job["spec"]["completions"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "default", "labels": {"bare": name, **queue}},
        "spec": {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "suspend": bool(queue),
            "template": {
                "metadata": {"labels": {**labels, "bare": name}, "annotations": annotations},
                "spec": pod,
            },
        },
    }


@contextmanager
def own_rates(bed: Bed) -> Iterator[None]:
    """Kubernetes' own limits for the body alone: what a round leaves to be cleared away would fill
    the next one's."""
    settle(bed)  # slow controllers take minutes for what is left to do, at no cost that would show
    restart(bed, own_rates=True)
    try:
        yield
    finally:
        restart(bed)


def restart(bed: Bed, own_rates: bool = False) -> None:
    for name in ("kube-controller-manager", "kube-scheduler", "kueue.yaml"):
        bed.end(name)
    bed.start_controllers(own_rates)
    if bed.shape.kueue:
        addons.start_kueue(bed, own_rates)


def settle(bed: Bed) -> None:
    """Until the cluster rests: what is still to be done for the pods before counts for nobody."""
    used = processor_s(bed)
    while True:
        time.sleep(1.0)
        before = used
        used = processor_s(bed)
        if used - before < 0.2:
            return


def processor_s(bed: Bed) -> float:
    """Of all processes of the bed that there are."""
    loads = [load_of(process) for process in map(identity, bed.pids()) if process]
    return sum(load.cpu_s for load in loads if load)


def timed(
    bed: Bed, selector: str, case: Case, command: Callable[[], object]
) -> tuple[float, float, float]:
    """Seconds until the pods are bound, of these since their Job was there, and until the command
    has ended."""
    with own_rates(bed) if case.own_rates else nullcontext():
        settle(bed)
        return _timed(bed, selector, case.pods, command)


def _timed(
    bed: Bed, selector: str, count: int, command: Callable[[], object]
) -> tuple[float, float, float]:
    argv = [
        *bed.enter,
        "timeout",
        str(MOST_S),
        sys.executable,
        "-m",
        "tests.beds.kubernetes.bound",
        selector,
        str(count),
    ]
    env = {**bed.env, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, env=env, cwd=bed.home
    ) as watcher:
        if watcher.stdout.readline().strip() != "watching":
            raise SystemExit("no watch of the pods")
        started = time.monotonic()
        try:
            command()
        except BaseException:
            watcher.kill()  # else it waits for pods that nobody makes
            raise
        ended = time.monotonic()
        seen = next((line for line in watcher.stdout if line.strip() != "watching"), None)
        if seen is None:
            raise SystemExit(f"{selector}: not {count} pods bound within {MOST_S} s")
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


def by_orch(orch: Orch, case: Case, name: str) -> tuple[dict, dict[str, float]]:
    """The Job that was made, and seconds. The run is gone afterwards."""
    options = {"controller": "always" if case.controlled else "never"}
    bed = orch.bed
    submission = orch.submission(options | ({"queue": case.queue} if case.queue else {}))
    if case.cluster == "h100x4096":
        folder = Path(submission[submission.index("--config-dir") + 1], "cluster")
        folder.mkdir()
        (folder / "h100x4096.yaml").write_text(LARGE)
    env = {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(orch.home / "compiled"),
    }  # as where it is installed
    words = (*submission, f"+cluster={case.cluster}", "parallel=tp8_pp4_zero1", "--run-id", name)
    command = lambda: orch.alone(*words, timeout=1800, env=env)  # noqa: E731
    bound, cluster, sent = timed(bed, f"orch.dev/run={name}", case, command)
    job = bed.get("job", name)
    pods = orch.pods(name)
    if case.controlled:
        bed.kubectl("delete", "trainrun", name, "--wait=false", timeout=600)
    remove(bed, name, f"orch.dev/run={name}")
    split = (
        {"split_slices": split_slices(pods)} if case.queue else {}
    )  # without it ranks go where their pods came
    return job, {"orch_s": bound, "orch_since_job_s": cluster, "orch_command_s": sent} | split


def by_kubectl(bed: Bed, what: str, job: dict, case: Case) -> dict[str, float]:
    name = job["metadata"]["name"]
    body = json.dumps(job)
    command = lambda: bed.kubectl("apply", "--server-side", "-f", "-", input=body, timeout=1800)  # noqa: E731
    bound, cluster, sent = timed(bed, f"bare={name}", case, command)
    remove(bed, name, f"bare={name}")
    return {f"{what}_job_s": bound, f"{what}_since_job_s": cluster, f"{what}_kubectl_s": sent}


def measure(orch: Orch, case: Case, repeats: int, name: str) -> list[dict]:
    """One sample a repetition, after one that is not counted: it fills caches, and shows what Job
    to copy."""
    job, _ = by_orch(orch, case, f"{name}-warm")
    ways: list[Callable[[str], dict[str, float]]] = [
        lambda n: by_orch(orch, case, f"{name}-{n}")[1],
        lambda n: by_kubectl(orch.bed, "bare", bare_job(job, f"bare-{name}-{n}"), case),
        lambda n: by_kubectl(orch.bed, "hand", job_by_hand(job, f"hand-{name}-{n}"), case),
    ]
    for way in ways[1:]:
        way("warm")
    samples = []
    for n in range(repeats):
        first = n % len(ways)
        taken = [way(str(n)) for way in (*ways[first:], *ways[:first])]
        samples.append({key: value for one in taken for key, value in one.items()})
        print(name, {key: round(value, 2) for key, value in samples[-1].items()}, flush=True)
    return samples


def remove(bed: Bed, job: str, pods: str) -> None:
    bed.kubectl("delete", "job", job, "--wait=false", "--ignore-not-found", timeout=600)
    bed.kubectl(
        "delete", "pods", "-l", pods, "--grace-period=0", "--force", "--wait=false", timeout=600
    )
    wait_gone(bed, pods)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--only",
        default="",
        help="only the cases with this in their name; the others' results stay",
    )
    parser.add_argument(
        "--without-kueue", action="store_true", help="only the cases that need no queue"
    )
    parser.add_argument(
        "--most", type=int, default=512, help="only the cases of at most that many nodes"
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    cases = [
        case for case in CASES if case.pods <= args.most and not (args.without_kueue and case.queue)
    ]
    cases = [case for case in cases if args.only in case.name]
    rows: dict[str, dict[str, Any]] = {}
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with (
        tempfile.TemporaryDirectory() as home,
        Bed(Shape(simulated=1000, kueue=not args.without_kueue)) as bed,
    ):
        quota = {"cpu": "128k", "memory": "2000Ti", "nvidia.com/gpu": "8000"}
        labels = (LEVELS["spine"], LEVELS["leaf"], "kubernetes.io/hostname")
        if not args.without_kueue:
            addons.queues(bed, quota, labels, {"orch.test/kind": "simulated"}, "large")
        orch = Orch(bed, Path(home), "default", {"image": "orch.test/none:1", "levels": LEVELS})
        controllers.install(bed)
        for index, case in enumerate(cases):
            with (
                controllers.controller(bed, f"controller-{index}", 60.0)
                if case.controlled
                else nullcontext()
            ):
                samples = measure(orch, case, args.repeats, f"c{index}")
            row = {
                name: statistics.median(sample[name] for sample in samples) for name in samples[0]
            }
            row |= {"ratio": row["orch_s"] / row["bare_job_s"], "pods": case.pods}
            row |= {"ratio_since_job": row["orch_since_job_s"] / row["bare_since_job_s"]}
            row |= {"ratio_by_hand": row["orch_s"] / row["hand_job_s"]}
            row |= {"ratio_by_hand_since_job": row["orch_since_job_s"] / row["hand_since_job_s"]}
            rows[case.name] = {name: round(value, 2) for name, value in row.items()}
            keys = ("orch_s", "bare_job_s", "hand_job_s")
            rows[case.name]["samples"] = [
                [round(sample[key], 2) for key in keys] for sample in samples
            ]
            print(case.name, rows[case.name], flush=True)
            rows[case.name] |= {"repeats": args.repeats, "commit": commit}
            write(rows)
    return int(args.check and max(row["ratio"] for row in rows.values()) > 1.2)


def write(rows: dict[str, dict[str, Any]]) -> None:
    """Into the file of results, in place of what it says of these cases."""
    out = ROOT / "benchmarks" / "results" / "kubernetes_scale.json"
    known = json.loads(out.read_text())["rows"] if out.exists() else {}
    result = {
        "nodes": 1000,
        "kubernetes": VERSION,
        "rows": {case.name: row for case in CASES if (row := (known | rows).get(case.name))},
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average_after": [round(value, 1) for value in os.getloadavg()],
    }
    out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
