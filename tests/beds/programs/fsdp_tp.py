"""FSDP2 and tensor parallelism over the plan's mesh: a small MLP on seeded data, its loss after
each step.

The losses are those of one process whatever the mesh, since every data-parallel rank takes its
share of one batch. Arguments: steps. Runs under orch, and under torchrun as one axis dp.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import orch_report


def main() -> None:
    dist.init_process_group("gloo")
    mesh = orch_report.mesh("cpu", axes=("tp", "dp") if orch_report.active() else ("dp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    if "tp" in mesh.mesh_dim_names and mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    dp = mesh["dp"].size()
    at = mesh["dp"].get_local_rank()
    for step in range(1, int(sys.argv[1]) + 1):
        batch = torch.randn(8, 16, generator=data)
        shard = batch.chunk(dp)[at]
        loss = (model(shard) - shard).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_sum = loss.detach().clone()
        dist.all_reduce(loss_sum, group=mesh["dp"].get_group())
        orch_report.report(step=step, loss=loss_sum.item() / dp, tokens=8, samples=8 * step)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss_sum.item() / dp:.5f}", flush=True)
    dist.barrier()  # none closes its connections while another still sums
    dist.destroy_process_group()
    os._exit(0)  # all is told; a thread of torch may abort while Python takes the process down


main()
