"""`python -m trainer.bench`: one worker of `orch bench`. Rank 0 reports every number as soon
as it is known."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.plan import Exit, Plan, PlanError, load_plan
from orchestrator.plan.offload import offload_of
from orchestrator.plan.worker import WorkerEnv
from trainer.comm.check import check_env, check_peers
from trainer.comm.connect import choose_device, connect
from trainer.comm.control import ControlPath
from trainer.errors import exit_code
from trainer.worker.reporter import Reporter

from .cases import OPERATIONS, SIZES, Case, cases
from .host import host
from .measure import compute, operation, seconds

_TOO_LONG_S = 2.0  # for one operation: larger messages are left out


def bench(plan: Plan, env: WorkerEnv, reporter: Reporter) -> None:
    check_env(plan, env)
    device = choose_device(plan, env)
    control = connect(env, device)
    check_peers(plan, env, control)
    bench_cases = cases(plan)
    precisions = [p for p in ("fp32", "bf16") if p in plan.cluster.gpu.peak_flops]

    def report(name: str, **fields: str | int | float) -> None:
        if env.rank == 0:
            reporter.event(name, **fields)

    per_case = len(OPERATIONS) * len(SIZES)
    report("bench_total", total=1 + len(precisions) + len(bench_cases) * per_case)
    for precision in precisions:
        report("bench_compute", precision=precision, **compute(precision, device))
    offload_dir = offload_of(plan.job.train).dir
    folder = Path(offload_dir) if offload_dir else Path(env.run_dir) / "offload"
    report("bench_host", **host(device, folder, plan.cluster.gpus_per_node, control))
    for case in bench_cases:
        _bench_case(case, env.rank, device, control, report=report)
    control.barrier()
    dist.destroy_process_group()


def _bench_case(
    case: Case,
    rank: int,
    device: torch.device,
    control: ControlPath,
    *,
    report: Callable[..., None],
) -> None:
    """Times every operation and size on the groups of a case. Collective over all ranks."""
    groups = [dist.new_group(list(ranks)) for ranks in case.groups]
    members = zip(groups, case.groups, strict=True)
    own_group = next((group for group, ranks in members if rank in ranks), None)
    group = own_group if isinstance(own_group, dist.ProcessGroup) else None
    for name in OPERATIONS:
        duration = 0.0
        for size in SIZES:
            # The next size is four times as large or more. Every rank decides alike.
            if duration > _TOO_LONG_S / 4:
                report(
                    "bench_skipped",
                    level=case.level,
                    operation=name,
                    size=size,
                )
                continue
            timed = operation(name, size, group, device) if group else None
            duration = seconds(timed, device, control)
            report(
                "bench_link",
                level=case.level,
                operation=name,
                ranks=case.ranks,
                size=size,
                seconds=duration,
            )
    for created in groups:
        if isinstance(created, dist.ProcessGroup):
            dist.destroy_process_group(created)


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
    # As in trainer.__main__: after a lost peer the destructors of groups would wait for it.
    os._exit(code)


if __name__ == "__main__":
    main()
