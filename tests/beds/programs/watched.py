"""DDP that reports with `orch_report` and is watched. Arguments: folder, seconds a step.

Rank 1 takes three times as long. If the file `save` exists, rank 0 saves for 14 seconds, while
rank 1 waits for it, and renames the file to `saved`; if `hang` exists, rank 1 stands still in the
first attempt.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import orch_report

folder = Path(sys.argv[1])
step_s = float(sys.argv[2])
orch_report.save_requested()
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
orch_report.watch(model)
for step in range(1, 1_000_000):
    if rank == 0 and (folder / "save").exists():
        with orch_report.phase("save"):
            time.sleep(14)
        (folder / "save").rename(folder / "saved")
    while rank == 1 and os.environ["ORCH_EPOCH"] == "0" and (folder / "hang").exists():
        time.sleep(0.05)
    time.sleep(step_s * (3 if rank == 1 else 1))
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    orch_report.report(step=step, loss=loss.item())
    if orch_report.must_save():
        orch_report.exit_saved(step)
