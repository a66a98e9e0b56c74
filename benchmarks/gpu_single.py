"""One-GPU training at 1B, bf16, beside a plain torch loop on the same shapes and the matmul
ceiling, in one run.

    python -m benchmarks.gpu_single [--seq 4096] [--batch 2] [--rounds 10] [--dry]

Ours is the engine that `orch` trains with (bf16 weights, fp32 gradients, master copy and moments);
the plain loop is the same decoder of nn.Linear, nn.Embedding, nn.RMSNorm and
scaled_dot_product_attention under bf16 autocast, with fp32 weights and fused AdamW, which is as
exact. Both clip the gradient. First eagerly, in turns, a round each; then compiled (ours by block
as `train.compile` does, the loop as a whole). Every round ends in a synchronisation. MFU counts
`model_flops_per_token` against the best of a few large bf16 products measured in between, and
against the data sheet where the device is known. Writes benchmarks/results/gpu_single.json.

Without CUDA it says so and ends with 0. `--dry` runs the whole program with a tiny model on
whatever is there, writes nothing and proves nothing but that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.vs_torch.common import LR, adamw, new_stage
from benchmarks.vs_torch.harness import conditions
from benchmarks.vs_torch.tensor import with_torchs_modules
from orchestrator.plan import Plan
from orchestrator.plan.flops import model_flops_per_token
from tests.beds.plans import make_plan, tiny_model
from trainer.comm.mesh import Mesh
from trainer.data.batch import MicroBatch
from trainer.engine import Engine
from trainer.model.loss import cross_entropy_sum
from trainer.precision import recipe

RESULT = Path(__file__).parent / "results" / "gpu_single.json"
#: The shapes of Llama 3.2 1B: 1.24 billion parameters.
LLAMA_1B = {
    "layers": 16,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn_hidden": 8192,
    "vocab": 128256,
    "tied_embeddings": True,
    "rope_theta": 5e5,
}
#: Dense bf16 FLOP/s of data sheets.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12}
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


def plain(plan: Plan, device: torch.device, batch: MicroBatch, compiled: bool) -> Step:
    model: nn.Module = with_torchs_modules(new_stage(plan, device))
    optimizer = adamw(plan, list(model.parameters()), fused=True)
    run = torch.compile(model) if compiled else model

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


def seconds(step: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def matmul_ceiling(device: torch.device, sizes: tuple[int, ...]) -> float:
    """FLOP/s of the best square bf16 product."""
    best = 0.0
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        spent = statistics.median([seconds(lambda a=a, b=b: a @ b, device) for _ in range(12)][2:])
        best = max(best, 2 * size**3 / spent)
    return best


def difference(ours: float, loop: float) -> float:
    return abs(ours / loop - 1) if loop else abs(ours)  # a fake GPU's losses are zero


def compare(plan: Plan, device: torch.device, rounds: int, compiled: bool) -> dict[str, float]:
    batch = random_batch(plan, device)
    steps = {"ours": ours(plan, device, batch), "loop": plain(plan, device, batch, compiled)}
    begin = time.perf_counter()
    losses = [{name: float(step()) for name, step in steps.items()} for _ in range(3)]
    warm_up = time.perf_counter() - begin
    spent = {name: [] for name in steps}
    for index in range(rounds):
        for name in list(steps)[:: 1 if index % 2 == 0 else -1]:
            spent[name].append(seconds(steps[name], device))
    tokens = batch.targets.numel()
    ratio = [a / b for a, b in zip(spent["ours"], spent["loop"], strict=True)]
    return {
        **{f"{name}_s": statistics.median(times) for name, times in spent.items()},
        **{
            f"{name}_tokens_per_s": tokens / statistics.median(times)
            for name, times in spent.items()
        },
        "time_ratio": statistics.median(ratio),
        "time_ratio_min": min(ratio),
        "time_ratio_max": max(ratio),
        "warm_up_s": warm_up,
        "loss_difference": max(difference(**x) for x in losses),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_single", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available() and not args.dry:
        print("skipped: this machine has no CUDA device")
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seq, batch = (64, 2) if args.dry else (args.seq, args.batch)
    model = tiny_model(**({} if args.dry else LLAMA_1B) | {"max_seq_len": seq})
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    sheet = next(
        (peak for key, peak in PEAKS.items() if all(word in name for word in key.split())), None
    )
    flops = model_flops_per_token(model, seq)
    ceilings = []
    results = {}
    for mode in ("eager", "compiled"):
        ceilings.append(matmul_ceiling(device, (256,) if args.dry else (4096, 8192, 16384)))
        train = {"seq_len": seq, "precision": "bf16", "micro_batches": 1, "micro_batch_size": batch}
        plan = make_plan(model=model, compile=mode == "compiled", bucket_bytes=25 << 20, **train)
        results[mode] = row = compare(plan, device, args.rounds, mode == "compiled")
        for side in ("ours", "loop"):
            achieved = row[f"{side}_tokens_per_s"] * flops
            row[f"{side}_of_ceiling"] = achieved / max(ceilings)
            row[f"{side}_mfu"] = achieved / sheet if sheet else None
        print(
            f"{mode}: "
            + ", ".join(f"{key} {value:.4g}" for key, value in row.items() if value is not None),
            flush=True,
        )
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    ceiling = {
        "matmul_ceiling_flops": max(ceilings),
        "sheet_flops": sheet,
        "flops_per_token": flops,
    }
    print(f"{name}: matmul ceiling {max(ceilings) / 1e12:.1f} TFLOP/s bf16")
    if not args.dry:
        record = {
            "device": name,
            **ceiling,
            "modes": results,
            "conditions": conditions(**vars(args)),
        }
        RESULT.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
