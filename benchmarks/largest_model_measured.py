"""The largest model that trains in a small memory, by technique: as planned, and as found by trying.

    python -m benchmarks.largest_model_measured [--device-mib 768] [--only NAME ...] [--dir DIR]

As root, with the memory controller of cgroup v1. Each rank is a process in a cgroup of its own, whose
limit is a device: `--device-mib` beyond what a process takes before it has a model. Models differ in
their number of layers. The planned number is the largest whose memory by the plan fits; the measured
number is the largest whose ranks train two steps without being killed, found upwards or downwards
from the planned one. Freed blocks of a MiB return to the system at once, as those of a device return to
its allocator; glibc else keeps up to twice a model's memory. Prints a row per technique and writes
benchmarks/results/largest_model_measured.json. ZeRO-Offload has no row, since the memory of this
host is that of its devices.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
from typing import NamedTuple

import torch

from benchmarks.offload import GROUPS, MIB
from benchmarks.vs_torch.harness import ROOT, conditions
from orchestrator.cluster.resolve import resolve
from orchestrator.config.compose import load
from orchestrator.plan import Plan
from orchestrator.planner.build import build_plan
from trainer.comm.mesh import Mesh
from trainer.engine import Engine
from trainer.precision import recipe
from trainer.verify.ranks import RankError, run_ranks
from trainer.verify.samples import step_batches

RESULT = ROOT / "benchmarks" / "results" / "largest_model_measured.json"
HIDDEN = 512
STEPS = 2
#: No more layers are tried: with everything on the disk, the disk is the bound.
MOST_LAYERS = 96
MODEL = (
    "model=tiny",
    f"model.hidden={HIDDEN}",
    f"model.heads={HIDDEN // 64}",
    f"model.kv_heads={HIDDEN // 64}",
    "model.head_dim=64",
    f"model.ffn_hidden={HIDDEN * 11 // 4}",
    "model.vocab=4096",
    "train.precision=fp32",
    "train.seq_len=32",
    "optim.warmup_steps=0",
    "parallel.micro_batch_size=1",
    f"train.steps={STEPS}",
)


M_MMAP_THRESHOLD = -3


class Technique(NamedTuple):
    """Words of a layout and its ranks."""

    ranks: int
    words: tuple[str, ...]
    stages: int = 1


class Largest(NamedTuple):
    """Layers of the largest model of a technique, and its parameters."""

    planned_layers: int
    measured_layers: int
    planned_parameters: int
    measured_parameters: int


def techniques(folder: str) -> dict[str, Technique]:
    disk = ("train.offload=disk", f"train.offload_dir={folder}", "train.offload_buffer_mib=64")
    weights = (*disk, "train.offload_weights=true")
    return {
        "none": Technique(1, ("parallel=tp1",)),
        "dp2": Technique(2, ("parallel=ddp",)),
        "dp2 zero1": Technique(2, ("parallel=dp2_zero1",)),
        "dp2 zero2": Technique(2, ("parallel=dp2_zero2",)),
        "dp2 zero3": Technique(2, ("parallel=dp2_zero3",)),
        "dp4 zero3": Technique(4, ("parallel=dp4_zero3",)),
        "tp2": Technique(2, ("parallel=tp2",)),
        "pp2": Technique(2, ("parallel=pp2",), stages=2),
        "states on the disk": Technique(1, ("parallel=tp1", *disk)),
        "dp2 zero3, states on the disk": Technique(2, ("parallel=dp2_zero3", *disk)),
        "states and weights on the disk": Technique(1, ("parallel=tp1", *weights)),
    }


def plan_of(technique: Technique, layers: int) -> Plan:
    words = [
        "cluster=local",
        "cluster.nodes=1",
        f"cluster.gpus_per_node={technique.ranks}",
        "cluster.gpu.memory_gib=64",
        *MODEL,
        f"model.layers={layers}",
        f"train.global_batch_samples={technique.ranks * 2}",
        *technique.words,
    ]
    config = load(words, None)
    return build_plan(config, resolve(config.cluster))


def planned_bytes(plan: Plan) -> int:
    """Bytes of a rank's model: on the device, and on the host, which is the same memory here."""
    return plan.memory.total - plan.memory.context + plan.memory.host


def trains(plan: Plan, device: int) -> bool:
    """Trains a plan with each rank in a cgroup of so many bytes beyond its code. Returns whether no rank
    was killed."""
    groups = [
        GROUPS / f"orch-largest-{os.getpid()}-{rank}" for rank in range(plan.parallel.world_size)
    ]
    for group in groups:
        group.mkdir()

    def steps(rank: int) -> None:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
        group = groups[rank]
        (group / "cgroup.procs").write_text(str(os.getpid()))
        mesh = Mesh.from_plan(plan, rank)
        context = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(context + device))
        train = plan.job.train
        engine = Engine(plan, mesh, torch.device("cpu"), recipe(train))
        for step in range(train.steps):
            consumed = step * plan.parallel.global_batch_samples
            batches, valid_tokens = step_batches(plan, mesh.coord, consumed)
            _, norm = engine.gradients(batches, valid_tokens)
            engine.update(norm, 1e-3)

    try:
        run_ranks(steps, plan.parallel.world_size)
    except RankError as error:
        if "code -9" not in str(error):
            raise
        return False
    finally:
        for group in groups:
            group.rmdir()
    return True


def largest_planned(technique: Technique, device: int) -> int:
    """Returns the most layers whose planned memory fits; 0: not a single one does."""
    layers = 0
    while layers < MOST_LAYERS:
        plan = plan_of(technique, layers + technique.stages)
        if planned_bytes(plan) > device:
            break
        layers += technique.stages
    return layers


def largest_measured(technique: Technique, device: int, planned: int) -> int:
    """Returns the most layers that train, looked for from the planned number."""
    layers = max(planned, technique.stages)
    if trains(plan_of(technique, layers), device):
        while layers < MOST_LAYERS:
            if not trains(plan_of(technique, layers + technique.stages), device):
                break
            layers += technique.stages
        return layers
    while layers > 0:
        layers -= technique.stages
        if layers and trains(plan_of(technique, layers), device):
            break
    return layers


def largest(technique: Technique, device: int) -> Largest:
    planned = largest_planned(technique, device)
    measured = largest_measured(technique, device, planned)
    return Largest(
        planned,
        measured,
        parameters(technique, planned),
        parameters(technique, measured),
    )


def parameters(technique: Technique, layers: int) -> int:
    return plan_of(technique, layers).model.parameters if layers else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.largest_model_measured",
        description=__doc__.partition("\n")[2],
    )
    parser.add_argument("--device-mib", type=int, default=768)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    device = args.device_mib * MIB
    rows = dict[str, dict]()
    before = conditions(device_mib=args.device_mib, words=MODEL)
    torch.set_num_threads(1)
    for name, technique in techniques(args.dir).items():
        if args.only and name not in args.only:
            continue
        rows[name] = largest(technique, device)._asdict()
        print(f"{name:<32} {rows[name]}", flush=True)
    if not args.only:
        RESULT.write_text(json.dumps({"conditions": before, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
