"""DDP on a small model: saves each step and goes on from what is saved. Knows nothing of what has
started it.

Arguments: steps, folder, seconds a step. `steps.txt` there gets a line a step of rank 0: time,
step, ranks, loss. The losses are the same on any number of ranks, because they share one batch. The
line of a step is written before the step is saved: a step that is ended in between has two lines
and never none.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

BATCH = 8


def main() -> None:
    steps = int(sys.argv[1])
    folder = Path(sys.argv[2])
    step_s = float(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    model = torch.nn.Linear(4, 1)
    saved = folder / "saved.json"
    first = 0
    if saved.exists():
        first, weights = json.loads(saved.read_text())
        model.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    else:
        torch.manual_seed(0)
        model.reset_parameters()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(first + 1, steps + 1):
        time.sleep(0 if (folder / "hurry").exists() else step_s)
        x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(step))[rank::world]
        loss = ((ddp(x).squeeze(1) - x.sum(1)) ** 2).mean()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        if rank == 0:
            with (folder / "steps.txt").open("a") as file:
                file.write(f"{time.time()} {step} {world} {loss.item() / world:.6f}\n")
            weights = {name: value.tolist() for name, value in model.state_dict().items()}
            saved.with_suffix(".part").write_text(json.dumps([step, weights]))
            saved.with_suffix(".part").replace(saved)
    dist.barrier()  # none closes its connections while another still sums
    dist.destroy_process_group()


main()
