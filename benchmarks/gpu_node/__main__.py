"""python -m benchmarks.gpu_node [--rounds 8] [--only NAME ...] [--torchtitan DIR] [--dry]

Runs every technique on the GPUs of this node, unattended: about an hour on eight H100s. Each case
is a line of words that `orch plan` takes; its processes are forked here, one a GPU, and end with
it. What fails is written down with its reason, and the next case goes on. After each case
benchmarks/results/gpu_node.json and docs/performance.md are written, so a run that is cut off has
told what it knew; `--only` replaces single cases.

Beside ours: a plain loop of torch's modules on DDP or FSDP2, and torchtitan, where it is installed
(`pip install torchtitan`, or --torchtitan with a folder: see benchmarks/kernels.py). In the same
run: the best bf16 matrix product on all GPUs at once, and NCCL's collectives. Without GPUs it says
so and ends with 0; `--dry` runs all of it with small models on CPU processes and writes to --out
alone: it proves that the program runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.card import sheet_flops
from benchmarks.gpu_node import page
from benchmarks.gpu_node.cases import SMALL, Case, Where, cases, plan_of, planned
from benchmarks.gpu_node.measure import ceilings, run_case
from benchmarks.gpu_node.rivals import available
from benchmarks.vs_torch.harness import conditions
from orchestrator.plan import Plan
from orchestrator.plan.flops import model_flops_per_token
from orchestrator.plan.trained import refusal
from trainer.verify.ranks import RankError, run_ranks

RESULT = Path(__file__).parents[1] / "results" / "gpu_node.json"
GIB = 1 << 30
#: Seconds for a case: compilation takes minutes.
TIMEOUT = 1800.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_node", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--torchtitan", default="", metavar="DIR")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--gpus", type=int, default=0, help="default: all (dry: 8)")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--page", type=Path, default=None, help="default: docs/performance.md (dry: none)"
    )
    args = parser.parse_args(argv)
    args.page = args.page or (None if args.dry else page.PAGE)
    found = devices()
    if not found and not args.dry:
        print("skipped: this machine has no CUDA device")
        return 0
    gpus = args.gpus or found or 8
    out = args.out or RESULT
    if args.dry and args.out is None:
        out = Path(tempfile.mkdtemp(prefix="gpu-node-")) / RESULT.name
    record = json.loads(out.read_text()) if args.only and out.exists() else {"cases": {}}
    record |= {"gpus": gpus, "dry": args.dry, "conditions": conditions(rounds=args.rounds)}
    rivals = available(args.torchtitan)
    where = Where(args.dry, bool(found))
    node = plan_of(SMALL, (f"parallel=dp{gpus}_zero1",), gpus, where)
    (record["node"], *_) = forked(ceilings, gpus, node, args.dry)
    for case in cases(gpus):
        if args.only and case.name not in args.only:
            continue
        record["cases"][case.name] = row = one(case, gpus, rivals, args.rounds, where)
        print(f"{case.name}: {page.line(row)}", flush=True)
        out.write_text(json.dumps(record, indent=2) + "\n")
        if args.page is not None:
            page.write(record, args.page)
    failed = [
        name
        for name, row in record["cases"].items()
        if "failed" in row or "failed" in row.get("ours", {})
    ]
    print(
        f"{len(record['cases'])} cases, {len(failed)} failed: {', '.join(failed) or 'none'}; {out}"
    )
    return 1 if args.dry and failed else 0


def devices() -> int:
    """GPUs of this node, asked for by another process: one that has looked at a GPU cannot fork
    others that use it."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def forked(function: Callable[..., Any], gpus: int, plan: Plan, *args: Any) -> list[Any]:
    """[function(rank, plan, store, *args) for each rank]. Raises RankError."""
    with tempfile.TemporaryDirectory(prefix="gpu-node-") as folder:
        return run_ranks(function, gpus, plan, f"{folder}/store", *args, timeout=TIMEOUT)


def one(case: Case, gpus: int, rivals: dict[str, Any], rounds: int, where: Where) -> dict[str, Any]:
    plan = planned(case, gpus, where)
    problem = plan if isinstance(plan, str) else refusal(plan)
    if isinstance(plan, str) or problem:
        return {"failed": problem}
    beside = {name: rivals[name] for name in case.rivals if name in rivals}
    try:
        ranks = forked(run_case, gpus, plan, beside, rounds, where.dry)
    except RankError as error:
        return {"failed": str(error).strip().splitlines()[-1]}
    return summary(plan, ranks, beside) | {"words": [f"model={case.model}", *case.words]}


def summary(plan: Plan, ranks: list[dict[str, Any]], beside: dict[str, Any]) -> dict[str, Any]:
    """All ranks as one row: seconds of rank 0, which barriers make everybody's, and memory of the
    worst."""
    flops = (
        model_flops_per_token(plan.model, plan.job.train.seq_len)
        * plan.parallel.global_batch_tokens
    )
    sheet = sheet_flops(ranks[0]["name"])
    row: dict[str, Any] = {
        "gpu": ranks[0]["name"],
        "planned_s": plan.time.step_s,
        "planned_mfu": plan.mfu,
    }
    row |= {"planned_gib": plan.memory.total / GIB, "planned_exposed_s": plan.time.exposed_comm_s}
    for side in ("ours", *beside):
        if side not in ranks[0]:
            continue
        row[side] = dict(ranks[0][side])
        if "failed" in row[side]:
            continue
        rate = flops / row[side]["step_s"] / plan.parallel.world_size
        for name in ("peak_gib", "reserved_gib", "loss"):  # a loss is where the last stage is
            row[side][name] = max(rank[side][name] for rank in ranks)
        row[side] |= {"tokens_per_s": plan.parallel.global_batch_tokens / row[side]["step_s"]}
        row[side] |= {"of_ceiling": rate / min(rank[side]["ceiling_flops"] for rank in ranks)}
        row[side] |= {"mfu": rate / sheet if sheet else None}
    for name in ("exposed_s", "bytes"):
        row[name] = {
            axis: max(rank.get(name, {}).get(axis, 0) for rank in ranks)
            for axis in ranks[0].get(name, {})
        }
    return row | {"idle_s": max(rank.get("idle_s", 0.0) for rank in ranks)}


if __name__ == "__main__":
    sys.exit(main())
