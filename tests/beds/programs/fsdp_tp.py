"""FSDP2 and tensor parallelism over the plan's mesh: a small MLP on seeded data, its loss after
each step.

The losses are those of one process whatever the mesh, since every data-parallel rank takes its
share of one batch. Arguments: steps; then, if it is to save, folder and seconds a step. It saves
every five steps by torch's distributed checkpoint, which any mesh can load, and when the run must
end; rank 0 writes a line for each step into `steps.txt` of the folder: time, step, ranks, loss.
Runs under orch, and under torchrun as one axis dp.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import orch_report

SAVE_EVERY = 5


class Checkpoints:
    """The checkpoints of the model and the optimizer in a folder."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer

    def load(self) -> int:
        """Loads the newest checkpoint; returns its step, 0 without one."""
        checkpoints = sorted(self.folder.glob("step-*"))
        if not checkpoints:
            return 0
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=checkpoints[-1])
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        return int(checkpoints[-1].name.removeprefix("step-"))

    def save(self, step: int) -> None:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        part = self.folder / "part"
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=part)
        if dist.get_rank() == 0:
            part.rename(self.folder / f"step-{step:06}")
            for old in sorted(self.folder.glob("step-*"))[:-2]:
                shutil.rmtree(old)
        dist.barrier()


def main() -> None:
    steps = int(sys.argv[1])
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    orch_report.save_requested()
    dist.init_process_group("gloo")
    mesh = orch_report.mesh(axes=("tp", "dp") if orch_report.active() else ("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if "tp" in mesh.mesh_dim_names and mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dp = mesh["dp"].size()
    at = mesh["dp"].get_local_rank()
    checkpoints = Checkpoints(folder, model, optimizer) if folder else None
    first_step = checkpoints.load() if checkpoints else 0
    for step in range(first_step + 1, steps + 1):
        if folder and not (folder / "hurry").exists():
            time.sleep(float(sys.argv[3]))
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        shard = batch.chunk(dp)[at]
        loss = (model(shard) - shard).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_sum = loss.detach().clone()
        dist.all_reduce(loss_sum, group=mesh["dp"].get_group())
        mean_loss = loss_sum.item() / dp
        orch_report.report(step=step, loss=mean_loss, tokens=8, samples=8 * step)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean_loss:.5f}", flush=True)
            if folder:
                with (folder / "steps.txt").open("a") as file:
                    file.write(f"{time.time()} {step} {dist.get_world_size()} {mean_loss:.6f}\n")
        must_save = orch_report.must_save()
        if checkpoints and (must_save or step % SAVE_EVERY == 0):
            with orch_report.phase("save"):
                checkpoints.save(step)
        if must_save:
            orch_report.exit_saved(step)
    dist.barrier()  # none closes its connections while another still sums
    dist.destroy_process_group()
    os._exit(0)  # all is told; a thread of torch may abort while Python takes the process down


main()
