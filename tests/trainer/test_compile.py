"""`train.compile`: blocks compiled one by one compose with every technique.

Composition (graph breaks at communication, recomputation, split backward, gathered weights) is a
matter of tracing and of autograd, so most cases stop before code generation (`aot_eager`); one of
each kind goes through it.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

from orchestrator.plan.model import Moe
from tests.beds.plans import make_plan, tiny_model
from tests.trainer.samples import engine_of
from tests.trainer.test_parity import arguments
from trainer.metrics.memory import StepMemory
from trainer.model.block import Block
from trainer.parallel.vocab import Passes
from trainer.pipeline.split import DeferredWeightGrads
from trainer.verify.compare import LIMIT, STEPS, run_rank
from trainer.verify.ranks import run_ranks
from trainer.verify.samples import micro_batch

pytestmark = [pytest.mark.process, pytest.mark.slow]

TWO_LAYERS = tiny_model(layers=2)
DROPPED = tiny_model(layers=2, dropout=0.1)
EXPERTS = tiny_model(layers=2, moe=Moe(experts=4, top_k=2, ffn_hidden=16))
#: Cases whose code is generated, too.
GENERATED = (
    "alone",
    "tp2 sp",
    "zb_h1",
    "cp2",
    "zero3",
    "dropout, tp2 sp",
    "full recompute, tp2",
)
#: Half a minute each, and close to the others: with the published proof, `make verify`.
FULL = {
    ("alone", "aot_eager"),
    ("tp2 sp", "aot_eager"), ("tp2 pp2", "aot_eager"), ("selective recompute, tp2", "aot_eager"),
    ("cp2 allgather", "aot_eager"), ("dropout, tp2 sp", "aot_eager"), ("cp2 ring", "aot_eager"),
    ("cp2", "aot_eager"), ("cp2 ulysses", "aot_eager"), ("zero2, full recompute", "aot_eager"),
    ("zero3", "aot_eager"), ("dropout, tp2 sp", "inductor"), ("tp2 sp", "inductor"), ("zb_h1", "inductor"),
    ("cp2", "inductor"), ("zero3", "inductor"), ("full recompute, tp2", "inductor"),
    ("full recompute, tp2", "aot_eager"), ("full recompute, zb_h1", "aot_eager"),
    ("tp2 without sp", "aot_eager"),
}  # fmt: skip

CASES = {
    "alone": {},
    "tp2 sp": {"tp": 2},
    "tp2 without sp": {"tp": 2, "sp": False},
    "full recompute, tp2": {"recompute": "full", "tp": 2},
    "full recompute, zb_h1": {
        "recompute": "full",
        "pp": 2,
        "schedule": "zb_h1",
        "micro_batches": 3,
    },
    "full recompute, experts": {"recompute": "full", "model": EXPERTS},
    "full recompute": {"recompute": "full"},
    "selective recompute, tp2": {"recompute": "selective", "tp": 2},
    "zb_h1": {"pp": 2, "schedule": "zb_h1", "micro_batches": 3},
    "cp2": {"cp": 2},
    "cp2 ulysses": {"cp": 2, "cp_method": "ulysses"},
    "cp2 ring": {"cp": 2, "cp_method": "ring"},
    "cp2 allgather": {"cp": 2, "cp_method": "allgather"},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "dropout, tp2 sp": {"tp": 2, "model": DROPPED},
    "zero2, full recompute": {"dp": 2, "zero": 2, "recompute": "full"},
    "zero3": {"dp": 2, "zero": 3},
}


def dtype_of_code() -> torch.dtype:
    """float64. Torch 2.11 generates code for attention whose log-sum-exp is in float32 whatever the
    inputs are, and fails where that of float64 comes: so it is float32 there."""
    q = torch.empty(1, 1, 1, 8, dtype=torch.float64, device="meta")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)[1].dtype


def compiled_rank(rank: int, plan, use, expected, packed, backend: str) -> dict[str, float]:
    import torch._dynamo

    torch.compile = functools.partial(torch.compile, backend=backend)  # in this forked process
    torch._dynamo.utils.counters.clear()
    notes = []
    compute = DeferredWeightGrads.compute
    DeferredWeightGrads.compute = lambda self, owed: [notes.extend(owed), compute(self, owed)]
    worst = run_rank(rank, plan, use, expected, packed)
    worst["graphs"] = float(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return worst | {"notes": float(len(notes))}


BOTH = [(case, "aot_eager") for case in CASES] + [(case, "inductor") for case in GENERATED]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(*variant, marks=[pytest.mark.full] if variant in FULL else [])
        for variant in BOTH
    ],
)
def test_compiled_blocks_equal_one_process(case, backend):
    import torch._dynamo  # before the fork: a second a rank otherwise

    dtype = dtype_of_code() if backend == "inductor" else torch.float64
    plan, *rest = arguments({"model": TWO_LAYERS, "compile": True} | CASES[case], dtype)
    args = plan, *rest, backend
    for rank, worst in enumerate(
        run_ranks(compiled_rank, plan.parallel.world_size, *args, timeout=400.0)
    ):
        has_loss = plan.ranks[rank].coord.pp == plan.parallel.pp - 1
        of_loss = len(Passes._fields) if has_loss else 0
        assert worst.pop("graphs") > of_loss, "blocks must have been compiled"
        # torch's own zero-bubble schedules refuse compiled modules (pytorch#161904). Each matrix
        # must still leave its note for the split backward: seven a block and micro-batch, one for
        # the head.
        assert worst.pop("notes") == (STEPS * 3 * (7 + rank) if "zb_h1" in case else 0)
        assert [quantity for quantity, error in worst.items() if not error <= LIMIT[dtype]] == []


def measured_rank(rank: int, plan) -> list[tuple[dict[str, int], int]]:
    import torch._dynamo

    Block.compile = functools.partialmethod(nn.Module.compile, backend="aot_eager")
    engine = engine_of(plan, rank)
    registered = {"params": engine.buckets.param_tensors, "grads": engine.buckets.grad_tensors}
    memory = StepMemory(
        torch.device("cpu"),
        registered,
        engine.pipeline.action_times.running,
        plan.job.train.compile,
    )
    measurements = []
    for step in range(3):
        held: dict[str, int] = {}
        with memory.measure(held) if step < 2 else contextlib.nullcontext():
            _, norm = engine.gradients([micro_batch(plan, [step])], 10)
            engine.update(norm, 1e-3)
        if held:  # at their own peak: the step's may be in the optimizer, where none is left
            held["activations"] = max(point.held["activations"] for point in memory.points())
        measurements.append((held, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    return measurements


def test_measuring_memory_neither_stops_nor_repeats_compilation():
    import torch._dynamo  # noqa: F401

    plain, compiled = (
        run_ranks(
            measured_rank,
            1,
            make_plan(micro_batches=1, model=TWO_LAYERS, compile=on),
            timeout=300.0,
        )[0]
        for on in (False, True)
    )
    graph_counts = [graphs for _, graphs in compiled]
    assert graph_counts == [4, 4, 4], "both blocks run one graph, the loss three, measured or not"
    assert [graphs for _, graphs in plain] == [0, 0, 0]
    plain_bytes = plain[1][0]
    compiled_bytes = compiled[1][0]
    assert compiled_bytes["params"] == plain_bytes["params"]
    assert (
        0.7 * plain_bytes["activations"]
        < compiled_bytes["activations"]
        < 1.3 * plain_bytes["activations"]
    )
