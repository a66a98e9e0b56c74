"""What tests of overlap do in processes with fake GPUs (`tests.beds.fakegpu`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.beds import fakegpu
from trainer.comm.collectives import CommCounter
from trainer.model.linear import Linear
from trainer.parallel.column_parallel import OverlappedColumnLinears
from trainer.parallel.row_parallel import OverlappedRowLinear

WIDTH = 64
TOKENS = 256


def order(notes: list[fakegpu.Note]) -> list[str]:
    """What the host enqueues: collectives ("send 0" is the first), where the stream of kernels waits
    for one, products ("multiply") and other kernels ("copy")."""
    compute = next(note.stream for note in notes if note.kind == "K")
    seen = list[str]()
    sends = 0
    sent_on = None  # the stream of a collective whose event has not been recorded yet
    send_of_event = dict[int, int]()
    for note in notes:
        if note.kind == "N":
            seen.append(f"send {sends}")
            sends += 1
            sent_on = note.stream
        elif note.kind == "R" and note.stream == sent_on:
            send_of_event[note.event] = sends - 1
            sent_on = None
        elif note.kind == "W" and note.stream == compute:
            seen.append(f"wait {send_of_event[note.event]}")
        elif note.kind == "K":
            seen.append("multiply" if note.name.startswith("gemm") else "copy")
    return seen


def of_linears(pieces: int, samples: int) -> list[dict[str, list[str]]]:
    """The order of a column-parallel and of a row-parallel linear, on two ranks."""
    return fakegpu.run_ranks(_of_linears, 2, pieces, samples)


def _of_linears(rank: int, pieces: int, samples: int) -> dict[str, list[str]]:
    group = dist.new_group([0, 1])
    counter = CommCounter(gloo=False, measuring=False)
    columns = OverlappedColumnLinears(group, counter, sp=True, pieces=pieces)
    row = OverlappedRowLinear(group, counter, sp=True, pieces=pieces)
    linear = Linear(WIDTH, WIDTH).to("cuda", torch.bfloat16)
    shard, whole = (
        torch.zeros(
            samples,
            tokens,
            WIDTH,
            device="cuda",
            dtype=torch.bfloat16,
            requires_grad=True,
        )
        for tokens in (TOKENS // 2, TOKENS)
    )
    runs = {"column": lambda: columns.run(linear, shard), "row": lambda: row(linear, whole)}
    orders = dict[str, list[str]]()
    fakegpu.events_pending(True)  # or torch waits for none
    for name, run in runs.items():
        out = run()  # the first use of a group makes its connections
        torch.autograd.grad(out, linear.weight, out)
        with fakegpu.recording() as forward:
            out = run()
        x = shard if name == "column" else whole
        with fakegpu.recording() as backward:
            torch.autograd.grad(out, (x, linear.weight), torch.empty_like(out))
        orders |= {name: order(forward.notes), f"{name}, backward": order(backward.notes)}
    return orders
