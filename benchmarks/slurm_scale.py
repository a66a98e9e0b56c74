"""Wall time to read a 5,000-node `scontrol` output and place a job on it. `--check` fails above one
second."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from orchestrator.cluster.importers.slurm import parse_topology  # noqa: E402
from orchestrator.cluster.importers.slurm_nodes import parse_nodes  # noqa: E402
from orchestrator.cluster.nodes import choose_nodes, with_nodes  # noqa: E402
from orchestrator.planner.elastic.replan import replan  # noqa: E402
from tests.beds.plans import make_plan  # noqa: E402
from tests.beds.slurm import large_output as big  # noqa: E402


def once(plan, text: str, network: str) -> dict[str, float]:
    marks = [time.perf_counter()]
    nodes = parse_nodes(text)
    marks.append(time.perf_counter())
    topology = parse_topology(network)
    marks.append(time.perf_counter())
    used = len({rank.node for rank in plan.ranks})
    chosen = choose_nodes([n.name for n in nodes if n.free and n.gpus >= 8], topology, used)
    marks.append(time.perf_counter())
    replan(plan, with_nodes(plan.cluster, chosen, topology))
    marks.append(time.perf_counter())
    names = ("parse_nodes_s", "parse_topology_s", "choose_s", "place_s")
    parts = dict(zip(names, (b - a for a, b in pairwise(marks)), strict=True))
    return parts | {"total_s": marks[-1] - marks[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--job-nodes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    plan = make_plan(tp=8, pp=4, dp=args.job_nodes // 4, nodes=args.job_nodes)
    text = big.scontrol_nodes(args.nodes)
    network = big.scontrol_topology(args.nodes)
    runs = [once(plan, text, network) for _ in range(args.repeats)]
    result = {name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0]}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    result |= {
        "nodes": args.nodes,
        "job_nodes": args.job_nodes,
        "input_mb": round(len(text) / 1e6, 2),
        "repeats": args.repeats,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "commit": commit.strip(),
    }
    out = ROOT / "benchmarks" / "results" / "slurm_scale.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(args.check and result["total_s"] >= 1.0)


if __name__ == "__main__":
    sys.exit(main())
