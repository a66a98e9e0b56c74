"""Two classes of parameters with different groups in one step: gradients, norm, clipping and
updates equal one process.

The toy: four data-parallel ranks, of which even ones hold expert 0 and odd ones expert 1. A rank's
samples go through its own expert, so one process sends each sample through the expert of the rank
that has it.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.beds.plans import make_plan
from tests.trainer.together import run_together, told
from trainer.checkpoint.format import StatePiece
from trainer.checkpoint.geometry import BlockRange, tiling_problem
from trainer.comm.collectives import CommCounter
from trainer.comm.mesh import Mesh
from trainer.optim.clip import clip_coefficient, grad_norm
from trainer.optim.sharded import ShardedOptimizer, rules_of
from trainer.parallel.data.buckets import GradBuckets
from trainer.parallel.data.fsdp import FullyShardedParameters
from trainer.parallel.data.zero2 import ShardedGradBuckets
from trainer.parallel.params import DENSE, GradGroups, even_shard, whole
from trainer.precision import FP64

EXPERT = GradGroups("expert", "expert_grad", "expert_shard", "expert_replica", "expert_model")
HIDDEN = 6
SAMPLES = 3
STEPS = 2
LR = 1e-2
CLIP = 0.05


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, HIDDEN, HIDDEN))

    def forward(self, x, expert):
        return x @ self.weight[expert]


class Block(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        self.experts = Experts(experts)

    def forward(self, x, expert):
        return x + self.experts(torch.tanh(self.dense(x)), expert)


class Toy(nn.Module):
    first = last = False  # a stage in the middle of a pipeline
    ahead = embeddings = head_modules = ()

    def __init__(self, experts):
        super().__init__()
        self.layers = nn.ModuleList([Block(experts), Block(experts)])
        self.scale = nn.Parameter(torch.empty(HIDDEN))

    @property
    def blocks(self):
        return dict(enumerate(self.layers))

    def forward(self, x, expert):
        for block in self.layers:
            x = block(x, expert)
        return (x * self.scale).square().sum()


def full_weights():
    torch.manual_seed(5)
    return {name: torch.randn_like(param).double() for name, param in Toy(2).named_parameters()}


def data(rank, step, micro_batch):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + rank)
    return torch.randn(SAMPLES, HIDDEN, generator=generator, dtype=torch.float64)


def one_process(plan):
    toy = Toy(2).double()
    optim = plan.job.optim
    toy.load_state_dict(full_weights())
    params = dict(toy.named_parameters())
    groups = [
        {
            "params": [p for p in params.values() if (p.dim() > 1) == decay],
            "weight_decay": optim.weight_decay * decay,
        }
        for decay in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    steps = []
    for step in range(STEPS):
        toy.zero_grad()
        for rank in range(4):
            for micro_batch in range(2):
                (toy(data(rank, step, micro_batch), rank % 2) / 100).backward()
        grads = {name: param.grad.clone() for name, param in params.items()}
        norm = nn.utils.clip_grad_norm_(toy.parameters(), CLIP).item()
        adamw.step()
        steps.append(
            (grads, norm, {name: param.detach().clone() for name, param in params.items()})
        )
    assert steps[0][1] > 2 * CLIP, "clipping must do something"
    return steps


def mesh_with_experts(plan, rank):
    """The plan's mesh and the groups of the class EXPERT, of two ranks that hold the same
    expert."""
    mesh = Mesh.from_plan(plan, rank)
    replicas = [(0, 2), (1, 3)]
    both = [(0, 1), (2, 3)]
    process_groups = {ranks: dist.new_group(list(ranks)) for ranks in (*replicas, *both)}
    own_members = {"expert_grad": replicas[rank % 2], "expert_model": both[rank // 2]}
    hybrid = plan.parallel.zero_group == 2
    own_members |= {
        "expert_shard": (rank,) if hybrid else replicas[rank % 2],
        "expert_replica": replicas[rank % 2],
    }
    if not hybrid:
        own_members["expert_replica"] = (rank,)
    groups = {name: process_groups.get(ranks) for name, ranks in own_members.items()}
    return replace(
        mesh,
        members=MappingProxyType({**mesh.members, **own_members}),
        groups=MappingProxyType({**mesh.groups, **groups}),
    )


def run_rank(rank, plan, expected):
    mesh = mesh_with_experts(plan, rank)
    counter = CommCounter()
    zero = plan.parallel.zero
    toy = Toy(1).double()
    table = {}
    full = full_weights()
    for name, param in toy.named_parameters():
        table[name] = whole(name, tuple(full[name].shape))
        if "experts" in name:
            table[name] = replace(
                table[name], shards=(even_shard(0, 2, rank % 2, 2, "ep"),), groups=EXPERT
            )
        param.data = table[name].take(full[name])
    classes = (DENSE, EXPERT)
    if zero == 3:
        buckets = FullyShardedParameters(
            [toy],
            table,
            mesh,
            recipe=FP64,
            counter=counter,
            device=torch.device("cpu"),
            interleaved=False,
            classes=classes,
        )
    else:
        kind = ShardedGradBuckets if zero == 2 else GradBuckets
        triples = [(name, param, table[name]) for name, param in toy.named_parameters()]
        buckets = kind(triples, mesh, zero, torch.float64, 256, counter, classes)
    optimizer = ShardedOptimizer(buckets, rules_of(plan.job.optim), torch.float64)
    for step, (grads, norm, weights) in enumerate(expected):
        buckets.expect(2)
        for micro_batch in range(2):
            (toy(data(rank, step, micro_batch), 0) / 100).backward()
        buckets.finish()
        for name, grad in buckets.full_grads().items():
            torch.testing.assert_close(
                grad, grads[name][table[name].global_slices], rtol=1e-11, atol=1e-13
            )
        measured_norm = grad_norm(buckets, torch.device("cpu"))
        assert measured_norm.item() == pytest.approx(norm, rel=1e-12)
        optimizer.step(LR, clip_coefficient(measured_norm, CLIP), torch.isfinite(measured_norm))
        buckets.wait_params()
        for info, param in buckets.full_params():
            torch.testing.assert_close(
                param, weights[info.name][info.global_slices], rtol=1e-10, atol=1e-12
            )
    pieces = [StatePiece(s.kind, s.info, s.start, s.tensor) for s in optimizer.slices() if s.writes]
    return [[piece.info.name, piece.kind, list(piece.block_range)] for piece in pieces]


CASES = {f"zero{zero}": dict(zero=zero) for zero in range(4)} | {
    "zero1, shards of two neighbours": dict(zero=1, zero_group=2),
    "zero2, shards of two neighbours": dict(zero=2, zero_group=2),
}


@pytest.mark.process
def test_experts_and_dense_parameters_equal_one_process_with_every_zero():
    tasks = {}
    for name, case in CASES.items():
        plan = make_plan(dp=4, **case)
        tasks[name] = (plan, one_process(plan))
    for case, answers in run_together(run_rank, 4, tasks).items():
        with told(case):
            for name, weight in full_weights().items():
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    written = [
                        tuple(block_range)
                        for rank in answers
                        for *key, block_range in rank
                        if key == [name, kind]
                    ]
                    blocks = [BlockRange(tuple(map(tuple, cuts)), *span) for cuts, *span in written]
                    assert tiling_problem(blocks, weight.shape) is None, (name, kind)


def test_a_class_that_ranks_do_not_know_is_refused():
    param = nn.Parameter(torch.zeros(4))
    mesh = Mesh.alone(make_plan())
    info = replace(whole("experts.weight", (4,)), groups=EXPERT)
    with pytest.raises(ValueError, match=r"experts\.weight is of the class 'expert', not among"):
        GradBuckets([("experts.weight", param, info)], mesh, 0, torch.float32, 64, CommCounter())
