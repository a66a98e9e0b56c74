"""python -m benchmarks.low_precision_learn [--steps 2000] [--only NAME ...]

What products in 8 bits cost in learning: the loss of `tiny` and of `tiny_moe` on real text (the
standard library's sources), in bf16 and in bf16 with `train.matmul`, on the same samples in the
same order.

Writes benchmarks/results/low_precision_learn.json: the mean loss of every twentieth of the steps, in
nats a token, and its largest relative difference from that of bf16 in the last half. Runs that the
file has at this number of steps are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile

from benchmarks.experts_learn import ALONE, CPU, ended
from benchmarks.vs_torch.harness import ROOT, conditions
from orchestrator import api as orch

RESULT = ROOT / "benchmarks" / "results" / "low_precision_learn.json"
WORDS = (
    "cluster=local",
    *ALONE,
    *CPU,
    "train.seq_len=128",
    "train.global_batch_samples=4",
    "train.precision=bf16",
    "optim.warmup_steps=100",
)
MODELS = ("tiny", "tiny_moe")
RECIPES = ("bf16", "fp8_tensor", "fp8_block", "fp8_delayed")
#: The parts of a run whose mean losses are compared.
PARTS = 20


def part_losses(name: str, steps: int) -> list[float]:
    """Trains one model with one recipe. Returns the mean loss of each twentieth of the steps."""
    model, recipe = name.split()
    words = [*WORDS, f"model={model}", f"train.steps={steps}"]
    if recipe != "bf16":
        words.append(f"train.matmul={recipe}")
    losses = ended(orch.submit(*words))
    if sorted(losses) != list(range(1, steps + 1)):
        raise SystemExit(f"{name}: a step without a loss")
    size = steps // PARTS
    firsts = range(1, steps + 1, size)
    parts = [[losses[step] for step in range(first, first + size)] for first in firsts]
    return [round(statistics.mean(part), 4) for part in parts]


def difference(losses: list[float], wide: list[float]) -> float:
    """The largest relative difference in the last half."""
    last_half = range(PARTS // 2, PARTS)
    return round(max(abs(losses[part] / wide[part] - 1) for part in last_half), 5)


def main() -> None:
    names = [f"{model} {recipe}" for model in MODELS for recipe in RECIPES]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.low_precision_learn", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    args = parser.parse_args()
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {"losses": {}}
    if stored.get("steps") != args.steps:
        stored = {"steps": args.steps, "losses": {}}
    for name in args.only:
        if name in stored["losses"]:
            continue
        with tempfile.TemporaryDirectory() as home:
            os.environ["ORCH_HOME"] = home
            losses = part_losses(name, args.steps)
        stored["losses"][name] = losses
        stored["conditions"] = conditions(words=WORDS, data="stdlib")
        RESULT.write_text(json.dumps(stored, indent=2) + "\n")
        print(name, losses, flush=True)
    every = stored["losses"]
    stored["differences"] = {
        name: difference(losses, every[f"{name.split()[0]} bf16"])
        for name, losses in every.items()
        if not name.endswith("bf16") and f"{name.split()[0]} bf16" in every
    }
    RESULT.write_text(json.dumps(stored, indent=2) + "\n")
    print(json.dumps(stored["differences"], indent=2))


if __name__ == "__main__":
    main()
