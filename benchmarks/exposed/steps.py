"""Two steps of a layout on fake GPUs, every call recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_node.cases import Where, plan_of
from orchestrator.plan import Plan
from tests.beds import fakegpu
from trainer.comm.mesh import Mesh
from trainer.comm.settings import apply_settings
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.precision import recipe
from trainer.verify.samples import micro_batch

GPUS = 4
WORDS = (
    "train.seq_len=4096",
    "train.global_batch_samples=8",
    "train.compile=false",
    "parallel.micro_batch_size=1",
)
#: Axes of process groups; those of all others carry gradients and weights.
AXES = {"tp": "tp", "kv": "tp", "etp": "tp", "cp": "cp", "experts": "ep", "pp": "pp"}


def plan_for(layout: Sequence[str]) -> Plan:
    """The plan of a model and words on `GPUS` GPUs of one node. Raises OrchError."""
    model, *words = layout
    return plan_of(model, (*WORDS, *words), GPUS, Where(dry=False, cuda=True))


def recorded(layout: list[str]) -> dict[str, Any]:
    """What the first rank calls in two steps. Runs in a process with fake GPUs."""
    return fakegpu.run_ranks(_steps, GPUS, layout)[0]


def _steps(rank: int, layout: list[str]) -> dict[str, Any]:
    plan = plan_for(layout)
    device = torch.device("cuda", rank)
    apply_settings(plan)
    engine = Engine(plan, Mesh.from_plan(plan, rank), device, recipe(plan.job.train))
    samples = samples_of_step(plan.parallel, engine.mesh.coord, 0)
    batches = [micro_batch(plan, indices).to(device) for indices in samples]
    engine.counter.measuring = False

    def step() -> None:
        _, norm = engine.gradients(batches, plan.parallel.global_batch_tokens)
        engine.update(norm, 1e-3)

    for _ in range(2):
        step()
    axes = _axes(engine.mesh, device)
    fakegpu.events_pending(True)  # torch leaves waits for what has happened out
    with fakegpu.recording() as recording:
        step()
        second = fakegpu.noted()
        step()
    fakegpu.events_pending(False)
    notes = recording.notes if rank == 0 else []
    return {"notes": notes, "second": second, "axes": axes}


def _axes(mesh: Mesh, device: torch.device) -> dict[str, str]:
    """{the number of a communicator: its axis}: a collective in each group tells its number."""
    axes = {}
    for name, group in mesh.groups.items():
        with fakegpu.recording() as recording:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        (communicator,) = {
            note.event for note in recording.notes if note.kind == "N" and note.event
        }
        axes.setdefault(str(communicator), AXES.get(name, "dp"))
    return axes
