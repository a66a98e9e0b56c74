"""The optimizer and the norm take one call for many tensors, and compute what the formulas say."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn import Parameter

from tests.beds.plans import make_plan
from tests.independent.oracle.findings import ALLOWED, rounding
from tests.reference import adamw as naive
from tests.trainer.operations import Kernels
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.compat import foreach_norms
from trainer.optim.clip import ROW, SMALL, TOGETHER, squared_norm
from trainer.optim.sharded import ShardedOptimizer, param_ranges, rules_of
from trainer.parallel.data.buckets import GradBuckets
from trainer.parallel.data.flat_bucket import FlatBucket, Kind
from trainer.parallel.data.layout import Item, make_layout
from trainer.parallel.params import whole

F64 = torch.float64
OPTIM = make_plan().job.optim
FINITE = torch.tensor(True)
#: As many tensors as a model of 32 layers has.
SHAPES = {f"layers.{at}": (5, 3) if at % 3 else (7,) for at in range(291)}


def trained(
    many: int, dtype: torch.dtype = F64, grad: torch.dtype | None = None
) -> tuple[ShardedOptimizer, dict[str, Parameter], GradBuckets]:
    """Every parameter is a bucket of its own."""
    shapes = dict(list(SHAPES.items())[:many])
    params = {name: Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}
    triples = [(name, param, whole(name, tuple(param.shape))) for name, param in params.items()]
    buckets = GradBuckets(triples, Mesh.alone(make_plan()), 0, grad or dtype, 1, CommCounter())
    assert len(buckets.buckets) == many
    return (
        ShardedOptimizer(buckets, rules_of(OPTIM), F64 if dtype == F64 else torch.float32),
        params,
        buckets,
    )


def filled(buckets: GradBuckets) -> dict[str, torch.Tensor]:
    for bucket in buckets.buckets:
        bucket.grad_shard.copy_(torch.randn(bucket.grad_shard.shape))
    return {bucket.infos[0].name: bucket.grad_views[0].clone() for bucket in buckets.buckets}


@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_grouped_updates_are_those_of_the_formula(factor):
    torch.manual_seed(0)
    optimizer, params, buckets = trained(40)
    twin = naive.AdamW(OPTIM.beta1, OPTIM.beta2, OPTIM.eps, OPTIM.weight_decay)
    weights = {name: param.detach().clone() for name, param in params.items()}
    for _ in range(3):
        grads = filled(buckets)
        optimizer.step(0.01, torch.tensor(factor, dtype=F64), FINITE)
        weights = twin.step(weights, {name: grad * factor for name, grad in grads.items()}, 0.01)
        for name, param in params.items():
            torch.testing.assert_close(param.detach(), weights[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "grad"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_an_update_of_many_tensors_takes_a_handful_of_calls(dtype, grad):
    """Two kinds of parameters, with and without weight decay: scale, count, update, copy of the
    narrow weights."""
    optimizer, _, buckets = trained(291, dtype, grad)
    filled(buckets)
    with Kernels() as kernels:
        optimizer.step(0.01, torch.tensor(0.5, dtype=F64), FINITE)
    assert len(kernels.seen) <= 10, kernels.seen
    with Kernels() as kernels:
        squared_norm([bucket.grad_shard for bucket in buckets.buckets])
    assert len(kernels.seen) <= 10, kernels.seen


def test_narrow_gradients_are_widened_one_bucket_at_a_time():
    """The wide copy of a whole model's gradients would be as large as its master weights."""
    optimizer, _, _ = trained(5, torch.bfloat16, torch.bfloat16)
    assert sorted(optimizer.groups) == [[0], [1], [2], [3], [4]]
    optimizer, _, _ = trained(5)
    assert len(optimizer.groups) == 2


def test_the_norm_of_many_tensors_is_that_of_all_their_elements():
    """Large, small and empty ones, more small ones than are joined at once, and the call that a GPU
    takes."""
    torch.manual_seed(0)
    sizes = [SMALL, 3, 0, SMALL + 1, 1, 513, *[SMALL - 1] * (TOGETHER // SMALL + 2)]
    tensors = [torch.randn(size) for size in sizes]
    exact = float(torch.cat(tensors).double().square().sum())
    # a row's squares are added in fp32, and rows round independently; what is exact is a sum too
    narrow = ALLOWED * rounding(ROW, torch.float32) / math.sqrt(sum(sizes) / ROW)
    wide = ALLOWED * rounding(sum(sizes), F64)
    assert wide < narrow < 1 / sum(sizes), "an element that is left out is seen"
    assert float(squared_norm(tensors)) == pytest.approx(exact, rel=narrow)
    assert float(torch.stack(foreach_norms(tensors, F64)).square().sum()) == pytest.approx(
        exact, rel=wide
    )
    assert float(squared_norm([tensor.double() for tensor in tensors])) == pytest.approx(
        exact, rel=wide
    )


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_pieces_are_the_elements_that_they_say(shards):
    """Parameters that a shard cuts, that end with it and that padding follows: a checkpoint stores
    what they hold."""
    sizes = [64, 100, 128, 7, 64]
    infos = [whole(str(at), (size,)) for at, size in enumerate(sizes)]
    values = [torch.randn(size) for size in sizes]
    (layout,) = make_layout([Item(at, size) for at, size in enumerate(sizes)], shards, 1 << 20)
    ordered = [slot.index for slot in layout.slots]
    seen = {info.name: torch.zeros(size) for info, size in zip(infos, sizes, strict=True)}
    for index in range(shards):
        replaced = dataclasses.replace(layout, key=Kind(torch.float32, False, False, ()))
        members = [Parameter(values[at].clone()) for at in ordered]
        bucket = FlatBucket(
            replaced,
            members,
            [infos[at] for at in ordered],
            shards=shards,
            shard_index=index,
            reduce_dtype=torch.float32,
            allocate_grads=False,
        )
        for info, start, stop, at in param_ranges(bucket):
            piece = bucket.param_shard[at : at + stop - start]
            assert piece.numel() == stop - start
            seen[info.name][start:stop] += piece
    for info, value in zip(infos, values, strict=True):
        assert torch.equal(seen[info.name], value)
