"""python -m benchmarks.experts_learn [--steps 600] [--precision fp64]

What a mixture of experts learns from real text (the standard library's sources), and whether a lost
node changes it:

1. `tiny` on one process, 2. `tiny_moe`, of which a token uses as many parameters, on one process,
   with the same samples
in the same order, 3. `tiny_moe` under ep2 tp2 pp2 on two nodes of four ranks, one of which is
killed at half of the
steps; the other one goes on under ep2 tp2. In float64: in fp32 a token whose best scores are nearly
equal chooses
otherwise on another layout sooner or later, and two runs part that are equally good.

Prints and writes benchmarks/results/experts_learn.json: mean loss of the last tenth of the steps,
and the largest relative difference of a step's loss between 2 and 3. Losses are balance terms
apart: cross entropy in nats a token.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time

import psutil

from benchmarks.vs_torch.harness import ROOT, conditions
from orchestrator import api as orch

RESULT = ROOT / "benchmarks" / "results" / "experts_learn.json"
ALONE = ("cluster.nodes=1", "cluster.gpus_per_node=1", "parallel=ddp")
CPU = (
    "cluster.gpu.peak_tflops={fp64: 0.01, fp32: 0.02, bf16: 0.02}",
)  # without a rate a precision is refused
SPREAD = ("nodes=1..2", "parallel=ep2_tp2_pp2_zero1", "checkpoint.memory_every_steps=1")


def losses(run: orch.Run) -> dict[int, float]:
    """Of every step, as its last epoch told it."""
    return {
        line.step: line.loss
        for line in sorted(run.steps(), key=lambda line: line.epoch)
        if line.loss is not None
    }


def ended(run: orch.Run) -> dict[int, float]:
    state = run.wait()
    if state.state != "done":
        raise SystemExit(f"run {run.id} is {state.state}: {state.reason}")
    return losses(run)


def kill_a_node(run: orch.Run, at_step: int) -> str:
    """Everything on a node that does not coordinate, once the run has made so many steps; the
    node's name."""
    while max(losses(run), default=0) < at_step:
        if run.state.is_final:
            raise SystemExit(f"run {run.id} ended before step {at_step}: {run.state.reason}")
        time.sleep(0.5)
    state = run.state
    victim = next(name for name in state.nodes if name != state.writer)
    agent = psutil.Process(state.nodes[victim].pid)
    for process in (*agent.children(recursive=True), agent):
        process.send_signal(signal.SIGKILL)
    return victim


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts_learn", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--precision", choices=("fp64", "fp32"), default="fp64")
    args = parser.parse_args()
    steps = args.steps
    before = conditions(
        steps=steps, precision=args.precision, data="stdlib", alone=ALONE, spread=SPREAD
    )
    with tempfile.TemporaryDirectory() as home:
        os.environ["ORCH_HOME"] = home
        words = ("cluster=local", f"train.steps={steps}", *CPU, f"train.precision={args.precision}")
        words += (f"train.grad_dtype={args.precision}",)
        dense = ended(orch.submit(*words, "model=tiny", *ALONE))
        mixture = ended(orch.submit(*words, "model=tiny_moe", *ALONE))
        spread = orch.submit(*words, "model=tiny_moe", *SPREAD)
        kill_a_node(spread, steps // 2)
        broken = ended(spread)
        parallel = spread.plan().parallel
    if not sorted(dense) == sorted(mixture) == sorted(broken) == list(range(1, steps + 1)):
        raise SystemExit("a step without a loss")
    tail = range(steps - steps // 10 + 1, steps + 1)
    worst = max(abs(broken[step] / mixture[step] - 1) for step in mixture)
    row = {
        "loss_tiny": round(statistics.mean(dense[step] for step in tail), 4),
        "loss_tiny_moe": round(statistics.mean(mixture[step] for step in tail), 4),
        "loss_tiny_moe_node_killed": round(statistics.mean(broken[step] for step in tail), 4),
        "largest_relative_difference": float(f"{worst:.2g}"),
        "degrees_at_the_end": {
            "tp": parallel.tp,
            "ep": parallel.ep,
            "pp": parallel.pp,
            "dp": parallel.dp,
        },
    }
    RESULT.write_text(json.dumps({"conditions": before, "result": row}, indent=2) + "\n")
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main()
