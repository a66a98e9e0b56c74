"""python -m benchmarks.gpu_node [--minutes 8] [--rounds 8] [--only NAME ...] [--torchtitan DIR]
[--dry]

Runs every technique on the GPUs of this node, unattended, in the order of what matters, to the end
or as long as --minutes allows. Each case is a line of words that `orch plan`
takes; the processes of ours and of each rival are forked here, one a GPU, and end with it. A side
that hangs gets half of the time that remains. What fails is written down with its reason, and the
next one goes on. benchmarks/results/gpu_node.json is written after each side and docs/performance.md
after each case, so a run that is cut off has told what it knew; `--only` replaces single cases and
measures those that were not reached. `orch calibrate --from FILE` takes the result.

GPUs are a power of two, from 2 on; other numbers and unknown names end with 64. A run of which no
case of ours was measured ends with 1, a dry one also if anything has failed.

Beside ours: a plain loop of torch's modules on DDP or FSDP2, and torchtitan, where it is installed
(`pip install torchtitan`, or --torchtitan with a folder: see benchmarks/kernels.py). In the same
run: the best bf16 matrix product and the rate of memory on all GPUs at once, and NCCL's
collectives. Without GPUs it says so and ends with 0; `--dry` runs all of it with small models on
CPU processes and writes to --out alone, without plans: it proves that the program runs.
"""

from __future__ import annotations

import argparse
import itertools
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
from benchmarks.gpu_node.measure import ceilings, join_of, nccl, run_side
from benchmarks.gpu_node.rivals import available
from benchmarks.vs_torch.harness import conditions
from orchestrator.errors import did_you_mean
from orchestrator.plan import Exit, Plan
from orchestrator.plan.codec import to_json
from orchestrator.plan.flops import model_flops_per_token
from orchestrator.plan.trained import refusal
from trainer.verify.ranks import RankError, run_ranks

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gpu_node.json"
GIB = 1 << 30
#: Seconds for one side of a case: compilation takes minutes.
TIMEOUT = 1800.0
#: In the reason of a side that its share of the time has ended.
TIMED_OUT = "did not finish in time"


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    gpus_here, card = devices()
    if not gpus_here and not args.dry:
        print("skipped: this machine has no CUDA device")
        return 0
    gpus = args.gpus or gpus_here or 8
    if problem := misuse(gpus, args.only):
        print(problem, file=sys.stderr)
        return Exit.USAGE
    out = args.out or RESULT
    if args.dry and args.out is None:
        out = Path(tempfile.mkdtemp(prefix="gpu-node-")) / RESULT.name
    machine = {"gpus": gpus, "card": card, "dry": args.dry}
    record = minutes.earlier(out, machine) if args.only else {}
    record |= machine | {"conditions": conditions(rounds=args.rounds)}
    where = Where(args.dry, bool(gpus_here), card_words(card))
    limit = minutes.Limit(args.minutes)
    series = minutes.Series(record, limit, out, show=page.line)
    node = Node(gpus, where, limit, args.rounds, available(args.torchtitan), series.note)
    kept = [name for name in page.CEILINGS if name in series.rows and name not in series.late]
    names = set(args.only) | set(page.CEILINGS).difference(kept)
    rows = {
        name: measure for name, measure in node.rows().items() if not args.only or name in names
    }
    series.expect(rows)
    for name, measure in rows.items():
        series.measure(name, measure)
        if args.page is not None:
            write_page(record, args.page)
    same_gpus = "" if gpus == gpus_here else f" GPUS={gpus}"
    return told(series, list(rows), out, args.dry, f"make gpu-node{same_gpus}{python_words()}")


def misuse(gpus: int, names: list[str]) -> str:
    """Why there are no such cases, in one line; "" if there are."""
    if gpus < 2 or gpus & (gpus - 1):
        fewer = f"--gpus {1 << (gpus.bit_length() - 1)} takes some of them"
        hint = fewer if gpus > 2 else "make gpu-check is for one"
        return f"gpu_node takes a power of two of GPUs, from 2 on, not {gpus}: {hint}"
    choices = [*page.CEILINGS, *(case.name for case in cases(gpus))]
    unknown = [name for name in names if name not in choices]
    if not unknown:
        return ""
    return f"--only {unknown[0]}: no such case; {did_you_mean(unknown[0], choices, len(choices))}"


def write_page(record: dict[str, Any], path: Path) -> None:
    """The page is made of the result, which has all rows: that it fails ends nothing."""
    try:
        page.write(record, path)
    except Exception as error:
        print(f"{path} is not written: {minutes.error_line(error)}", file=sys.stderr)


def python_words() -> str:
    """The word with which make takes this Python, where it is not the repository's own."""
    return "" if Path(sys.prefix) == ROOT / ".venv" else f" PY={shlex.quote(sys.executable)}"


def told(
    series: minutes.Series, names: list[str], out: Path, dry: bool, command: str = "make gpu-node"
) -> int:
    """Prints what has become of the rows, and the command for those that are not measured. Returns
    the exit code of a run that had these names."""
    failed = [name for name, row in series.rows.items() if "failed" in row.get("ours", {})]
    print(f"{series.summary()}; ours failed: {', '.join(failed) or 'never'}; {out}")
    others = [name for name, row in series.rows.items() if name in series.late or timed_out(row)]
    if others:
        print(f'the others: {command} ONLY="{shlex.join(others)}"')
    if dry and (failed or series.failed):
        return 1
    subjects = [name for name in names if name not in page.CEILINGS] or names
    return 0 if any(is_measured(series.rows[name]) for name in subjects) else 1


def is_measured(row: dict[str, Any]) -> bool:
    return "failed" not in row.get("ours", row)


def timed_out(row: dict[str, Any]) -> bool:
    """Whether a side, or the row, was ended by its share of the time."""
    parts = [row, *(part for part in row.values() if isinstance(part, dict))]
    return any(TIMED_OUT in str(part.get("failed")) for part in parts)


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
    """The rows of this node: what it can do, then the techniques. `note` keeps what a case has so
    far."""

    gpus: int
    where: Where
    limit: minutes.Limit
    rounds: int
    rivals: dict[str, Any]
    note: Callable[[dict[str, Any]], None]

    def rows(self) -> dict[str, Callable[[], dict[str, Any]]]:
        rows = {
            page.CEILINGS[0]: lambda: self.of_node(ceilings),
            page.CEILINGS[1]: lambda: self.of_node(nccl),
        }
        return rows | {case.name: partial(self.case, case) for case in cases(self.gpus)}

    def forked(self, function: Callable[..., Any], plan: Plan, *args: Any) -> list[Any]:
        """[function(rank, plan, *args) for each rank]. Raises RuntimeError with one line."""
        timeout = self.limit.share_s(TIMEOUT)
        join = join_of(plan)
        try:
            return run_ranks(function, self.gpus, plan, *args, timeout=timeout, join=join)
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
        row: dict[str, Any] = {"words": [f"model={case.model}", *case.words]}
        row |= {"planned_s": plan.time.step_s, "planned_mfu": plan.mfu}
        row |= {"planned_gib": plan.memory.total / GIB}
        row |= {"planned_exposed_s": plan.time.exposed_comm_s}
        beside = {name: self.rivals[name] for name in case.rivals if name in self.rivals}
        for side, rival in {"ours": None, **beside}.items():
            row |= self.side(plan, side, rival)
            self.note(row)
            if "failed" in row["ours"]:
                break
        return row

    def side(self, plan: Plan, side: str, rival: Callable[..., Any] | None) -> dict[str, Any]:
        """What a row has of one side."""
        try:
            ranks = self.forked(run_side, plan, rival, self.rounds, self.where.dry)
        except RuntimeError as error:
            return {side: {"failed": str(error)}}
        row = {"gpu": ranks[0]["name"], side: speed(plan, ranks)}
        if rival is not None:
            return row
        # The cost model does not know of `train.compile`: steps as users train correct it.
        is_taken = plan.job.train.compile and not self.where.dry
        taken = {"plan": json.loads(to_json(plan)), "step_s": row[side]["step_s"]}
        return row | communication(ranks) | (taken if is_taken else {})


#: How a traceback begins; its frames are indented, the error below them is not.
TRACEBACK = "Traceback (most recent call last)"


def reason(error: RankError) -> str:
    """What went wrong on a rank, in one line: the error below its traceback, or where a rank that
    did not finish stands."""
    lines = str(error).strip().splitlines()
    if TIMED_OUT in lines[0]:
        return f"{lines[0]} {place(lines[1:])}".strip()
    headers = [index for index, line in enumerate(lines) if TRACEBACK in line]
    below = lines[headers[-1] + 1 :] if headers else lines
    # The compiler adds lines of the user's code below its error.
    return next((line for line in below if line.strip() and not line.startswith(" ")), lines[0])


def place(lines: list[str]) -> str:
    """Where the main thread of the first rank in dumped stacks stands, innermost frame first. The
    signal that asks for the stacks reaches the main thread, which the dump calls the current one;
    others are torch's."""
    of_rank = list(itertools.takewhile(lambda line: TIMED_OUT not in line, lines))
    current = [index for index, line in enumerate(of_rank) if line.startswith("Current thread")]
    frames = of_rank[current[0] if current else 0 :]
    return next((line.strip() for line in frames if line.strip().startswith("File ")), "")


def speed(plan: Plan, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One side on all ranks: seconds of rank 0, which barriers make everybody's, and memory of the
    worst."""
    tokens = plan.parallel.global_batch_tokens
    flops = model_flops_per_token(plan.model, plan.job.train.seq_len) * tokens
    sheet = sheet_flops(ranks[0]["name"])
    side = {name: ranks[0][name] for name in ("step_s", "fastest_s", "slowest_s")}
    for name in ("peak_gib", "reserved_gib", "loss"):  # a loss is where the last stage is
        side[name] = max(rank[name] for rank in ranks)
    rate = flops / side["step_s"] / plan.parallel.world_size
    ceiling = min(rank["ceiling_flops"] for rank in ranks)
    side |= {"tokens_per_s": tokens / side["step_s"], "ceiling_flops": ceiling}
    return side | {"of_ceiling": rate / ceiling, "mfu": rate / sheet if sheet else None}


def communication(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What our ranks have counted in a step: of each number the largest."""
    row: dict[str, Any] = {"idle_s": max(rank["idle_s"] for rank in ranks)}
    for name in ("exposed_s", "bytes"):
        row[name] = {
            axis: max(rank[name].get(axis, 0) for rank in ranks) for axis in ranks[0][name]
        }
    return row


if __name__ == "__main__":
    sys.exit(main())
