"""`helm test`: two pods find each other by name and sum a tensor. Exit code 0 when both have the
sum."""

import os
import socket
import time

import torch
import torch.distributed as dist

rank = int(os.environ["JOB_COMPLETION_INDEX"])
host = os.environ["MASTER_ADDR"]
for _ in range(120):  # a pod's name appears a moment after the pod
    try:
        socket.getaddrinfo(host, 29500)
        break
    except OSError:
        time.sleep(0.5)
dist.init_process_group("gloo", init_method=f"tcp://{host}:29500", rank=rank, world_size=2)
value = torch.full((1024,), float(rank + 1))
dist.all_reduce(value)
assert bool((value == 3.0).all()), value[:4]
dist.destroy_process_group()
print(f"rank {rank} of 2 on {socket.gethostname()}: all-reduce is right")
