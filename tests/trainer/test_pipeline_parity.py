"""Every schedule gives the gradients of one process, on real ranks: what is sent, split, kept and dropped is right."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from orchestrator.plan.schedules import build as build_schedule
from tests.beds.plans import make_plan
from tests.trainer.samples import GPT, GQA, LLAMA, batch, small
from tests.trainer.together import run_together, told
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.parallel.apply import build
from trainer.parallel.data.buckets import GradBuckets
from trainer.pipeline.runtime import Pipeline, stage_indices
from trainer.verify.ranks import run_ranks

pytestmark = pytest.mark.process

B, S = 2, 8
KINDS = {"llama": LLAMA, "gpt": GPT}


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


def uncompiled(plan):
    """For building: these tests compile blocks themselves, with a backend that needs no C compiler."""
    train = msgspec.structs.replace(plan.job.train, compile=False)
    return msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, train=train))


def pipeline_rank(rank, plan, dtype, steps=1, prepare=None):
    """The real thing: stages as the plan places them, gradients through the flat buckets."""
    mesh, counter = Mesh.from_plan(plan, rank), CommCounter()
    part = build(uncompiled(plan), mesh, counter, dtype=dtype, indices=stage_indices(plan, mesh.coord.pp))
    for stage in part.stages if prepare else ():
        prepare(stage)
    buckets = GradBuckets(list(part.parameters()), mesh, 0, dtype, 1 << 12, counter)
    pipeline = Pipeline.from_plan(*(plan, part.stages, part.loss, mesh, counter), dtype=dtype, on_grad=buckets.on_grad)
    items, notes, compute = data(plan), [], pipeline._queue.compute
    pipeline._queue.compute = lambda owed: [notes.extend(owed), compute(owed)]
    for _ in range(steps):
        buckets.expect(len(items))
        loss = pipeline.run(items, 1.0 / valid(items))
        buckets.finish()
    if mesh.group("pp"):
        dist.all_reduce(loss, group=mesh.group("pp"))
    order = [str(action) for action in pipeline.action_times.order()]
    sent = dict(counter.bytes)  # of all steps
    left = len(pipeline._saved) + len(pipeline._deferred) + len(pipeline.transfers._inbox)
    return {
        "loss": loss,
        "grads": buckets.full_grads(),
        "order": order,
        "sent": sent,
        "left": left,
        "notes": len(notes),
    }


def compare(plan, dtype=torch.float64, tolerance=1e-10, steps=1, prepare=None):
    """Run the plan's ranks; loss, every gradient, and the order of work must be those of one process and the plan."""
    return check(
        plan, run_ranks(pipeline_rank, plan.parallel.world_size, plan, dtype, steps, prepare), dtype, tolerance
    )


def compare_all(plans, dtype=torch.float64, tolerance=1e-10):
    """The same for several plans by name, on equally many ranks."""
    (world,) = {plan.parallel.world_size for plan in plans.values()}
    for name, found in run_together(
        pipeline_rank, world, {name: (plan, dtype) for name, plan in plans.items()}
    ).items():
        with told(name):
            check(plans[name], found, dtype, tolerance)


def check(plan, found, dtype, tolerance):
    par, seen = plan.parallel, set()
    expected = one_process(plan, dtype)
    largest = max(grad.abs().max() for grad in expected["grads"].values())
    schedule = build_schedule(par.schedule, par.pp, par.micro_batches, par.vpp)
    for rank, result in enumerate(found):
        place = plan.ranks[rank].coord.pp
        table = build(
            uncompiled(plan), Mesh.alone(plan, rank), CommCounter(), "meta", indices=stage_indices(plan, place)
        ).table
        assert result["order"] == [str(action) for action in schedule.orders[place]]
        assert result["loss"].item() == pytest.approx(expected["loss"], rel=tolerance)
        assert result["left"] == 0
        for name, grad in result["grads"].items():
            seen.add(name)
            want = table[name].take(expected["grads"][name])
            # A key's bias has no gradient but rounding (softmax ignores a shift), so a floor for the scale is needed.
            scale = max(expected["grads"][name].abs().max(), 1e-5 * largest)
            error = (grad - want).abs().max() / scale
            assert error <= tolerance, f"rank {rank} {name}: {error:.1e}"
    assert seen == expected["grads"].keys()
    return found


def plan_of(name, pp, vpp=1, many=4, **more):
    changes = {"schedule": name, "micro_batches": many, "micro_batch_size": B, "seq_len": S} | more
    changes.setdefault("model", small(layers=9, **LLAMA))  # no pp divides it
    return make_plan(pp=pp, vpp=vpp, **changes)


CASES = [
    # schedule, pp, vpp, micro-batches: m below, equal to and above p, and not a multiple of it
    *[("1f1b", pp, 1, m) for pp in (1, 2, 4) for m in (1, 3, 4, 7)],
    *[("afab", 2, 1, 3), ("afab", 4, 1, 5), ("afab", 2, 2, 3)],
    *[("interleaved", 2, 2, 4), ("interleaved", 2, 2, 3), ("interleaved", 4, 2, 6)],
    *[("zb_h1", 1, 1, 2), ("zb_h1", 2, 1, 5), ("zb_h1", 4, 1, 3), ("zb_h1", 4, 1, 8)],
    *[("zb_h2", 2, 1, 5), ("zb_h2", 4, 1, 8), ("zbv", 2, 2, 2), ("zbv", 4, 2, 8)],
    *[("dualpipev", 2, 2, 6), ("dualpipev", 4, 2, 9), ("dualpipev", 2, 2, 1)],
]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_schedules_equal_one_process(pp):
    compare_all({f"{name} vpp{case[1]} m{case[2]}": plan_of(name, *case) for name, *case in CASES if case[0] == pp})


def test_fp32():
    compare_all({name: plan_of(name, 2) for name in ("1f1b", "zb_h1")}, torch.float32, 1e-5)


@pytest.mark.parametrize(("pp", "schedules"), [(2, {"1f1b": 1, "interleaved": 2, "zb_h2": 1}), (4, {"1f1b": 1})])
def test_tied_embeddings(pp, schedules):
    """First and last stage hold a copy each; the gradient is the sum of the lookup's and the head's."""
    models = {kind: small(layers=4, tied_embeddings=True, **shape) for kind, shape in KINDS.items()}
    ways = product(schedules.items(), models.items())
    compare_all({f"{name}, {kind}": plan_of(name, pp, vpp, model=model) for (name, vpp), (kind, model) in ways})


def test_tied_on_one_rank():
    """Head and lookup share one parameter here: its gradient must arrive once a micro-batch, not in two parts."""
    compare_all({name: plan_of(name, 1, model=small(tied_embeddings=True, **GPT)) for name in ("1f1b", "zb_h1")})


def test_uneven_stages():
    """Sizes as unequal as they get: a stage of embedding only, one that hands its input on, one with all the rest."""
    model = small(layers=4, **GPT)
    stages = {"1f1b": [0, 3, 0, 1], "zb_h1": [3, 0, 1, 0]}
    compare_all({name: plan_of(name, 4, stage_layers=layers, model=model) for name, layers in stages.items()})


def test_several_steps_give_the_same_again():
    compare(plan_of("zbv", 2, 2), steps=3)


TP = [("1f1b", 1, False), ("1f1b", 1, True), ("interleaved", 2, True), ("zb_h1", 1, False), ("zbv", 2, True)]


def test_with_tensor_and_sequence_parallelism():
    """Transfers of sequence shards; split weight gradients of column and row slices."""
    models = {"llama": small(layers=4, **(LLAMA | GQA)), "gpt": small(layers=4, **GPT)}
    ways = product(TP, models.items())
    compare_all(
        {f"{way}, {kind}": plan_of(way[0], 2, way[1], tp=2, sp=way[2], model=model) for way, (kind, model) in ways}
    )


def test_recompute_under_split_backward():
    """The notes of a recomputed block come from its second forward (pytorch#136766)."""

    def recompute(stage):
        for block in stage.layers.values():
            inner = block.forward
            block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)

    compare(plan_of("zb_h1", 2), prepare=recompute)


@pytest.mark.slow
def test_compiled_blocks_under_split_backward():
    """torch's own zero-bubble schedules refuse compiled modules (pytorch#161904). What the compiled block computes is
    all but the matrices: each of those must still leave its note, seven a block and micro-batch, one for the head."""

    def compiled(stage):
        for block in stage.layers.values():
            block.compile(backend="aot_eager")

    found = compare(plan_of("zb_h1", 2, model=small(layers=2, **LLAMA), compile=True), prepare=compiled)
    assert [result["notes"] for result in found] == [4 * 7, 4 * 8]


def test_bytes_sent():
    """Each micro-batch crosses each border once forward and once backward, and nothing else travels."""
    plan = plan_of("1f1b", 4, many=5)
    sizes = [result["sent"].get("pp", 0) for result in compare(plan)]
    message = 5 * B * S * plan.model.hidden * 8
    assert sizes == [message, 2 * message, 2 * message, message]
