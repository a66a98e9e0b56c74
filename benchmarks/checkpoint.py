"""What a save costs training: made at once, beside training, into memory; and torch's DCP on the
same state and disk.

Two ranks, each a node, each with `--mib` of optimizer state (master and two moments of one matrix).
Seconds are medians of `--repeat` rounds, of the slower rank; a "step" of training is 50 ms of sleep
between boundaries.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from orchestrator.plan import Plan
from tests.beds.plans import make_plan
from tests.trainer.states import KINDS, Recorder
from trainer.checkpoint.fence import Fence
from trainer.checkpoint.format import StatePiece
from trainer.checkpoint.manager import Checkpoints
from trainer.comm.control import WORLD
from trainer.parallel.params import ParamInfo, even_shard, whole
from trainer.verify.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
STEP_S = 0.05
WIDTH = 1024


def state(rank: int, rows: int, across: bool) -> list[StatePiece]:
    """A rank's half of each tensor: of the rows, or (`across`) of the columns, as row-parallel
    layers hold it."""
    shape = (2 * rows, WIDTH)
    if not across:
        half = rows * WIDTH
        return [
            StatePiece(kind, whole("w", shape), rank * half, torch.randn(half)) for kind in KINDS
        ]
    info = ParamInfo("w", shape, True, (even_shard(1, WIDTH, rank, 2),), replicas=(rank,))
    return [StatePiece(kind, info, 0, torch.randn(rows * WIDTH)) for kind in KINDS]


def seconds(action: Callable[[], object]) -> float:
    """Of the slower rank, from a common start."""
    dist.barrier()
    start = time.perf_counter()
    action()
    mine = time.perf_counter() - start
    return max(float(one) for one in WORLD.all_gather_bytes(str(mine).encode()))


def measure(rank: int, plan: Plan, home: Path, rows: int) -> dict[str, float]:
    """One round of everything."""
    pieces = state(rank, rows, across=False)
    found = {}
    memory = Path("/dev/shm") / f"orch-{os.getuid()}" / home.name / f"node{rank}"
    run = Checkpoints(home / "orch", plan, Fence("bench", 0), rank, Recorder(), memory=memory)
    run.resume(lambda: [])
    run.save(pieces, 1, 0)  # first use of everything
    run.start(pieces, 2, 0), run.settle()
    found["save, made at once"] = seconds(lambda: run.save(pieces, 3, 0, read_back=False))
    found["save, made at once and read back"] = seconds(lambda: run.save(pieces, 4, 0))
    start = time.perf_counter()
    found["save beside training: stall, snapshot"] = seconds(lambda: run.start(pieces, 5, 0))
    boundaries = 0.0
    while run.saved_step != 5:
        time.sleep(STEP_S)
        (votes,) = WORLD.sum_ints([run.vote])
        began = time.perf_counter()
        run.advance(votes)
        boundaries += time.perf_counter() - began
    found["save beside training: stall, at boundaries"] = boundaries
    found["save beside training: start to durable"] = time.perf_counter() - start
    assert run.replicas is not None
    run.replicas.start(pieces, 6, 0)
    run.replicas.settle()
    began = time.perf_counter()
    found["replica beside training: stall, start"] = seconds(
        lambda: run.replicas.start(pieces, 7, 0)
    )
    run.replicas.settle()
    found["replica beside training: start to complete"] = time.perf_counter() - began
    run.replicas.remove()
    found["resume, same layout"] = _resume(home, plan, rank, pieces)
    found["resume, cut along the other dimension"] = _resume(
        home, plan, rank, state(rank, rows, across=True)
    )
    tensors = {f"{piece.kind}.{rank}": piece.data for piece in pieces}
    dcp.save(tensors, checkpoint_id=home / "dcp0")
    found["torch DCP save"] = seconds(lambda: dcp.save(tensors, checkpoint_id=home / "dcp1"))
    group = dist.new_group(backend="gloo")  # its thread makes collectives of its own
    dcp.async_save(tensors, checkpoint_id=home / "dcp2", process_group=group).result()
    pending = []
    found["torch DCP async_save: stall"] = seconds(
        lambda: pending.append(
            dcp.async_save(tensors, checkpoint_id=home / "dcp3", process_group=group)
        )
    )
    pending[0].result()
    return found


def _resume(home: Path, plan: Plan, rank: int, pieces: list[StatePiece]) -> float:
    """Verification, which reads and hashes everything, included."""
    run = Checkpoints(home / "orch", plan, Fence("bench", 0), rank, Recorder())
    return seconds(lambda: run.resume(lambda: pieces))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=192, help="state of a rank")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "checkpoint.json"
    )
    args = parser.parse_args()
    plan = make_plan(dp=2, zero=1, nodes=2, copy_every_steps=1)
    rows = args.mib * 2**20 // (3 * 4 * WIDTH)
    rounds = []
    for _ in range(args.repeat):
        home = Path(tempfile.mkdtemp(prefix="orch-bench-"))
        try:
            rounds.append(run_ranks(measure, 2, plan, home, rows, timeout=300)[0])
        finally:
            shutil.rmtree(home, ignore_errors=True)
            shutil.rmtree(Path("/dev/shm") / f"orch-{os.getuid()}" / home.name, ignore_errors=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    result = {
        "machine": f"{os.cpu_count()} CPUs {platform.machine()}, Linux {platform.release()}",
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "load": [round(one, 1) for one in os.getloadavg()],
        "ranks": 2,
        "mib_a_rank": args.mib,
        "rounds": args.repeat,
        "seconds": {
            name: round(statistics.median(one[name] for one in rounds), 4) for name in rounds[0]
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, value in result["seconds"].items():
        print(f"{value:9.3f} s  {name}")


if __name__ == "__main__":
    main()
