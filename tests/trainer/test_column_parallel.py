"""Linears with their communication inside: equal to linears beside a region, and overlapped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from orchestrator.plan.batch import largest_cut
from tests.trainer.operations import Order
from trainer.comm.collectives import CommCounter
from trainer.model.linear import Linear, apply_linears
from trainer.parallel.column_parallel import OverlappedColumnLinears
from trainer.parallel.row_parallel import OverlappedRowLinear
from trainer.parallel.tensor import Copy, Gather, Reduce, Region, Scatter
from trainer.verify.ranks import run_ranks

S = 6
HIDDEN = 8


def matrices(rank: int) -> list[Linear]:
    torch.manual_seed(rank)
    linears = [Linear(HIDDEN, 4, bias=True).double(), Linear(HIDDEN, 3).double()]
    for linear in linears:
        for param in linear.parameters():
            torch.nn.init.normal_(param)
    return linears


def backward(read, x: torch.Tensor, linears: list[Linear]) -> dict:
    """Outputs, gradients, and what was started in backward."""
    x = x.clone().requires_grad_()
    outs = read(x, linears)
    weights = [param for linear in linears for param in linear.parameters()]
    with Order() as order:
        grads = torch.autograd.grad([out.sin().sum() for out in outs], [x, *weights])
    return {"tensors": [*outs, *grads], "order": order.seen}


#: (samples, pieces): whole; a sample each; three parts of each sample, which lie apart in the
#: sequence; more samples in each piece than ranks.
SAMPLES_AND_PIECES = ((2, 1), (2, 2), (2, 6), (6, 2))


@pytest.mark.process
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(("samples", "pieces"), SAMPLES_AND_PIECES)
def test_equal_to_a_region_before_the_linears_and_overlapped_in_backward(sp, keep, samples, pieces):
    def work(rank):
        group = dist.group.WORLD
        counter = CommCounter()
        linears = matrices(rank)
        torch.manual_seed(9 if not sp else 10 + rank)
        x = torch.randn(samples, S // 2 if sp else S, HIDDEN, dtype=torch.float64)
        region = Region(Gather if sp else Copy, group, counter)
        plain = backward(lambda x, linears: apply_linears(region(x), linears), x, linears)
        ours = backward(OverlappedColumnLinears(group, counter, sp, keep, pieces), x, linears)
        return {"plain": plain, "ours": ours}

    for rank_answer in run_ranks(work, 2):
        for ours, plain in zip(
            rank_answer["ours"]["tensors"], rank_answer["plain"]["tensors"], strict=True
        ):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        gather = ["c10d.broadcast"] * 2 if sp and not keep else []
        reduction = ["c10d.alltoall_base" if sp else "c10d.allreduce"]
        # the input is on its way while its gradient is computed, that is on its way while the
        # weights' are
        assert rank_answer["ours"]["order"] == [*gather, "mm", "addmm", *reduction, "mm", "mm"]
        assert (
            rank_answer["plain"]["order"].index(reduction[0])
            == len(rank_answer["plain"]["order"]) - 1
        ), "behind everything"


def row_backward(read, x: torch.Tensor, linear: Linear) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = read(linear, x)
    return [out, *torch.autograd.grad(out.sin().sum(), [x, linear.weight])]


@pytest.mark.process
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("samples", "pieces"), SAMPLES_AND_PIECES)
def test_a_row_parallel_linear_sums_its_pieces_as_a_region_behind_it_sums_the_whole(
    sp, samples, pieces
):
    def work(rank):
        group = dist.group.WORLD
        counters = CommCounter(), CommCounter()
        _, linear = matrices(rank)
        torch.manual_seed(10 + rank)
        x = torch.randn(samples, S, HIDDEN, dtype=torch.float64)
        region = Region(Scatter if sp else Reduce, group, counters[0])
        plain = row_backward(lambda linear, x: region(linear(x)), x, linear)
        ours = row_backward(OverlappedRowLinear(group, counters[1], sp, pieces), x, linear)
        return {"plain": plain, "ours": ours, "sent": [counter.take()[0] for counter in counters]}

    for rank_answer in run_ranks(work, 2):
        for ours, plain in zip(rank_answer["ours"], rank_answer["plain"], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        assert rank_answer["sent"][0] == rank_answer["sent"][1] != {}, "the same bytes"


@pytest.mark.process
def test_recomputation_stops_before_the_product_of_a_row_parallel_linear():
    """What it sums is not sent a second time."""

    def work(rank):
        linears = matrices(rank)[1:]
        row = OverlappedRowLinear(dist.group.WORLD, CommCounter(), True, 2)
        x = torch.randn(2, S, HIDDEN, dtype=torch.float64, requires_grad=True)
        out = checkpoint(lambda x: row(linears[0], x.sin()), x, use_reentrant=False)
        with Order() as order:
            torch.autograd.grad(out.sum(), [x, linears[0].weight])
        return order.seen

    for seen in run_ranks(work, 2):
        assert seen == ["c10d.broadcast"] * 4 + ["mm", "mm", "mm"]


@given(batch=st.integers(1, 6), length=st.integers(1, 12), most=st.integers(1, 12))
def test_pieces_are_equal_and_have_whole_samples_or_parts_of_one(batch, length, most):
    count = largest_cut(batch, length, most)
    assert 1 <= count <= most and batch * length % count == 0
    rows = batch * length // count
    assert rows % length == 0 or length % rows == 0
    if most >= batch * length:
        assert count == batch * length
