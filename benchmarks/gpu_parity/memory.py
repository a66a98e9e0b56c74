"""A step's memory by category, beside the plan's."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.cost.memory.rank_memory import context_bytes, memory_by_pp_rank
from orchestrator.cost.memory.recipe import recipe_of
from orchestrator.cost.workload import Workload
from trainer.engine import Engine
from trainer.metrics.memory import StepMemory

STATES = ("params", "grads", "optimizer")
#: The widest element of the optimizer's state: moments and master weights in fp32.
WIDEST = 12


def memory_of(engine: Engine, step: Callable[[], object]) -> dict[str, dict[str, int]]:
    """{category: {"planned", "measured"}} in bytes, of one step. Buffers and the total contain what
    the libraries of a card take, which outweighs a small model's; they are not judged."""
    measured: dict[str, int] = {}
    memory = StepMemory.of_engine(engine)
    with memory.measure(measured):
        step()
    measured["activations"] = max(point.held["activations"] for point in memory.points())
    planned = planned_bytes(engine)
    sizes = {
        name: {"planned": planned[name], "measured": measured[name]}
        for name in (*STATES, "activations", "buffers", "total")
    }
    padding = sum(tensor.numel() for tensor in engine.buckets.param_tensors())
    padding -= sum(param.numel() for _, param, _ in engine.part.parameters())
    return sizes | {"padding": {"planned": 0, "measured": padding * WIDEST}}


def differences(sizes: dict[str, dict[str, int]], margin: float | None, is_muon: bool) -> list[str]:
    """The categories that are not as planned. States may exceed the plan by the padding of buckets;
    Muon's state is planned as AdamW's, which is more. `margin`: of activations."""
    wrong = []
    for name in STATES:
        excess = sizes[name]["measured"] - sizes[name]["planned"]
        is_less = excess < 0 and not (is_muon and name == "optimizer")
        if is_less or excess > sizes["padding"]["measured"]:
            wrong.append(name)
    activations = sizes["activations"]
    if margin is not None:
        excess = abs(activations["measured"] / activations["planned"] - 1)
        wrong += ["activations"] if excess > margin else []
    return wrong


def planned_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of tensors by category; what the driver takes besides is not among them."""
    plan = engine.plan
    workload = Workload.of_plan(plan)
    recipe = recipe_of("orch", plan.job.optim)
    (account,) = memory_by_pp_rank(workload, plan.cluster, recipe, plan.job.matmul)
    context = context_bytes(account, plan.cluster.device)
    sizes = {name: getattr(account, name) for name in (*STATES, "activations", "host")}
    return sizes | {"buffers": account.buffers - context, "total": account.total - context}
