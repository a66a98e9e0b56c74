"""A model whose state is several times a memory limit, trained from the disk; and the disk's own bandwidth beside it.

    python -m benchmarks.offload [--limit-mib 640] [--layers 14] [--steps 3] [--dir DIR]

As root, with the memory controller of cgroup v1. One process trains without a limit and all in memory; another in a
cgroup of `--limit-mib`, with `train.offload=disk` and the weights in mapped pages. Printed: losses of both, the state's
bytes over the limit, the most memory that tensors took (`rss`: pages of the disk are not among it) and that the cgroup
was charged with, and the bytes a second of the optimizer's updates over those of a probe that moves the same chunks and
computes nothing, in the same process after the last step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


def words(options: argparse.Namespace, disk: bool) -> list[str]:
    hidden = options.hidden
    found = [
        "cluster=local",
        "cluster.nodes=1",
        "cluster.gpus_per_node=1",
        "model=tiny",
        "parallel=tp1",
        "train.precision=fp32",
    ]
    found += [f"model.layers={options.layers}", f"model.hidden={hidden}", f"model.heads={hidden // 64}"]
    found += [f"model.kv_heads={hidden // 64}", "model.head_dim=64", f"model.ffn_hidden={hidden * 11 // 4}"]
    found += ["model.vocab=8192", "train.seq_len=32", "train.global_batch_samples=1", f"train.steps={options.steps}"]
    found += ["optim.warmup_steps=0", "parallel.micro_batch_size=1"]
    if disk:
        found += ["train.offload=disk", "train.offload_weights=true", f"train.offload_buffer_mib={options.buffer_mib}"]
        found += [f"train.offload_dir={options.dir}"]
    return found


def child(plan_text: str) -> None:
    """Trains as one rank; prints a JSON object."""
    import torch
    import torch.distributed as dist

    from orchestrator.plan import from_json
    from trainer.comm.mesh import Mesh
    from trainer.engine import Engine
    from trainer.optim.disk import DiskOptimizer
    from trainer.precision import recipe
    from trainer.verify.samples import micro_batch

    plan = from_json(plan_text.encode())
    with tempfile.TemporaryDirectory() as home:
        dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=0, world_size=1)
        engine = Engine(plan, Mesh.from_plan(plan, 0), torch.device("cpu"), recipe(plan.job.train))
        losses, seconds = list[float | None](), list[float]()
        for step in range(plan.job.train.steps):
            began = time.perf_counter()
            batch = micro_batch(plan, [step])
            loss, norm = engine.gradients([batch], batch.valid_tokens)
            engine.update(norm, 1e-3)
            losses.append(engine.mean_loss(loss, batch.valid_tokens))
            seconds.append(time.perf_counter() - began)
        found: dict[str, object] = {"losses": losses, "step_s": seconds}
        if isinstance(engine.optimizer, DiskOptimizer):
            optimizer = engine.optimizer
            found |= {"update": optimizer.moved / optimizer.seconds, "probe": probe(optimizer)}
        print(json.dumps(found))
        dist.destroy_process_group()


def probe(optimizer) -> float:  # type: ignore[no-untyped-def]
    """Bytes a second of the same reads and writes of the same file, side by side, without any computation."""
    began = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:

        def each(move, slot: int) -> None:  # type: ignore[no-untyped-def]
            for chunk in optimizer.chunks:
                move(optimizer._record(chunk, slot), chunk.offset)

        jobs = [threads.submit(each, optimizer.file.read, 0), threads.submit(each, optimizer.file.write, 1)]
        for job in jobs:
            job.result()
    return 2 * optimizer.bytes / (time.perf_counter() - began)


def run(plan: str, limit: int | None) -> dict:
    group = None if limit is None else GROUPS / f"orch-offload-{os.getpid()}"
    command = [sys.executable, "-m", "benchmarks.offload", "--child"]
    most, stop = [0], threading.Event()
    try:
        if group is not None:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit))

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        def watch() -> None:
            while group is not None and not stop.wait(0.02):
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                most[0] = max(most[0], int(stat["total_rss"]))

        thread = threading.Thread(target=watch)
        thread.start()
        done = subprocess.run(command, input=plan, capture_output=True, text=True, preexec_fn=enter)
        stop.set()
        thread.join()
        if done.returncode:
            sys.exit(f"the run with limit {limit} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        if group is not None:
            found |= {"rss": most[0], "charged": int((group / "memory.max_usage_in_bytes").read_text())}
        return found
    finally:
        if group is not None and group.exists():
            group.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mib", type=int, default=640)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--buffer-mib", type=int, default=64)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(sys.stdin.read())
    from orchestrator.cluster.resolve import resolve
    from orchestrator.config.compose import load
    from orchestrator.plan import to_json
    from orchestrator.planner.build import build_plan

    plans = []
    for disk in (False, True):
        config = load(words(options, disk), None)
        plans.append(build_plan(config, resolve(config.cluster)))
    memory, limit = plans[0].memory, options.limit_mib * MIB
    state = memory.params + memory.grads + memory.optimizer
    free, limited = run(to_json(plans[0]).decode(), None), run(to_json(plans[1]).decode(), limit)
    apart = max(abs(a - b) for a, b in zip(free["losses"], limited["losses"], strict=True))
    print(f"state {state / MIB:,.0f} MiB = {state / limit:.1f} x the limit of {options.limit_mib} MiB")
    print(f"losses {free['losses']} without a limit, {limited['losses']} within it: apart by {apart:.1g}")
    print(f"seconds a step {free['step_s']} without, {limited['step_s']} within")
    print(f"most of tensors and code {limited['rss'] / MIB:,.0f} MiB; charged {limited['charged'] / MIB:,.0f} MiB")
    ratio = limited["update"] / limited["probe"]
    print(f"update {limited['update'] / 1e6:,.0f} MB/s, probe {limited['probe'] / 1e6:,.0f} MB/s: {ratio:.0%}")


if __name__ == "__main__":
    main()
