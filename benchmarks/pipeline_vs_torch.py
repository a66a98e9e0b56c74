"""Step time of each pipeline schedule against torch.distributed.pipelining: same weights, ranks, micro-batches, gloo.

Both take turns, step by step in the same processes, so that other work on the machine meets both alike. Prints the
median seconds of each and the median of the ratios of neighbouring steps (below 1: ours is faster), and writes
benchmarks/results/pipeline_vs_torch.json. A small --hidden shows the cost of the runtime, a large one that of the work.

    python -m benchmarks.pipeline_vs_torch [--pp 2] [--micro-batches 8] [--steps 20] [--hidden 128]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from orchestrator.plan.schedules import build as build_schedule
from tests.plans import make_plan, tiny_model
from trainer.metrics.comm import CommCounter
from trainer.model.loss import cross_entropy_sum
from trainer.parallel.apply import build
from trainer.parallel.mesh import Mesh
from trainer.pipeline.runtime import Pipeline, stage_indices
from trainer.verify.ranks import run_ranks

PAIRS = {
    "1f1b": (1, "Schedule1F1B"),
    "afab": (1, "ScheduleGPipe"),
    "interleaved": (2, "ScheduleInterleaved1F1B"),
    "zbv": (2, "ScheduleZBVZeroBubble"),
    "dualpipev": (2, "ScheduleDualPipeV"),
}
B, S = 2, 64
RESULT = Path(__file__).parent / "results" / "pipeline_vs_torch.json"


class Wrapped(nn.Module):
    """A stage as torch wants it: one tensor in, one out."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(S).expand(B, S)
        batch = SimpleNamespace(tokens=x, positions=positions, documents=None)
        return self.stage(None if self.stage.first else x, batch)


def rank_main(rank: int, name: str, theirs: str, pp: int, vpp: int, many: int, hidden: int, steps: int) -> dict:
    model = tiny_model(layers=8, hidden=hidden, heads=4, kv_heads=2, head_dim=hidden // 4, ffn_hidden=2 * hidden)
    plan = make_plan(model=model, pp=pp, vpp=vpp, schedule=name, micro_batches=many, micro_batch_size=B, seq_len=S)
    mesh = Mesh.from_plan(plan, rank)
    part = build(plan, mesh, CommCounter(), indices=stage_indices(plan, rank))
    schedule = build_schedule(name, pp, many, vpp)
    copies = {stage: Wrapped(copy.deepcopy(part.stages[i])) for i, stage in enumerate(schedule.stages_of(rank))}
    ours = Pipeline.from_plan(plan, part.stages, part.loss, mesh, CommCounter(), dtype=torch.float32)

    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocab, (many * B, S + 1), generator=draw)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(S).expand(B, S)
    batches = [
        SimpleNamespace(tokens=i, targets=t, positions=positions, documents=None)
        for i, t in zip(inputs.split(B), targets.split(B), strict=True)
    ]
    scale = 1.0 / targets.numel()

    group = mesh.group("pp")
    stages = [
        pipelining.PipelineStage(module, index, pp * vpp, torch.device("cpu"), group=group)
        for index, module in copies.items()
    ]
    make = getattr(pipelining, theirs)
    native = make(
        stages[0] if vpp == 1 else stages,
        many,
        loss_fn=lambda logits, target: cross_entropy_sum(logits, target) * scale,
        scale_grads=False,
    )
    first = any(schedule.is_first(stage) for stage in copies)
    last = any(schedule.is_last(stage) for stage in copies)

    def step_ours() -> None:
        ours.run(batches, scale)

    def step_native() -> None:
        args = (inputs,) if first else ()
        native.step(*args, target=targets if last else None)

    def timed(step) -> float:
        for module in (*part.stages, *copies.values()):
            module.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        return time.perf_counter() - start

    seconds = {"ours": [], "native": []}
    turns = [("ours", step_ours), ("native", step_native)]
    for index in range(steps + 2):
        for label, step in turns if index % 2 == 0 else turns[::-1]:
            spent = timed(step)
            if index >= 2:
                seconds[label].append(spent)
    timed(step_ours)
    grads = [{key: param.grad.clone() for key, param in stage.named_parameters()} for stage in part.stages]
    timed(step_native)
    worst = 0.0
    for mine, module in zip(grads, copies.values(), strict=True):
        for key, param in module.stage.named_parameters():
            worst = max(worst, float((param.grad - mine[key]).abs().max() / mine[key].abs().max()))
    return seconds | {"difference": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args()
    print(f"pp={args.pp}, {args.micro_batches} micro-batches of {B} x {S} tokens, median of {args.steps} steps")
    print(f"{'schedule':<12} {'ours':>9} {'torch':>9} {'ratio':>6}   worst gradient difference")
    rows = {}
    for name, (vpp, theirs) in PAIRS.items():
        size = (args.pp, vpp, args.micro_batches, args.hidden, args.steps)
        found = run_ranks(rank_main, args.pp, name, theirs, *size, timeout=300.0)
        ours, native = found[0]["ours"], found[0]["native"]  # every step ends in a barrier: all ranks measure the same
        row = {
            "ours_s": statistics.median(ours),
            "torch_s": statistics.median(native),
            "ratio": statistics.median(a / b for a, b in zip(ours, native, strict=True)),
            "gradient_difference": max(result["difference"] for result in found),
        }
        rows[name] = row
        print("{:<12} {:>8.4f}s {:>8.4f}s {:>6.2f}   {:.1e}".format(name, *row.values()), flush=True)
    record = {
        "torch": torch.__version__,
        "settings": vars(args),
        "load": os.getloadavg(),
        "batch": B,
        "sequence": S,
        "schedules": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
