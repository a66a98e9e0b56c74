"""What test_card does in a process with fake GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import structs

from benchmarks import gpu_single
from benchmarks.card import forget, wait_in, waits_of_the_host
from orchestrator.plan import Plan, seal
from orchestrator.plan.model import Moe
from tests.beds.plans import make_plan, tiny_model

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
    plan = seal(structs.replace(plan, cluster=structs.replace(plan.cluster, device="cuda")))
    return gpu_single.ours(plan, device, gpu_single.random_batch(plan, device))


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
        remaining.append(torch.cuda.memory_allocated(device))
    return remaining
