"""python -m benchmarks.vs_torch [--only NAME ...] [--sizes base small] [--rounds 15]

Prints one line a case: median seconds a step of both sides, the median of the ratios of neighbouring steps (below 1:
ours is faster) with their range, and that of processor time. Writes benchmarks/results/vs_torch.json, merging what was
measured now into what is there.
"""

from __future__ import annotations

import argparse
import json

from . import context, data, pipeline, tensor
from .harness import ROOT, Case, conditions, measure

TECHNIQUES = {"data": data.cases, "tensor": tensor.cases, "context": context.cases, "pipeline": pipeline.cases}
RESULT = ROOT / "benchmarks" / "results" / "vs_torch.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vs_torch", description=__doc__.partition("\n")[2])
    parser.add_argument("--only", nargs="*", default=[], help="cases or techniques by name")
    parser.add_argument("--sizes", nargs="*", default=["base"])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    print(f"{'case':<52} {'ours':>8} {'torch':>8} {'ratio':>6} {'min-max':>11} {'cpu':>6}  loss difference")
    for size in args.sizes:
        for technique, cases in TECHNIQUES.items():
            for case in cases(size):
                if not args.only or {technique, case.name} & set(args.only):
                    row = run(case, size, args.rounds)
                    rows[f"{size}: {case.name} / {case.native}"] = row
                    RESULT.write_text(json.dumps({"cases": rows}, indent=2) + "\n")


def run(case: Case, size: str, rounds: int) -> dict[str, object]:
    before = conditions(size=size, rounds=rounds, world=case.plan.parallel.world_size)
    row = measure(case, rounds).record()
    text = f"{size}: {case.name} / {case.native}"
    times = f"{row['ours_s']:>7.3f}s {row['torch_s']:>7.3f}s {row['ratio']:>6.2f}"
    spread = f"{row['ratio_min']:.2f}-{row['ratio_max']:.2f}"
    print(f"{text:<52} {times} {spread:>11} {row['cpu_ratio']:>6.2f}  {row['loss_difference']:.1e}", flush=True)
    return row | {"conditions": before}


if __name__ == "__main__":
    main()
