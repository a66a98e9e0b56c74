"""Wall time and memory of seating a job on a fragmented three-level fat tree, from 64 to 100,000
GPUs, on one core.

Every leaf has 1 to 16 free nodes left (fixed seed), every pod 1 to 32 leaves, 2:1 and 7:1
oversubscribed; the job takes all of them that fit its degrees. Timed: unfolding the cluster to
arrays, costing, packing, the certificate. Each size runs in a process of its own. `--check` fails
above 1 s or 1 GiB at the largest, or when time grows faster than GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.cost.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SIZES = (64, 512, 4096, 16384, 32768, 65536, 100_000)


def fragmented(gpus: int, seed: int = 1):
    """A cluster of `gpus` free GPUs, eight a node, in the order in which a scheduler might list
    them: by name."""
    from orchestrator.cluster.build import build_cluster
    from orchestrator.planner.placement.node_placement import reorder
    from tests.planner import configs

    rng = random.Random(seed)
    nodes = gpus // 8
    leaves = []
    pods = []
    while sum(leaves) < nodes:
        leaves.append(min(rng.randint(1, 16), nodes - sum(leaves)))
    at = 0
    while at < len(leaves):
        size = min(rng.randint(1, 32), len(leaves) - at)
        pods.append(sum(leaves[at : at + size]))
        at += size
    cluster = build_cluster(
        configs.cluster(nodes, 8, [("leaf", leaves, 2.0), ("pod", pods, 7.0), ("core", nodes, 1.0)])
    )
    order = list(range(nodes))
    rng.shuffle(order)
    return reorder(cluster, order)


def once(gpus: int) -> dict[str, float]:
    import resource

    from orchestrator.cost.context import CostContext
    from orchestrator.cost.time.traffic import step_traffic
    from orchestrator.planner.degrees import make_case, make_parallel
    from orchestrator.planner.job import make_job
    from orchestrator.planner.placement.node_placement import place_nodes
    from tests.planner import configs, shapes

    pp = 4 if gpus < 4096 else 16
    dp = gpus // (8 * pp)
    cluster = fragmented(gpus)
    model = shapes.llama3_405b()
    spec = configs.cluster(pp * dp, 8, [("fabric", pp * dp, 1.0)])
    config = configs.config(
        spec, model, {"tp": 8, "pp": pp, "zero": 1}, global_batch_samples=dp * 8
    )
    from orchestrator.cluster.build import build_cluster

    parallel = make_parallel(config, make_case(config, build_cluster(spec), model))
    train = make_job(config).train
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall = time.perf_counter()
    cpu = time.process_time()
    context = CostContext(cluster, model, train)
    traffic = step_traffic(Workload(model, parallel, train, context.software))
    found = place_nodes(context.path_cache, parallel, traffic, context.work(parallel, train))
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "gpus": gpus,
        "used_gpus": parallel.world_size,
        "wall_s": round(wall, 4),
        "cpu_s": round(cpu, 4),
        "peak_mib": round(peak / 1024, 1),
        "added_mib": round((peak - before) / 1024, 1),
        "step_s": found.score.step_s,
        "as_listed_step_s": found.given_order_score.step_s,
        "gap": round(found.gap, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "placement_scale.json"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(once(args.one)))
        return 0
    rows = []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for gpus in args.sizes:
        command = [sys.executable, __file__, "--one", str(gpus)]
        runs = []
        for _ in range(args.repeats):
            done = subprocess.run(
                command, env=env, cwd=ROOT, capture_output=True, text=True, check=True
            )
            runs.append(json.loads(done.stdout))
        rows.append(min(runs, key=lambda run: run["cpu_s"]))
        print(json.dumps(rows[-1]), flush=True)
    page = {"python": platform.python_version(), "load": round(os.getloadavg()[0], 1), "rows": rows}
    args.out.write_text(json.dumps(page, indent=1) + "\n")
    small = rows[0]
    large = rows[-1]
    growth = (large["cpu_s"] / small["cpu_s"]) / (large["gpus"] / small["gpus"])
    print(f"time grows {growth:.3f} times as fast as GPUs")
    return int(args.check and (large["cpu_s"] > 1 or large["peak_mib"] > 1024 or growth > 1))


if __name__ == "__main__":
    sys.exit(main())
