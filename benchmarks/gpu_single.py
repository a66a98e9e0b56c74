"""One-GPU training at 1B, bf16, beside a plain torch loop on the same shapes and the card's own
ceilings, in one run.

    python -m benchmarks.gpu_single [--minutes 8] [--seq 4096] [--batch 2] [--rounds 10] [--dry]

Ours is the engine that `orch` trains with (bf16 weights, fp32 gradients, master copy and moments);
the plain loop is the same decoder of nn.Linear, nn.Embedding, nn.RMSNorm and
scaled_dot_product_attention under bf16 autocast, with fp32 weights and fused AdamW, which is as
exact. Both clip the gradient. They take turns, a round each, which ends in a synchronisation; first
compiled (ours by block as `train.compile` does, the loop as a whole), then eagerly. A step of ours
then runs under torch's sync debug mode: it must not wait for the card. MFU counts
`model_flops_per_token` against the best of a few large bf16 products measured just before, and
against the data sheet where the card is known. The plan of the same step stands beside what is
measured, and `orch calibrate --from FILE` takes the result.

Each row is in benchmarks/results/gpu_single.json as soon as it is measured; what fails is a row
with its error, and the program ends with 1 if a row fails, a step waits or nothing is measured.
Without CUDA it says so and ends with 0. `--dry` runs the whole program with a tiny model on whatever
is there, writes to --out alone, without plans, and proves nothing but that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import minutes
from benchmarks.card import (
    card_words,
    collect,
    device_name,
    device_to_measure,
    forget,
    matmul_ceiling,
    memory_ceiling,
    seconds,
    sheet_flops,
    wait_in,
)
from benchmarks.gpu_node.cases import SMALL, Where, plan_of
from benchmarks.vs_torch.common import LR, adamw, new_stage
from benchmarks.vs_torch.harness import conditions
from benchmarks.vs_torch.tensor import with_torchs_modules
from orchestrator.cost.memory.rank_memory import context_bytes
from orchestrator.plan import Plan
from orchestrator.plan.codec import to_json
from orchestrator.plan.flops import model_flops_per_token
from trainer.comm.mesh import Mesh
from trainer.data.batch import MicroBatch
from trainer.engine import Engine
from trainer.model.loss import cross_entropy_sum
from trainer.precision import recipe

RESULT = Path(__file__).parent / "results" / "gpu_single.json"
GIB = 1 << 30
WARM_UP = 3
#: Sides of square products, and bytes of an array: of a dry run, of a card.
PRODUCTS = {True: (256,), False: (4096, 8192, 16384)}
ARRAY = {True: 1 << 16, False: 1 << 30}
Step = Callable[[], Tensor]


def random_batch(plan: Plan, device: torch.device) -> MicroBatch:
    shape = plan.parallel.micro_batch_size, plan.job.train.seq_len
    window = torch.randint(
        plan.model.vocab, (shape[0], shape[1] + 1), generator=torch.Generator().manual_seed(1)
    )
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    parts = (window[:, :-1].contiguous(), window[:, 1:].contiguous(), positions)
    return MicroBatch(*(part.to(device) for part in parts), None)


def ours(plan: Plan, device: torch.device, batch: MicroBatch) -> Step:
    engine = Engine(plan, Mesh.alone(plan), device, recipe(plan.job.train))

    def step() -> Tensor:
        loss, norm = engine.gradients([batch], batch.targets.numel())
        engine.update(norm, LR)
        engine.buckets.wait_params()
        return loss

    return step


def plain(plan: Plan, device: torch.device, batch: MicroBatch) -> Step:
    model: nn.Module = with_torchs_modules(new_stage(plan, device))
    optimizer = adamw(plan, list(model.parameters()), fused=True)
    run = torch.compile(model) if plan.job.train.compile else model

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            logits = run(None, batch)
        loss = cross_entropy_sum(logits, batch.targets)
        (loss / batch.targets.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), plan.job.train.clip_grad_norm)
        optimizer.step()
        return loss.detach()

    return step


def difference(ours: float, loop: float) -> float:
    return abs(ours / loop - 1) if loop else abs(ours)  # a fake GPU's losses are zero


def peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0


def warm_up(step: Step) -> list[float]:
    """The losses of the first steps."""
    return [float(step()) for _ in range(WARM_UP)]


def waits_of(step: Step, device: torch.device) -> dict[str, str]:
    """Where a steady step waits, or why that is not known: what is measured stays."""
    try:
        return {"waits_at": wait_in(step, device)}
    except Exception as error:
        traceback.print_exc()
        return {"waits_failed": minutes.error_line(error)}


def compare(plan: Plan, device: torch.device, rounds: int) -> dict[str, Any]:
    """Ours beside the loop. A loop that fails leaves ours alone in the row."""
    batch = random_batch(plan, device)
    begin = time.perf_counter()
    steps = {"ours": ours(plan, device, batch)}
    losses = {"ours": warm_up(steps["ours"])}
    row: dict[str, Any] = {"ours_peak_gib": peak_gib(device)}
    try:
        steps["loop"] = plain(plan, device, batch)
        losses["loop"] = warm_up(steps["loop"])
    except Exception as error:  # both may not fit on this card
        traceback.print_exc()
        row["loop_failed"] = minutes.error_line(error)
        steps.pop("loop", None)
    if "loop_failed" in row:  # outside the handler, whose traceback holds the loop's tensors
        collect(device)
    row["warm_up_s"] = time.perf_counter() - begin
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds):
        for name in list(steps)[:: 1 if index % 2 == 0 else -1]:
            spent[name].append(seconds(steps[name], device))
    for name, times in spent.items():
        row[f"{name}_s"] = statistics.median(times)
        row[f"{name}_tokens_per_s"] = batch.targets.numel() / statistics.median(times)
    if "loop" in steps:
        ratios = [a / b for a, b in zip(spent["ours"], spent["loop"], strict=True)]
        row |= {"time_ratio": statistics.median(ratios)}
        row |= {"time_ratio_min": min(ratios), "time_ratio_max": max(ratios)}
        pairs = zip(losses["ours"], losses["loop"], strict=True)
        row["loss_difference"] = max(difference(*pair) for pair in pairs)
    row["peak_gib"] = peak_gib(device)
    # Last, since it may raise in the middle of a step.
    return row | waits_of(steps["ours"], device)


class Card:
    """The rows of one card, in the order of what matters."""

    def __init__(self, device: torch.device, args: argparse.Namespace):
        self.device = device
        self.args = args
        self.name = device_name(device)
        self.sheet = sheet_flops(self.name)
        self.ceiling = 0.0

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        return {
            "compiled": lambda: self.mode(compiled=True),
            "memory": lambda: memory_ceiling(self.device, ARRAY[self.args.dry]),
            "eager": lambda: self.mode(compiled=False),
        }

    def plan(self, compiled: bool) -> Plan:
        # All samples are one micro-batch, those of a dry run (`cases.DRY_WORDS`) too.
        batch = 16 if self.args.dry else self.args.batch
        words = [
            "parallel=dp1",
            f"parallel.micro_batch_size={batch}",
            f"train.seq_len={self.args.seq}",
            f"train.global_batch_samples={batch}",
            f"train.compile={str(compiled).lower()}",
        ]
        where = Where(self.args.dry, self.device.type == "cuda", card_words(self.name))
        return plan_of(SMALL, tuple(words), 1, where)

    def mode(self, compiled: bool) -> dict[str, Any]:
        """Ours and the loop, compiled or not, beside the best product and the plan."""
        plan = self.plan(compiled)
        product = matmul_ceiling(self.device, PRODUCTS[self.args.dry])
        self.ceiling = max(self.ceiling, product)
        row = compare(plan, self.device, self.args.rounds)
        flops = model_flops_per_token(plan.model, plan.job.train.seq_len)
        for side in ("ours", "loop"):
            achieved = row.get(f"{side}_tokens_per_s", 0.0) * flops
            row[f"{side}_of_ceiling"] = achieved / self.ceiling
            row[f"{side}_mfu"] = achieved / self.sheet if self.sheet else None
        memory = plan.memory.total - context_bytes(plan.memory, plan.cluster.device)
        row |= {"product_flops": product, "flops_per_token": flops}
        row |= {"planned_s": plan.time.step_s, "planned_gib": memory / GIB}
        # The cost model does not know of `train.compile`: steps as users train correct it.
        measured = {"plan": json.loads(to_json(plan)), "step_s": row["ours_s"]}
        return row | (measured if compiled and not self.args.dry else {})


def line(row: dict[str, Any]) -> str:
    """A row for people: its numbers, and where a step of ours has waited."""
    numbers = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, float)]
    problems = [row[key] for key in ("loop_failed", "waits_failed") if key in row]
    problems += [f"a steady step waits at {row['waits_at']}"] if row.get("waits_at") else []
    return ", ".join(numbers + problems)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_single", description=__doc__.partition("\n")[2]
    )
    minutes.add_argument(parser)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    device = device_to_measure(args.dry)
    if device is None:
        return 0
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    card = Card(device, args)
    record = {"device": card.name, "dry": args.dry, "sheet_flops": card.sheet}
    record |= {"conditions": conditions(**settings)}
    out = args.out if args.dry else args.out or RESULT
    limit = minutes.Limit(args.minutes)
    series = minutes.Series(record, limit, out, show=line, free=lambda: forget(device))
    series.expect(card.rows())
    for name, measure in card.rows().items():
        series.measure(name, measure)
    print(f"{card.name}: best product {card.ceiling / 1e12:.1f} TFLOP/s bf16; {series.summary()}")
    rows = series.rows.values()
    has_waits = any(row.get("waits_at") or "waits_failed" in row for row in rows)
    is_empty = all("failed" in row for row in rows)
    return 1 if series.failed or has_waits or is_empty else 0


if __name__ == "__main__":
    sys.exit(main())
