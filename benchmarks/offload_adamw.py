"""AdamW on the host as the trainer computes it, beside `torch.optim.AdamW(fused=True)` and
`foreach=True` on the CPU.

    python -m benchmarks.offload_adamw [--elements 33554432] [--threads 1 2] [--repeats 7]
        [--out FILE]

A shard of master weights and moments with its gradient, summed in fp32 or bf16: what torch's
optimizers get is widened and multiplied by the factor of clipping first, as ours is. In turn, the
fastest of each; bytes are those that an update needs (28 a parameter, 26 of a bf16 gradient),
beside those of a copy. The file, benchmarks/results/offload_adamw.json by default, has the seconds
with the conditions.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.vs_torch.harness import conditions
from orchestrator.plan.document import Optim
from trainer.host.memory import HostMemory
from trainer.optim.rule import Rules
from trainer.optim.sharded import ShardedOptimizer, rules_of

RESULT = Path(__file__).resolve().parent / "results" / "offload_adamw.json"
OPTIM = Optim(
    lr=1e-3, min_lr_ratio=0.1, schedule="cosine", warmup_steps=0, decay_steps=0, beta1=0.9, beta2=0.95, eps=1e-8,
    weight_decay=0.1,
)  # fmt: skip


def ours(elements: int, dtype: torch.dtype, rules: Rules) -> Callable[[], None]:
    """One update of the trainer's optimizer on the host, of a bucket with one shard."""
    host = HostMemory(torch.device("cpu"))
    gradient = host.zeros(elements, dtype).normal_()
    kind = SimpleNamespace(whole_matrix=False, decay=True, narrow=False)
    weights = torch.randn(elements)
    bucket = SimpleNamespace(
        param_shard=weights, grad_shard=gradient, host_grad=gradient, kind=kind
    )
    buckets = SimpleNamespace(buckets=[bucket], zero=1, gathers=False)
    optimizer = ShardedOptimizer(buckets, rules, torch.float32, host)  # type: ignore[arg-type]
    factor = torch.tensor(1 - 1e-6, dtype=torch.float64)
    finite = torch.ones((), dtype=torch.bool)

    def once() -> None:
        scale, update = optimizer.decide(1e-3, factor, finite)
        optimizer.compute([0], [gradient], scale, update)

    return once


def torchs(elements: int, dtype: torch.dtype, **how: bool) -> Callable[[], None]:
    weights = torch.nn.Parameter(torch.randn(elements))
    gradient = torch.randn(elements).to(dtype)
    weights.grad = torch.zeros(elements)
    factor = torch.tensor(1 - 1e-6)
    optimizer = torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **how)

    def once() -> None:
        if dtype == torch.float32:
            weights.grad = gradient
        else:
            assert weights.grad is not None
            weights.grad.copy_(gradient)
        weights.grad.mul_(factor)
        optimizer.step()

    return once


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, nargs="+", default=[1 << 25, 30_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    before = conditions(repeats=options.repeats)
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for elements in options.elements:
            here = torch.zeros(elements)
            there = torch.ones(elements)
            ways: dict[str, Callable[[], object]] = {"copy": lambda a=here, b=there: a.copy_(b)}
            for dtype in (torch.float32, torch.bfloat16):
                name = str(dtype).removeprefix("torch.")
                ways[f"ours, {name}"] = ours(elements, dtype, rules_of(OPTIM))
                ways[f"torch fused, {name}"] = torchs(elements, dtype, fused=True)
                ways[f"torch foreach, {name}"] = torchs(elements, dtype, foreach=True)
            best = dict.fromkeys(ways, float("inf"))
            for _ in range(options.repeats):
                for name, once in ways.items():
                    began = time.perf_counter()
                    once()
                    best[name] = min(best[name], time.perf_counter() - began)
            print(f"{elements:,} elements, {threads} threads")
            for name, seconds in best.items():
                size = 8 if name == "copy" else 26 if "bfloat16" in name else 28
                fused = best.get(f"torch fused, {name.split(', ')[-1]}")
                ratio = (
                    f"  {fused / seconds:.2f} x torch's fused"
                    if fused and name.startswith("ours")
                    else ""
                )
                print(
                    f"  {name:<24}{seconds * 1e3:8.1f} ms{size * elements / seconds / 1e9:8.1f}"
                    f" GB/s{ratio}"
                )
            rows.append({"elements": elements, "threads": threads, "fastest_s": best})
    options.out.write_text(json.dumps({"conditions": before, "updates": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
