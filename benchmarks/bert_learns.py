"""python -m benchmarks.bert_learns [--steps 600]

What an encoder learns to predict of real text (the standard library's sources): `tiny_bert` with
train.objective=masked

1. on one process, 2. under tp2 cp2 (ring), with the same samples and the same masks.

Prints and writes benchmarks/results/bert_learns.json: mean loss of the first ten steps and of the
last tenth of the steps, in nats a masked token, and the largest relative difference of a step's
loss between 1 and 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile

from benchmarks.experts_learn import ALONE, ended
from benchmarks.vs_torch.harness import ROOT, conditions
from orchestrator import api as orch

RESULT = ROOT / "benchmarks" / "results" / "bert_learns.json"
SPREAD = (
    "cluster.nodes=1",
    "cluster.gpus_per_node=4",
    "parallel=tp2_cp2",
    "parallel.cp_method=ring",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bert_learns", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--steps", type=int, default=600)
    steps = parser.parse_args().steps
    before = conditions(steps=steps, data="stdlib", alone=ALONE, spread=SPREAD)
    with tempfile.TemporaryDirectory() as home:
        os.environ["ORCH_HOME"] = home
        words = ("cluster=local", "model=tiny_bert", f"train.steps={steps}", "optim.lr=1.0e-3")
        alone = ended(orch.submit(*words, *ALONE))
        spread = ended(orch.submit(*words, *SPREAD))
    if not sorted(alone) == sorted(spread) == list(range(1, steps + 1)):
        raise SystemExit("a step without a loss")
    tail = range(steps - steps // 10 + 1, steps + 1)
    worst = max(abs(spread[step] / alone[step] - 1) for step in alone)
    row = {
        "loss_first_steps": round(statistics.mean(alone[step] for step in range(1, 11)), 4),
        "loss_last_steps": round(statistics.mean(alone[step] for step in tail), 4),
        "loss_last_steps_tp2_cp2": round(statistics.mean(spread[step] for step in tail), 4),
        "largest_relative_difference": float(f"{worst:.2g}"),
    }
    RESULT.write_text(json.dumps({"conditions": before, "result": row}, indent=2) + "\n")
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
