"""ZeRO-R's memory defragmentation, MD (arXiv 1910.02054, section 6.3), on recorded allocations: what
a step takes from the device with the inputs of recomputed layers where autograd keeps them, and
with them in a reserved buffer (`train.contiguous_activations`).

`python -m benchmarks.fragmentation` records two steps of a rank of each layout under fake tensors
(`trainer.twin.allocations`), plays them through a simulation of torch's allocator
(`trainer.twin.caching_allocator`) and writes benchmarks/results/fragmentation.json. No GPU runs;
on one, `orch report` shows the allocator's own statistics.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import warnings
from pathlib import Path
from typing import Any

import torch

from orchestrator.api import plan
from orchestrator.plan import Plan
from trainer.twin.allocations import record
from trainer.twin.caching_allocator import measure

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "fragmentation.json"
GIB = 1 << 30
#: name -> words of `orch plan`. Eight layers are enough: more repeat the same sizes.
LAYOUTS = {
    "llama32_1b, dp8 zero1, full": "model=llama32_1b parallel=dp8_zero1 train.recompute=full",
    "llama3_8b, tp8, full": "model=llama3_8b parallel=tp8 train.recompute=full",
    "llama3_8b, tp8 without sp, full, shares": (
        "model=llama3_8b parallel=tp8_sp0 train.recompute=full train.partition_activations=true"
    ),
    "llama3_8b, tp2 pp4 zero1, full": (
        "model=llama3_8b parallel=tp2_pp4_zero1 train.recompute=full"
    ),
}
COMMON = ("cluster=h100x8", "model.layers=8", "train.global_batch_samples=8")
RESERVED = "train.contiguous_activations=true"


def plan_of(words: str, reserved: bool) -> Plan:
    overrides = [*COMMON, *words.split()]
    return plan(*overrides, RESERVED) if reserved else plan(*overrides)


def row(words: str, reserved: bool) -> dict[str, float]:
    start, *steps = record(plan_of(words, reserved), 0)
    result = measure(start, [event for step in steps for event in step])
    sizes = {f"{name}_gib": round(size / GIB, 3) for name, size in result._asdict().items()}
    return sizes | {
        "beyond_tensors": round(result.reserved / result.allocated - 1, 4),
        "beyond_tensors_at_least": round(result.least_capacity / result.allocated - 1, 4),
        "events": sum(map(len, steps)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the hooks read addresses of fake tensors
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} CPUs {platform.machine()}, Linux {platform.release()}",
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "simulated": "allocations of fake tensors, played on a simulated caching allocator",
        "steps": 2,
        "common_words": " ".join(COMMON),
        "layouts": {},
    }
    for name, words in LAYOUTS.items():
        rows = {
            "by autograd": row(words, reserved=False),
            "in a reserved buffer": row(words, reserved=True),
        }
        result["layouts"][name] = {"words": words, **rows}
        for place, sizes in rows.items():
            print(f"{name}, {place}: {sizes}", flush=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
