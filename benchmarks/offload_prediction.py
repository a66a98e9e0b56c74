"""The plan's step time with an offloaded optimizer against the trainer's, on this machine, from its
own measured rates.

    python -m benchmarks.offload_prediction [--layers 4] [--seq-len 64] [--steps 5] [--dir DIR]
        [--out FILE]

One process trains with the optimizer in memory, on the host, delayed, and on the disk, also with the
weights or with inputs of recomputed layers there, and after each step measures as `orch bench` does (products, memory, AdamW, disk), since what else runs on the
machine changes both. Plans are made of the median of a way's measurements; printed: seconds that
the plan predicts, the median of the steps after the first, and their ratio. The file,
benchmarks/results/offload_prediction.json by default, has them with the conditions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULT = Path(__file__).resolve().parent / "results" / "offload_prediction.json"
WAYS = {
    "in memory": [],
    "on the host": ["train.offload=host"],
    "on the host, delayed": ["train.offload=host", "train.offload_delayed=true"],
    "on the disk": ["train.offload=disk", "train.offload_buffer_mib=64"],
    "on the disk, weights too": [
        "train.offload=disk",
        "train.offload_buffer_mib=64",
        "train.offload_weights=true",
    ],
    "recomputed": ["train.recompute=full"],
    "recomputed, inputs on the disk": [
        "train.recompute=full",
        "train.offload_activations=disk",
    ],
}


def words(options: argparse.Namespace, way: str) -> list[str]:
    hidden = options.hidden
    found = [
        "cluster=local",
        "cluster.nodes=1",
        "cluster.gpus_per_node=1",
        "model=tiny",
        "parallel=tp1",
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
        f"model.vocab={options.vocab}",
        f"train.seq_len={options.seq_len}",
        "train.precision=fp32",
    ]
    found += [
        "train.global_batch_samples=1",
        f"train.steps={options.steps}",
        "parallel.micro_batch_size=1",
    ]
    return [*found, *WAYS[way], *([f"train.offload_dir={options.dir}"] if "disk" in way else [])]


def child(plans: list[str], folder: str) -> None:
    """Measures and trains; prints a JSON object."""
    import torch
    import torch.distributed as dist

    from orchestrator.plan import from_json
    from trainer.bench.host import host
    from trainer.bench.measure import compute
    from trainer.comm.control import WORLD
    from trainer.comm.mesh import Mesh
    from trainer.engine import Engine
    from trainer.precision import recipe
    from trainer.verify.samples import micro_batch

    device = torch.device("cpu")
    found = {"measured": [], "steps": []}

    with tempfile.TemporaryDirectory() as home:
        dist.init_process_group("gloo", init_method=f"file://{home}/store", rank=0, world_size=1)
        for text in plans:
            plan = from_json(text.encode())
            engine = Engine(plan, Mesh.from_plan(plan, 0), device, recipe(plan.job.train))
            seconds = list[float]()
            measured = list[dict]()
            for step in range(plan.job.train.steps):
                batch = micro_batch(plan, [step])
                began = time.perf_counter()
                _, norm = engine.gradients([batch], batch.valid_tokens)
                engine.update(norm, 1e-3)
                seconds.append(time.perf_counter() - began)
                one = {
                    "compute": compute("fp32", device),
                    "host": host(device, Path(folder), 1, WORLD),
                }
                measured.append(one)
            found["steps"].append(seconds)
            found["measured"].append(measured)
            del engine
        print(json.dumps(found))
        dist.destroy_process_group()


def measured_cluster(cluster, measured: list[dict]):  # type: ignore[no-untyped-def]
    """With the median of what was measured."""
    from msgspec import structs

    from orchestrator.plan.document import Host, Measured

    sizes = {
        name: statistics.median(one["host"][name] for one in measured)
        for name in measured[0]["host"]
    }
    rates = {
        name: statistics.median(one["compute"][name] for one in measured)
        for name in measured[0]["compute"]
    }
    sizes |= {name: int(sizes[name]) for name in ("memory_bytes", "disk_bytes")}
    cores = Measured(
        source="benchmark",
        matmul_flops={"fp32": rates["matmul_flops"]},
        attention_flops={"fp32": rates["attention_flops"]},
        memory_bytes_per_s=rates["memory_bytes_per_s"],
        launch_s=rates["launch_s"],
    )
    return structs.replace(cluster, measured=cores, host=Host(**sizes, source="benchmark"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {
        "layers": 4,
        "hidden": 1024,
        "vocab": 8192,
        "seq-len": 64,
        "steps": 5,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(json.load(sys.stdin), options.dir)
    from benchmarks.offload import file_system
    from benchmarks.vs_torch.harness import conditions
    from orchestrator.cluster.resolve import resolve
    from orchestrator.config.compose import load
    from orchestrator.plan import to_json
    from orchestrator.planner.build import build_plan

    sizes = ("layers", "hidden", "vocab", "seq_len", "steps")
    before = conditions(
        **{name: getattr(options, name) for name in sizes},
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        file_system=file_system(options.dir),
    )
    configs = {way: load(words(options, way), None) for way in WAYS}
    cluster = resolve(configs["in memory"].cluster)
    plans = [to_json(build_plan(config, cluster)).decode() for config in configs.values()]
    command = [
        sys.executable,
        "-m",
        "benchmarks.offload_prediction",
        "--child",
        "--dir",
        options.dir,
    ]
    done = subprocess.run(command, input=json.dumps(plans), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    rows = {}
    for at, (way, config) in enumerate(configs.items()):
        here = measured_cluster(cluster, found["measured"][at])
        plan = build_plan(config, here)
        median = statistics.median(found["steps"][at][1:])
        parts = ", ".join(
            f"{name} {seconds:.2f}" for name, seconds in plan.time.terms.items() if seconds > 5e-3
        )
        print(
            f"{way:<30} planned {plan.time.step_s:6.2f} s  measured {median:6.2f} s "
            f" {plan.time.step_s / median:5.2f}"
        )
        print(f"    {parts}; disk {here.host.disk_bytes_per_s / 1e6:,.0f} MB/s, steps"
              f" {[round(one, 2) for one in found['steps'][at]]}")  # fmt: skip
        rows[way] = {
            "planned_s": plan.time.step_s,
            "measured_s": median,
            "planned_over_measured": plan.time.step_s / median,
            "terms": plan.time.terms,
            "steps_s": found["steps"][at],
            "disk_bytes_per_s": here.host.disk_bytes_per_s,
        }
    options.out.write_text(json.dumps({"conditions": before, "ways": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
