"""A model whose state is several times a memory limit, trained from the disk; and the disk's own
bandwidth beside it.

    python -m benchmarks.offload [--limit-mib 640] [--layers 14] [--steps 3] [--dir DIR] [--out FILE]

As root, with the memory controller of cgroup v1. One process trains without a limit and all in
memory; another in a cgroup of `--limit-mib`, with `train.offload=disk` and the weights in mapped
pages. Printed: losses of both, the state's bytes over the limit, the most memory that tensors took
(`rss`: pages of the disk are not among it) and that the cgroup was charged with, and the bytes a
second that the disk moved in updates over those of a probe that reads and writes as much and
computes nothing, in the same process between the steps. The file, benchmarks/results/offload.json by
default, has these numbers with what was planned and the conditions.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup/memory")
RESULT = Path(__file__).resolve().parent / "results" / "offload.json"
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
    found += [
        f"model.layers={options.layers}",
        f"model.hidden={hidden}",
        f"model.heads={hidden // 64}",
    ]
    found += [
        f"model.kv_heads={hidden // 64}",
        "model.head_dim=64",
        f"model.ffn_hidden={hidden * 11 // 4}",
    ]
    found += [
        "model.vocab=8192",
        "train.seq_len=32",
        "train.global_batch_samples=1",
        f"train.steps={options.steps}",
    ]
    found += ["optim.warmup_steps=0", "parallel.micro_batch_size=1"]
    if disk:
        found += [
            "train.offload=disk",
            "train.offload_weights=true",
            f"train.offload_buffer_mib={options.buffer_mib}",
        ]
        found += [f"train.offload_dir={options.dir}"]
    return found


def child(plan_text: str) -> None:
    """Trains as one rank; prints a JSON object."""
    import torch
    import torch.distributed as dist

    from orchestrator.plan import from_json
    from orchestrator.plan.offload import offload_of
    from trainer.comm.mesh import Mesh
    from trainer.engine import Engine
    from trainer.precision import recipe
    from trainer.verify.samples import micro_batch

    plan = from_json(plan_text.encode())
    with tempfile.TemporaryDirectory() as home:
        dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=0, world_size=1)
        engine = Engine(plan, Mesh.from_plan(plan, 0), torch.device("cpu"), recipe(plan.job.train))
        losses = list[float | None]()
        seconds = list[float]()
        phases = list[tuple[float, float]]()
        moved = 0
        disk = offload_of(plan.job.train)
        probe = Probe(disk.dir) if disk.optimizer else None
        for step in range(plan.job.train.steps):
            if probe:  # between the updates, so that what else runs on the machine slows both
                probe.run()
            began = time.perf_counter()
            batch = micro_batch(plan, [step])
            loss, norm = engine.gradients([batch], batch.valid_tokens)
            between = time.perf_counter()
            before = disk_bytes()
            engine.update(norm, 1e-3)
            ended = time.perf_counter()
            moved += disk_bytes() - before
            losses.append(engine.mean_loss(loss, batch.valid_tokens))
            seconds.append(ended - began)
            phases.append((between - began, ended - between))
        found: dict[str, object] = {"losses": losses, "step_s": seconds, "phases": phases}
        if probe:
            probe.run()
            found |= {
                "update": moved / sum(update for _, update in phases),
                "probe": probe.moved / probe.seconds,
            }
        print(json.dumps(found))
        dist.destroy_process_group()


def disk_bytes() -> int:
    """Bytes that this process had read from disks or written to them, as the kernel counts: pages
    too, if they were not in memory."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"]) + int(lines["write_bytes"])


def file_system(folder: str) -> str:
    """The kind of file system of a folder, as `stat` names it."""
    command = ["stat", "--file-system", "--format=%T", folder]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


class Probe:
    """As `fio` would: threads that read and write blocks of a file past the page cache, each in
    turn, and compute nothing. Knows nothing of the trainer."""

    def __init__(self, folder: str, size: int = 512 * MIB, block: int = 2 * MIB, threads: int = 8):
        self.size = size
        self.block = block
        self.threads = threads
        path = Path(folder) / f"probe-{os.getpid()}"
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        path.unlink()
        self.rooms = [mmap.mmap(-1, block) for _ in range(threads)]  # begin on a page
        self.moved = 0
        self.seconds = 0.0
        for number in range(size // block):  # so that reads find data
            os.pwritev(self.fd, [self.rooms[0]], number * block)

    def run(self) -> None:
        began = time.perf_counter()
        with ThreadPoolExecutor(self.threads) as threads:
            list(threads.map(self._half, range(self.threads)))
        self.seconds += time.perf_counter() - began
        self.moved += self.size

    def _half(self, thread: int) -> None:
        """Every other thread reads, so that as many bytes go each way."""
        move = os.preadv if thread % 2 else os.pwritev
        for number in range(thread, self.size // self.block, self.threads):
            move(self.fd, [self.rooms[thread]], number * self.block)


def run(plan: str, limit: int | None) -> dict:
    group = None if limit is None else GROUPS / f"orch-offload-{os.getpid()}"
    command = [sys.executable, "-m", "benchmarks.offload", "--child"]
    most = [0]
    stop = threading.Event()
    try:
        if group is not None:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(limit))

        def enter() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        def watch() -> None:
            while group is not None and not stop.wait(0.02):
                stat = dict(
                    line.split() for line in (group / "memory.stat").read_text().splitlines()
                )
                most[0] = max(most[0], int(stat["total_rss"]))

        thread = threading.Thread(target=watch)
        thread.start()
        done = subprocess.run(command, input=plan, capture_output=True, text=True, preexec_fn=enter)
        stop.set()
        thread.join()
        if done.returncode:
            sys.exit(
                f"the run with limit {limit} ended with {done.returncode}:\n{done.stderr[-2000:]}"
            )
        found = json.loads(done.stdout.splitlines()[-1])
        if group is not None:
            found |= {
                "rss": most[0],
                "charged": int((group / "memory.max_usage_in_bytes").read_text()),
            }
        return found
    finally:
        if group is not None and group.exists():
            group.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-mib", type=int, default=640)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--buffer-mib", type=int, default=64)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(sys.stdin.read())
    from benchmarks.vs_torch.harness import conditions
    from orchestrator.cluster.resolve import resolve
    from orchestrator.config.compose import load
    from orchestrator.plan import to_json
    from orchestrator.planner.build import build_plan

    plans = []
    for disk in (False, True):
        config = load(words(options, disk), None)
        plans.append(build_plan(config, resolve(config.cluster)))
    sizes = ("limit_mib", "layers", "hidden", "steps", "buffer_mib")
    before = conditions(
        **{name: getattr(options, name) for name in sizes},
        file_system=file_system(options.dir),
    )
    memory = plans[0].memory
    limit = options.limit_mib * MIB
    state = memory.params + memory.grads + memory.optimizer
    free = run(to_json(plans[0]).decode(), None)
    limited = run(to_json(plans[1]).decode(), limit)
    apart = max(abs(a - b) for a, b in zip(free["losses"], limited["losses"], strict=True))
    print(
        f"state {state / MIB:,.0f} MiB = {state / limit:.1f} x the limit of {options.limit_mib} MiB"
    )
    print(
        f"losses {free['losses']} without a limit, {limited['losses']} within it: apart by"
        f" {apart:.1g}"
    )
    for name, one in {"without a limit": free, "within": limited}.items():
        print(
            f"{name}: "
            + ", ".join(f"{a:.2f} + {b:.2f}" for a, b in one["phases"])
            + " s (gradients + update)"
        )
    print(
        f"most of tensors and code {limited['rss'] / MIB:,.0f} MiB; charged"
        f" {limited['charged'] / MIB:,.0f} MiB"
    )
    ratio = limited["update"] / limited["probe"]
    print(
        f"update {limited['update'] / 1e6:,.0f} MB/s, probe {limited['probe'] / 1e6:,.0f} MB/s:"
        f" {ratio:.0%}"
    )
    result = {
        "state_bytes": state,
        "limit_bytes": limit,
        "planned_host_bytes": plans[1].memory.host,
        "planned_disk_bytes": plans[1].memory.disk,
        "largest_difference_of_losses": apart,
        "without_a_limit": free,
        "within": limited,
        "update_over_probe": ratio,
    }
    options.out.write_text(json.dumps({"conditions": before, "result": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
