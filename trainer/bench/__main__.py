"""`python -m trainer.bench`: one worker of `orch bench`. Rank 0 reports every number as it is
known."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from orchestrator.plan import Exit, Plan, PlanError, load_plan
from orchestrator.plan.offload import offload_of
from orchestrator.plan.worker import WorkerEnv
from trainer.comm.check import check_env, check_peers
from trainer.comm.connect import choose_device, connect
from trainer.errors import exit_code
from trainer.worker.reporter import Reporter

from .cases import OPERATIONS, SIZES, cases
from .host import host
from .measure import compute, operation, seconds

_TOO_LONG_S = 2.0  # for one operation: larger messages are left out


def bench(plan: Plan, env: WorkerEnv, reporter: Reporter) -> None:
    check_env(plan, env)
    device = choose_device(plan, env)
    control = connect(env, device)
    check_peers(plan, env, control)
    wanted = cases(plan)
    precisions = [p for p in ("fp32", "bf16") if p in plan.cluster.gpu.peak_flops]

    def tell(name: str, **fields: str | int | float) -> None:
        if env.rank == 0:
            reporter.event(name, **fields)

    tell("bench_total", total=1 + len(precisions) + len(wanted) * len(OPERATIONS) * len(SIZES))
    for precision in precisions:
        tell("bench_compute", precision=precision, **compute(precision, device))
    away = offload_of(plan.job.train).dir
    folder = Path(away) if away else Path(env.run_dir) / "offload"
    tell("bench_host", **host(device, folder, plan.cluster.gpus_per_node, control))
    for case in wanted:
        made = [dist.new_group(list(ranks)) for ranks in case.groups]
        mine = next(
            (one for one, ranks in zip(made, case.groups, strict=True) if env.rank in ranks), None
        )
        group = mine if isinstance(mine, dist.ProcessGroup) else None
        for name in OPERATIONS:
            spent = 0.0
            for size in SIZES:
                if (
                    spent > _TOO_LONG_S / 4
                ):  # the next is four times as large or more; the same verdict on every rank
                    tell("bench_skipped", level=case.level, operation=name, size=size)
                    continue
                spent = seconds(
                    operation(name, size, group, device) if group else None, device, control
                )
                tell(
                    "bench_link",
                    level=case.level,
                    operation=name,
                    ranks=case.ranks,
                    size=size,
                    seconds=spent,
                )
        for created in made:
            if isinstance(created, dist.ProcessGroup):
                dist.destroy_process_group(created)
    control.barrier()
    dist.destroy_process_group()


def main() -> int:
    env = WorkerEnv.read(os.environ)
    reporter = Reporter(env.report_fd, env.rank, env.epoch)
    code = Exit.DONE
    try:
        bench(load_plan(env.plan), env, reporter)
    except BaseException as error:
        code = exit_code(error)
        if not isinstance(error, PlanError):
            traceback.print_exception(error)
        print(f"trainer.bench: rank {env.rank} on {env.node}: {error}", file=sys.stderr, flush=True)
        reporter.event("failed", error=str(error), exit=int(code))
    reporter.close()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(
        code
    )  # as in trainer.__main__: after a lost peer, destructors of groups would wait for it


if __name__ == "__main__":
    main()
