"""Column-parallel linears with their communication inside: equal to linears behind a region, and
overlapped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.trainer.operations import Order
from trainer.comm.collectives import CommCounter
from trainer.model.linear import Linear, apply_linears
from trainer.parallel.column_parallel import OverlappedColumnLinears
from trainer.parallel.tensor import Copy, Gather, Region
from trainer.verify.ranks import run_ranks

B = 2
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


@pytest.mark.process
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_equal_to_a_region_before_the_linears_and_overlapped_in_backward(sp, keep):
    def work(rank):
        group = dist.group.WORLD
        counter = CommCounter()
        linears = matrices(rank)
        torch.manual_seed(9 if not sp else 10 + rank)
        x = torch.randn(B, S // 2 if sp else S, HIDDEN, dtype=torch.float64)
        region = Region(Gather if sp else Copy, group, counter)
        plain = backward(lambda x, linears: apply_linears(region(x), linears), x, linears)
        ours = backward(OverlappedColumnLinears(group, counter, sp, keep), x, linears)
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
