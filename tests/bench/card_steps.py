"""What test_card does in a process with fake GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs

from benchmarks import gpu_single
from benchmarks.card import forget, wait_in, waits_of_the_host
from benchmarks.vs_torch.common import LR
from orchestrator.plan import Plan, seal
from orchestrator.plan.model import Moe
from tests.beds import fakegpu
from tests.beds.plans import make_plan, tiny_model
from trainer.comm.mesh import Mesh
from trainer.comm.settings import apply_settings
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.precision import recipe
from trainer.verify.samples import micro_batch

LAYOUTS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "Muon": {"precision": "bf16", "optim_kind": "muon"},
}
#: Without a product of many experts in fp32, the host asks how many tokens each has.
EXPERTS = Moe(experts=4, top_k=2, ffn_hidden=32)


def step_of(plan: Plan) -> Callable[[], object]:
    """The step of the engine of a plan, as gpu_single measures it."""
    device = torch.device("cuda", 0)
    plan = for_cards(plan)
    return gpu_single.ours(plan, device, gpu_single.random_batch(plan, device))


def for_cards(plan: Plan) -> Plan:
    return seal(structs.replace(plan, cluster=structs.replace(plan.cluster, device="cuda")))


def wait_of_the_third(plan: Plan) -> str:
    step = step_of(plan)
    step()
    step()
    return wait_in(step, torch.device("cuda", 0))


def waits() -> dict[str, Any]:
    device = torch.device("cuda", 0)
    steady = {
        name: wait_of_the_third(make_plan(micro_batches=1, **layout))
        for name, layout in LAYOUTS.items()
    }
    experts = make_plan(model=tiny_model(moe=EXPERTS), micro_batches=1)
    numbers = torch.zeros(4, device=device)

    def read() -> None:
        numbers.sum().item()

    def fail() -> None:
        raise RuntimeError("another error")

    with waits_of_the_host(device) as places:
        read()
        read()
    try:
        wait_in(fail, device)
        other_error = ""
    except RuntimeError as error:
        other_error = str(error)
    return {
        "steady": steady,
        "experts": wait_in(step_of(experts), device),
        "elsewhere": wait_in(read, device),
        "copies": places,
        "other": other_error,
        "mode": torch.cuda.get_sync_debug_mode(),
    }


def bytes_after_engines() -> list[int]:
    """Bytes on the card after each of two engines that have trained and are done."""
    device = torch.device("cuda", 0)
    remaining = list[int]()
    for _ in range(2):
        step = step_of(make_plan(precision="bf16", micro_batches=1))
        step()
        del step
        forget(device)
        # What products need belongs to the process; torch 2.11 takes it from its own memory.
        torch._C._cuda_clearCublasWorkspaces()
        remaining.append(torch.cuda.memory_allocated(device))
    return remaining


#: Two ranks each.
SHARED: dict[str, dict[str, Any]] = {
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "pp": {"pp": 2},
}


def waits_of_ranks() -> dict[str, list[str]]:
    """Where the ranks of each layout wait in their third step."""
    return {name: fakegpu.run_ranks(wait_of_rank, 2, layout) for name, layout in SHARED.items()}


def wait_of_rank(rank: int, layout: dict[str, Any]) -> str:
    plan = for_cards(make_plan(precision="bf16", **layout))
    device = torch.device("cuda", rank)
    apply_settings(plan)
    engine = Engine(plan, Mesh.from_plan(plan, rank), device, recipe(plan.job.train))
    samples = samples_of_step(plan.parallel, engine.mesh.coord, 0)
    batches = [micro_batch(plan, indices).to(device) for indices in samples]

    def step() -> None:
        engine.update(engine.gradients(batches, plan.parallel.global_batch_tokens)[1], LR)

    step()
    step()
    return wait_in(step, device)


def everything() -> dict[str, Any]:
    """All of it in one process; ranks are forked before it has used a GPU."""
    return {"ranks": waits_of_ranks(), "waits": waits(), "bytes": bytes_after_engines()}
