"""Every schedule gives the gradients of one process, on real ranks: what is sent, split, kept and dropped is right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from orchestrator.plan.schedules import build as build_schedule
from tests.plans import make_plan
from tests.trainer.samples import LLAMA, batch, small
from trainer.metrics.comm import CommCounter
from trainer.parallel.apply import build
from trainer.parallel.data.buckets import GradBuckets
from trainer.parallel.mesh import Mesh
from trainer.pipeline.runtime import Pipeline, stage_indices
from trainer.verify.ranks import run_ranks

pytestmark = pytest.mark.process

B, S = 2, 8


def data(plan):
    """Unequal numbers of valid tokens, one micro-batch with none at all."""
    many = plan.parallel.micro_batches
    return [batch(plan.model, B, S, seed, ignored=1.0 if seed == 1 else 0.1 * (seed % 7)) for seed in range(many)]


def valid(items) -> int:
    return max(1, sum(int((item.targets != -100).sum()) for item in items))


def one_process(plan, dtype):
    """The naive twin: the whole model, plain autograd, one micro-batch after the other."""
    alone = make_plan(model=plan.model, micro_batch_size=B, seq_len=S)
    part = build(alone, Mesh.alone(alone), CommCounter(), dtype=dtype)
    items, total = data(plan), 0.0
    for item in items:
        loss = part.loss(part.stages[0](None, item), item.targets)
        (loss / valid(items)).backward()
        total += loss.item()
    return {"loss": total, "grads": {name: param.grad for name, param, _ in part.parameters()}}


def pipeline_rank(rank, plan, dtype, steps=1):
    """The real thing: stages as the plan places them, gradients through the flat buckets."""
    mesh, counter = Mesh.from_plan(plan, rank), CommCounter()
    part = build(plan, mesh, counter, dtype=dtype, indices=stage_indices(plan, mesh.coord.pp))
    buckets = GradBuckets(list(part.parameters()), mesh, 0, dtype, 1 << 12, counter)
    pipeline = Pipeline.from_plan(*(plan, part.stages, part.loss, mesh, counter), dtype=dtype, on_grad=buckets.on_grad)
    items = data(plan)
    for _ in range(steps):
        buckets.expect(len(items))
        loss = pipeline.run(items, 1.0 / valid(items))
        buckets.finish()
    if mesh.group("pp"):
        dist.all_reduce(loss, group=mesh.group("pp"))
    order = [str(action) for action in pipeline.trace.order()]
    sent = dict(counter.bytes)
    left = len(pipeline._held) + len(pipeline._owed) + len(pipeline.transfers._inbox)
    return {"loss": loss, "grads": buckets.full_grads(), "order": order, "sent": sent, "left": left}


def compare(plan, dtype=torch.float64, tolerance=1e-10, steps=1):
    expected = one_process(plan, dtype)
    found = run_ranks(pipeline_rank, plan.parallel.pp, plan, dtype, steps)
    check(plan, expected, found, tolerance)
    return found


def check(plan, expected, found, tolerance):
    par, seen = plan.parallel, set()
    schedule = build_schedule(par.schedule, par.pp, par.micro_batches, par.vpp)
    largest = max(grad.abs().max() for grad in expected["grads"].values())
    for rank, result in enumerate(found):
        assert result["order"] == [str(action) for action in schedule.orders[rank]]
        assert result["loss"].item() == pytest.approx(expected["loss"], rel=tolerance)
        assert result["left"] == 0
        for name, grad in result["grads"].items():
            seen.add(name)
            error = (grad - expected["grads"][name]).abs().max() / largest
            assert error <= tolerance, f"rank {rank} {name}: {error:.1e}"
    assert seen == expected["grads"].keys()


CASES = [
    # schedule, pp, vpp, micro-batches
    *[("1f1b", pp, 1, m) for pp in (1, 2, 4) for m in (1, 3, 4, 7)],
    *[("afab", 2, 1, 3), ("afab", 4, 1, 5), ("afab", 2, 2, 3)],
    *[("interleaved", 2, 2, 4), ("interleaved", 2, 2, 3), ("interleaved", 4, 2, 6), ("interleaved", 1, 2, 2)],
    *[("zb_h1", 1, 1, 2), ("zb_h1", 2, 1, 5), ("zb_h1", 4, 1, 3), ("zb_h1", 4, 1, 8)],
    *[("zb_h2", 2, 1, 5), ("zb_h2", 4, 1, 8), ("zbv", 2, 2, 2), ("zbv", 4, 2, 8), ("zbv", 1, 2, 3)],
    *[("dualpipev", 2, 2, 6), ("dualpipev", 4, 2, 9), ("dualpipev", 2, 2, 1)],
]


@pytest.mark.parametrize(("name", "pp", "vpp", "many"), CASES)
def test_schedule_equals_one_process(name, pp, vpp, many):
    model = small(layers=9, **LLAMA)  # no pp divides it
    compare(make_plan(model=model, pp=pp, vpp=vpp, schedule=name, micro_batches=many, micro_batch_size=B, seq_len=S))
