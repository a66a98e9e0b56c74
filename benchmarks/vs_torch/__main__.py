"""python -m benchmarks.vs_torch [--only NAME ...] [--sizes base small] [--rounds 15]

Prints one line a case: median seconds a step of both sides, the median of the ratios of
neighbouring steps (below 1: ours is faster) with their range, and that of processor time. Writes
benchmarks/results/vs_torch.json, merging what was measured now into what is there.
"""

from __future__ import annotations

import argparse
import json

from . import context, data, pipeline, tensor
from .harness import ROOT, row_of

TECHNIQUES = {
    "data": data.cases,
    "tensor": tensor.cases,
    "context": context.cases,
    "pipeline": pipeline.cases,
}
RESULT = ROOT / "benchmarks" / "results" / "vs_torch.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vs_torch", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--only", nargs="*", default=[], help="cases or techniques by name")
    parser.add_argument("--sizes", nargs="*", default=["base"])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    print(
        f"{'case':<52} {'ours':>8} {'torch':>8} {'ratio':>6} {'min-max':>11} {'cpu':>6}  loss"
        " difference"
    )
    for size in args.sizes:
        for technique, cases in TECHNIQUES.items():
            for case in cases(size):
                if not args.only or {technique, case.name} & set(args.only):
                    title = f"{size}: {case.name} / {case.native}"
                    rows[title] = row_of(case, args.rounds, title, 52, size=size)
                    RESULT.write_text(json.dumps({"cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
