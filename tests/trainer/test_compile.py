"""`train.compile`: blocks compiled one by one compose with every technique. Slow: opt in with `-m slow`.

Composition (graph breaks at communication, recomputation, split backward, gathered weights) is a matter of tracing and
of autograd, so most cases stop before code generation (`aot_eager`); one goes through it.
"""

from __future__ import annotations

import functools

import msgspec
import pytest
from torch import nn

from tests.plans import tiny_model
from tests.trainer.test_parity import parity_plan, reference
from trainer.model.block import Block
from trainer.optim.precision import FP64
from trainer.verify.compare import LIMIT, run_rank
from trainer.verify.ranks import run_ranks

pytestmark = [pytest.mark.process, pytest.mark.slow]

TWO_LAYERS = tiny_model(layers=2)

CASES = {
    "alone": {},
    "tp2 sp": {"tp": 2},
    "full recompute": {"recompute": "full"},
    "selective recompute, tp2": {"recompute": "selective", "tp": 2},
    "zb_h1": {"pp": 2, "schedule": "zb_h1", "micro_batches": 3},
    "cp2": {"cp": 2},
    "zero2, full recompute": {"dp": 2, "zero": 2, "recompute": "full"},
    "zero3": {"dp": 2, "zero": 3},
}


def compiled_rank(rank: int, plan, expected, backend: str) -> dict[str, float]:
    import torch._dynamo

    if backend != "inductor":
        Block.compile = functools.partialmethod(nn.Module.compile, backend=backend)  # in this forked process alone
    torch._dynamo.utils.counters.clear()
    worst = run_rank(rank, plan, FP64, expected)
    worst["graphs"] = float(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return worst


@pytest.mark.parametrize(("case", "backend"), [*((case, "aot_eager") for case in CASES), ("alone", "inductor")])
def test_compiled_blocks_equal_one_process(case, backend):
    import torch._dynamo  # before the fork: a second a rank otherwise

    plan = parity_plan(torch.float64, model=TWO_LAYERS, compile=True, **CASES[case])
    samples = plan.parallel.global_batch_samples
    expected = reference(msgspec.json.encode(plan.model), samples, torch.float64)
    for worst in run_ranks(compiled_rank, plan.parallel.world_size, plan, expected, backend, timeout=400.0):
        assert worst.pop("graphs") > 0, "something must have been compiled"
        assert [what for what, error in worst.items() if not error <= LIMIT[torch.float64]] == []
