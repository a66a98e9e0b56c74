"""Our gloo collectives (`trainer.comm.gloo`) beside gloo's own, in turns on forked ranks of this
machine.

    python -m benchmarks.collectives [--ranks 2 4] [--rounds 15]

Prints median milliseconds from barrier to barrier and the median of the ratios of neighbouring
rounds (below 1: ours is faster), by size of the whole buffer; writes
benchmarks/results/collectives.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer.comm import gloo
from trainer.verify.ranks import run_ranks

from .vs_torch.harness import ROOT, conditions

SIZES_KIB = (16, 256, 1024, 4096, 16384, 32768, 65536)
RESULT = ROOT / "benchmarks" / "results" / "collectives.json"


def pairs(
    kib: int, world: int, rank: int
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """(ours, gloo's) by name, on tensors made once."""
    group = dist.group.WORLD
    piece = kib * 256 // world
    whole = torch.randn(world * piece)
    part = torch.empty(piece)
    after = (rank + 1) % world
    before = (rank - 1) % world
    message = torch.randn(piece)
    arrived = torch.empty(piece)

    def reduce_scatter() -> None:
        under_way = gloo.ReduceScatter(whole, group, part)
        under_way.work.wait()
        under_way.finish()

    def send_on() -> None:
        operations = [
            dist.P2POp(dist.isend, message, after),
            dist.P2POp(dist.irecv, arrived, before),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return {
        "all-gather": (
            lambda: gloo.start_all_gather(part, group, whole).wait(),
            lambda: dist.all_gather_into_tensor(whole, part),
        ),
        "reduce-scatter": (reduce_scatter, lambda: dist.reduce_scatter_tensor(part, whole)),
        "rotation": (
            lambda: gloo.start_exchange(message, arrived, after, before, group).wait(),
            send_on,
        ),
    }


def rank_main(rank: int, world: int, rounds: int) -> dict[str, dict[str, list[list[float]]]]:
    found: dict[str, dict[str, list[list[float]]]] = {}
    for kib in SIZES_KIB:
        for name, both in pairs(kib, world, rank).items():
            spent = found.setdefault(name, {}).setdefault(str(kib), [])
            for index in range(rounds + 1):
                times = [0.0, 0.0]
                for side in (0, 1) if index % 2 else (1, 0):
                    dist.barrier()
                    begin = time.perf_counter()
                    both[side]()
                    dist.barrier()
                    times[side] = time.perf_counter() - begin
                if index:
                    spent.append(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    rows: dict[str, dict] = {}
    print(f"{'collective':<26} {'KiB':>6} {'ours':>9} {'gloo':>9} {'ratio':>6}")
    for world in args.ranks:
        for name, sizes in run_ranks(rank_main, world, world, args.rounds, timeout=400.0)[
            0
        ].items():
            for kib, spent in sizes.items():
                ours, own = (statistics.median(column) * 1e3 for column in zip(*spent, strict=True))
                ratio = statistics.median(a / b for a, b in spent)
                row = {
                    "ours_ms": round(ours, 3),
                    "gloo_ms": round(own, 3),
                    "ratio": round(ratio, 3),
                }
                rows.setdefault(f"{name}, {world} ranks", {})[kib] = row
                print(
                    f"{name + f', {world} ranks':<26} {kib:>6} {ours:>7.2f}ms {own:>7.2f}ms"
                    f" {ratio:>6.2f}",
                    flush=True,
                )
    record = {"collectives": rows, "conditions": conditions(rounds=args.rounds)}
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
