"""`python -m trainer --flush`: the last act of a run that has too few nodes left to train, by one process a node."""

from __future__ import annotations

import torch
import torch.distributed as dist

from orchestrator.plan import Plan
from orchestrator.plan.worker import WorkerEnv, checkpoint_dir, memory_dir

from .checkpoint.fence import Fence
from .checkpoint.memory.copies import open_memory
from .checkpoint.memory.flush import flush
from .checkpoint.save import Target
from .connect import connect
from .metrics.report import Reporter


def flush_memory(plan: Plan, env: WorkerEnv, reporter: Reporter) -> None:
    """Save the newest state that the memories of these nodes hold together, if no checkpoint has it.

    `env` counts nodes: rank and world size are of the processes that flush, whoever holds ranks of the plan. No GPU is
    touched. Raises SaveError, Fenced, and torch's network errors when another node goes away.
    """
    connect(env, torch.device("cpu"))
    target = Target(checkpoint_dir(plan.job.checkpoint.dir, env.run_dir), Fence.of(env), plan, env.rank)
    memory = open_memory(memory_dir(env.run_dir, env.node), reporter)
    flush(target, env.world_size, memory, plan.job.checkpoint.keep_last, reporter)
    dist.barrier()  # nobody leaves while another still reads from it
    dist.destroy_process_group()
