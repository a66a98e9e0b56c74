"""The planner's account of memory against the storages of the trainer's own ranks, layout by layout.

States to the byte, on every rank. Activations (what is kept for backward, at its peak) within 5 % of the fullest rank
of each pipeline stage. `python -m tests.trainer.test_planned_memory` prints the table of docs/accuracy.md.
"""

from __future__ import annotations

import pytest
import torch

from orchestrator.plan import Plan
from orchestrator.planner import memory
from tests.plans import make_plan, tiny_model
from trainer.data.order import samples_of_step
from trainer.engine import Engine
from trainer.metrics.memory import StepMemory
from trainer.optim.precision import recipe
from trainer.parallel.mesh import Mesh
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

LLAMA = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_hidden": 160, "vocab": 512, "layers": 4}
GPT = LLAMA | {"norm": "layer", "mlp": "plain", "position": "learned", "activation": "gelu", "bias": True}
GPT |= {"tied_embeddings": True, "max_seq_len": 128}
PIPE = {"pp": 2, "micro_batches": 4}

QUICK = {
    "one process": {},
    "bf16": {"precision": "bf16"},
    "tp4, two key-value heads": {"tp": 4},
    "tp2 selective": {"tp": 2, "recompute": "selective"},
    "pp2": PIPE,
    "cp2 selective": {"cp": 2, "recompute": "selective"},
    "dp2 zero3 bf16": {"dp": 2, "zero": 3, "precision": "bf16"},
}
MORE = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "two samples": {"micro_batch_size": 2},
    "tp2": {"tp": 2},
    "tp2 without sp": {"tp": 2, "sp": False},
    "tp2 without sp, selective": {"tp": 2, "sp": False, "recompute": "selective"},
    "pp2 selective": PIPE | {"recompute": "selective"},
    "pp2 full": PIPE | {"recompute": "full"},
    "pp2 interleaved": PIPE | {"vpp": 2, "schedule": "interleaved"},
    "pp2 all forward first": PIPE | {"schedule": "afab"},
    "pp2 zbv": PIPE | {"vpp": 2, "schedule": "zbv"},
    "pp2 dualpipe": PIPE | {"schedule": "dualpipe"},
    "cp2 zigzag": {"cp": 2},
    "cp2 all-gather": {"cp": 2, "cp_method": "allgather"},
    "cp2 ulysses": {"cp": 2, "cp_method": "ulysses"},
    "cp2 full": {"cp": 2, "recompute": "full"},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "pp2 dp2 zero3": PIPE | {"dp": 2, "zero": 3},
    "tp2 pp2 dp2 zero1": PIPE | {"tp": 2, "dp": 2, "zero": 1},
    "pp2 zb_h1": PIPE | {"schedule": "zb_h1"},
    "pp2 zb_h1 selective": PIPE | {"schedule": "zb_h1", "recompute": "selective"},
    "tp2 pp2 zb_h1": PIPE | {"tp": 2, "schedule": "zb_h1"},
    "pp4 zb_h2": {"pp": 4, "micro_batches": 8, "schedule": "zb_h2"},
    "GPT, tied": {"model": GPT},
    "GPT, tied, pp2": PIPE | {"model": GPT},
}
#: Close to others: with the published proof, `make verify`.
FULL = {
    "two samples", "tp2 without sp, selective", "pp2 full", "pp2 all forward first", "cp2 all-gather", "cp2 full",
    "pp2 dp2 zero3", "pp2 zb_h1 selective", "tp2 pp2 zb_h1", "GPT, tied, pp2",
}  # fmt: skip
STATES = ("params", "grads", "optimizer")


def plan_of(layout: dict) -> Plan:
    values = dict(layout)
    return make_plan(model=tiny_model(**values.pop("model", LLAMA)), seq_len=128, **values)


def measured(rank: int, plan: Plan) -> dict[str, dict[str, int] | int]:
    """Bytes by category: states as they are between steps, the rest at its peak in the second step. Gradients that
    wait with their matrix's input for a later W are kept for backward as well."""
    mesh, device = Mesh.from_plan(plan, rank), torch.device("cpu")
    engine = Engine(plan, mesh, device, recipe(plan.job.train))
    lists = (engine.buckets.param_tensors, engine.buckets.grad_tensors, engine.optimizer.tensors)
    found = StepMemory(device, dict(zip(STATES, lists, strict=True)), engine.pipeline.trace.running)
    queue, note = engine.pipeline._queue, engine.pipeline._queue.note

    def noted(linear, x: torch.Tensor, grad: torch.Tensor) -> None:
        found.tracker.keep(grad)
        note(linear, x, grad)

    queue.note = noted
    for step in range(2):
        batches = [micro_batch(plan, one) for one in samples_of_step(plan.parallel, mesh.coord, step)]
        with found.measure({}):
            engine.update(engine.gradients(batches, 1000)[1], 1e-3)
    points = found.points()
    held = {name: points[0].held[name] for name in STATES}
    held["activations"] = max(point.held["activations"] for point in points)
    return {"held": held, "pp": mesh.coord.pp, "padding": _padding(engine) if plan.parallel.zero < 3 else 0}


def _padding(engine: Engine) -> int:
    """Elements of this rank's buckets that no parameter uses: each starts at a round address."""
    whole = sum(tensor.numel() for tensor in engine.buckets.param_tensors())
    return whole - sum(param.numel() for _, param, _ in engine.part.parameters())


def rows(layout: dict) -> list[tuple[dict[str, int], dict[str, int], int]]:
    """Of each pipeline stage: planned, measured on its fullest rank, elements of padding."""
    plan = plan_of(layout)
    accounts = memory.accounts(plan.cluster, plan.model, plan.parallel, plan.job.train)
    ranks = run_ranks(measured, plan.parallel.world_size, plan, timeout=120)
    result = []
    for stage, account in enumerate(accounts):
        mine = [one for one in ranks if one["pp"] == stage]
        held = {name: max(one["held"][name] for one in mine) for name in (*STATES, "activations")}
        result.append(({name: getattr(account, name) for name in held}, held, mine[0]["padding"]))
    return result


def check(layout: dict) -> None:
    for planned, held, padding in rows(layout):
        padded = {"params": 4 * padding, "grads": 4 * padding, "optimizer": 8 * padding}  # fp32: the only padded cases
        assert {name: held[name] - planned[name] for name in STATES} == padded
        assert planned["activations"] == pytest.approx(held["activations"], rel=0.05)


@pytest.mark.process
@pytest.mark.parametrize("name", QUICK)
def test_planned_is_measured(name):
    check(QUICK[name])


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] if one in FULL else []) for one in MORE])
def test_planned_is_measured_for_more(name):
    check(MORE[name])


def main() -> None:
    print(f"{'layout':<28}{'stage':>6}{'states':>12}{'planned':>12}{'activations':>13}{'planned':>12}")
    for name, layout in (QUICK | MORE).items():
        for stage, (planned, held, padding) in enumerate(rows(layout)):
            states = sum(held[one] for one in STATES) - 16 * padding
            off = planned["activations"] / held["activations"] - 1
            equal = "equal" if states == sum(planned[one] for one in STATES) else "NOT EQUAL"
            print(f"{name:<28}{stage:>6}{states:>12,}{equal:>12}{held['activations']:>13,}{off:>+12.1%}", flush=True)


if __name__ == "__main__":
    main()
