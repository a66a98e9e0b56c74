"""python -m benchmarks.gpu_node [--minutes 8] [--rounds 8] [--only NAME ...] [--torchtitan DIR]
[--dry]

Runs every technique on the GPUs of this node, unattended, in the order of what matters: about an
hour on eight H100s, or as many as --minutes allows. Each case is a line of words that `orch plan`
takes; its processes are forked here, one a GPU, and end with it. A case that hangs gets half of the
time that remains. What fails is written down with its reason, and the next case goes on. After each
case benchmarks/results/gpu_node.json and docs/performance.md are written, so a run that is cut off
has told what it knew; `--only` replaces single cases and measures those that were not reached.
`orch calibrate --from FILE` takes the result.

Beside ours: a plain loop of torch's modules on DDP or FSDP2, and torchtitan, where it is installed
(`pip install torchtitan`, or --torchtitan with a folder: see benchmarks/kernels.py). In the same
run: the best bf16 matrix product and the rate of memory on all GPUs at once, and NCCL's
collectives. Without GPUs it says so and ends with 0; `--dry` runs all of it with small models on
CPU processes and writes to --out alone: it proves that the program runs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import minutes
from benchmarks.card import card_words, sheet_flops
from benchmarks.gpu_node import page
from benchmarks.gpu_node.cases import SMALL, Case, Where, cases, plan_of, planned
from benchmarks.gpu_node.measure import ceilings, nccl, run_case
from benchmarks.gpu_node.rivals import available
from benchmarks.vs_torch.harness import conditions
from orchestrator.plan import Plan
from orchestrator.plan.codec import to_json
from orchestrator.plan.flops import model_flops_per_token
from orchestrator.plan.trained import refusal
from trainer.verify.ranks import RankError, run_ranks

RESULT = Path(__file__).parents[1] / "results" / "gpu_node.json"
GIB = 1 << 30
#: Seconds for a case: compilation takes minutes.
TIMEOUT = 1800.0


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    gpus_here, card = devices()
    if not gpus_here and not args.dry:
        print("skipped: this machine has no CUDA device")
        return 0
    gpus = args.gpus or gpus_here or 8
    out = args.out or RESULT
    if args.dry and args.out is None:
        out = Path(tempfile.mkdtemp(prefix="gpu-node-")) / RESULT.name
    earlier = args.only and out.exists()
    record = json.loads(out.read_text()) if earlier else {"rows": {}}
    record |= {"gpus": gpus, "dry": args.dry, "conditions": conditions(rounds=args.rounds)}
    where = Where(args.dry, bool(gpus_here), card_words(card))
    limit = minutes.Limit(args.minutes)
    series = minutes.Series(record, limit, out, show=page.line)
    node = Node(gpus, where, limit, args.rounds, available(args.torchtitan))
    for name, measure in node.rows().items():
        is_kept = name in page.CEILINGS and name in series.rows and name not in series.late
        if args.only and name not in args.only and (name not in page.CEILINGS or is_kept):
            continue
        series.measure(name, measure)
        if args.page is not None:
            page.write(record, args.page)
    failed = [name for name, row in series.rows.items() if "failed" in row.get("ours", {})]
    print(f"{series.summary()}; ours failed: {', '.join(failed) or 'never'}; {out}")
    if series.late:
        names = " ".join(map(shlex.quote, series.late))
        print(f"the others: python -m benchmarks.gpu_node --only {names}")
    return 1 if args.dry and (failed or series.failed) else 0


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_node", description=__doc__.partition("\n")[2]
    )
    minutes.add_argument(parser)
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
    return args


def devices() -> tuple[int, str]:
    """GPUs of this node and the name of the first, asked for by another process: one that has
    looked at a GPU cannot fork others that use it."""
    program = (
        "import torch; n = torch.cuda.device_count(); "
        "print(n, torch.cuda.get_device_name(0) if n else '')"
    )
    argv = [sys.executable, "-c", program]
    answer = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    count, _, name = answer.strip().partition(" ")
    return int(count), name


@dataclass(frozen=True)
class Node:
    """The rows of this node: what it can do, then the techniques."""

    gpus: int
    where: Where
    limit: minutes.Limit
    rounds: int
    rivals: dict[str, Any]

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        rows = {
            page.CEILINGS[0]: lambda: self.of_node(ceilings),
            page.CEILINGS[1]: lambda: self.of_node(nccl),
        }
        return rows | {case.name: partial(self.case, case) for case in cases(self.gpus)}

    def forked(self, function: Callable[..., Any], plan: Plan, *args: Any) -> list[Any]:
        """[function(rank, plan, store, *args) for each rank]. Raises RuntimeError with one line."""
        timeout = self.limit.share_s(TIMEOUT)
        with tempfile.TemporaryDirectory(prefix="gpu-node-") as folder:
            store = f"{folder}/store"
            try:
                return run_ranks(function, self.gpus, plan, store, *args, timeout=timeout)
            except RankError as error:
                print(error, file=sys.stderr)
                raise RuntimeError(reason(error)) from None

    def of_node(self, function: Callable[..., Any]) -> dict[str, Any]:
        """What all GPUs can do at once, as the first rank sees it."""
        plan = plan_of(SMALL, (f"parallel=dp{self.gpus}_zero1",), self.gpus, self.where)
        return self.forked(function, plan, self.where.dry)[0]

    def case(self, case: Case) -> dict[str, Any]:
        plan = planned(case, self.gpus, self.where)
        problem = plan if isinstance(plan, str) else refusal(plan)
        if isinstance(plan, str) or problem:
            return {"failed": problem}
        beside = {name: self.rivals[name] for name in case.rivals if name in self.rivals}
        ranks = self.forked(run_case, plan, beside, self.rounds, self.where.dry)
        row = summary(plan, ranks, beside) | {"words": [f"model={case.model}", *case.words]}
        # The cost model does not know of `train.compile`: steps as users train correct it.
        if "step_s" in row["ours"] and plan.job.train.compile:
            row |= {"plan": json.loads(to_json(plan)), "step_s": row["ours"]["step_s"]}
        return row


def reason(error: RankError) -> str:
    """What went wrong on a rank, in one line: the end of its traceback, or where a rank that did
    not finish stands."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if "did not finish" not in lines[0]:
        return lines[-1]
    innermost = next((line for line in lines if line.startswith("File ")), "")
    return f"{lines[0]} {innermost}".strip()


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
