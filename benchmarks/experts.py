"""python -m benchmarks.experts [--only NAME ...] [--rounds 31] [--torchtitan DIR]

Dispatch, experts and combine of one layer, forward and backward, beside the same in plain torch
(written here: an uneven `all_to_all_single`, a loop of `F.linear` by expert, `index_add`) and
beside torchtitan's `AllToAllTokenDispatcher` around that loop; in turns, in the same processes
(`vs_torch.harness`). Before they are timed, the sides' results and gradients must be equal. Shapes
are those of the models, hidden and inner sizes divided; all experts and choices are there.

Prints one line a case: the median of the ratios of neighbouring steps (below 1: ours is faster),
their range, and that of processor time. Writes benchmarks/results/experts.json. DIR holds
torchtitan without what it depends on, as for benchmarks/kernels.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.vs_torch.harness import ROOT, Case, Step, row_of
from orchestrator.plan import Plan
from orchestrator.plan.document import Moe
from tests.beds.plans import make_plan, tiny_model
from trainer.comm.collectives import CommCounter
from trainer.model.experts import Experts, nothing
from trainer.model.router import Routing
from trainer.parallel.expert.dispatch import ExpertDispatch

RESULT = ROOT / "benchmarks" / "results" / "experts.json"
RANKS = (2, 4)


class Shape(NamedTuple):
    """Of a model in conf/model, with `hidden` and `ffn` divided by `scale`."""

    hidden: int
    ffn: int  # of an expert
    experts: int
    top_k: int
    scale: int
    tokens: int  # that a rank brings


SHAPES = {
    "mixtral_8x7b": Shape(4096, 14336, 8, 2, 16, 1024),
    "qwen3_30b_a3b": Shape(2048, 768, 128, 8, 8, 1024),
    "deepseek_v3": Shape(7168, 2048, 256, 8, 16, 512),
}


class Layer:
    """What both sides compute with: one rank's tokens, their choices, its experts."""

    def __init__(self, shape: Shape, rank: int, ranks: int):
        hidden = shape.hidden // shape.scale
        self.count = shape.experts // ranks
        moe = Moe(experts=self.count, top_k=shape.top_k, ffn_hidden=shape.ffn // shape.scale)
        self.module = Experts(tiny_model(hidden=hidden, moe=moe), moe)
        generator = torch.Generator().manual_seed(rank)
        for param in self.module.parameters():
            param.data.normal_(0.0, 0.02, generator=generator)
        self.x = torch.randn(shape.tokens, hidden, generator=generator, requires_grad=True)
        scores = torch.randn(shape.tokens, shape.experts, generator=generator).softmax(-1)
        weights, self.chosen = scores.topk(shape.top_k)
        self.weights = (weights / weights.sum(-1, keepdim=True)).requires_grad_()
        self.grad = torch.randn(shape.tokens, hidden, generator=generator)
        self.shape = shape
        self.ranks = ranks

    def step(self, forward: Callable[[], Tensor], params: list[Tensor]) -> Tensor:
        """Forward and backward; gradients are new ones each time."""
        for one in (self.x, self.weights, *params):
            one.grad = None
        out = forward()
        out.backward(self.grad)
        return out.detach().abs().sum()

    def gradients(self, params: list[Tensor]) -> list[Tensor]:
        """Of the tokens, of the choices' weights, and of each expert's gate, up and down."""
        found = [one.grad for one in (self.x, self.weights, *params) if one.grad is not None]
        assert len(found) == 2 + len(params)
        return [
            found[0],
            found[1],
            *(matrix for whole in found[2:] for matrix in whole.reshape(-1, *whole.shape[-2:])),
        ]


class Ours:
    def __init__(self, layer: Layer):
        self.layer = layer
        self.params = list(layer.module.parameters())
        self.dispatch = ExpertDispatch(
            dist.group.WORLD, None, CommCounter(), ["network"] * layer.ranks
        )
        ones = layer.weights.detach()
        self.routing = Routing(layer.chosen, layer.weights, ones, ones)

    def forward(self) -> Tensor:
        return self.dispatch(self.layer.x, self.routing, self.layer.module, nothing)[0]


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent = sent
        ctx.received = received
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received)
        return out, None, None


class Plain:
    """Every expert has matrices of its own, which is the fastest form of the loop: autograd adds up
    nothing."""

    def __init__(self, layer: Layer):
        self.layer = layer
        self.gate, self.up, self.down = (
            [matrix.detach().clone().requires_grad_() for matrix in whole.weight]
            for whole in (layer.module.gate, layer.module.up, layer.module.down)
        )
        self.params = [*self.gate, *self.up, *self.down]

    def experts(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Rows sorted by expert."""
        found = []
        for x, gate, up, down in zip(
            rows.split(counts), self.gate, self.up, self.down, strict=True
        ):
            found.append(F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down))
        return torch.cat(found)

    def forward(self) -> Tensor:
        layer = self.layer
        order = layer.chosen.flatten().argsort(stable=True)
        token = order // layer.shape.top_k
        counts = layer.chosen.flatten().bincount(minlength=layer.shape.experts)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts)
        sent, received = (one.view(layer.ranks, -1).sum(1).tolist() for one in (counts, arriving))
        rows = Exchange.apply(layer.x[token], sent, received)
        here = (
            torch.arange(layer.count)
            .repeat(layer.ranks)
            .repeat_interleave(arriving)
            .argsort(stable=True)
        )
        out = self.experts(rows[here], arriving.view(layer.ranks, -1).sum(0).tolist())
        out = Exchange.apply(torch.empty_like(out).index_copy(0, here, out), received, sent)
        out = out * layer.weights.flatten()[order][:, None]
        return torch.zeros_like(layer.x).index_add(0, token, out)


class Torchtitan(Plain):
    """Its dispatcher around our plain loop: its own experts compute in bf16 alone."""

    def __init__(self, layer: Layer):
        from torch.distributed.device_mesh import init_device_mesh
        from torchtitan.distributed.utils import set_spmd_backend
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        super().__init__(layer)
        set_spmd_backend("default")  # without its type checker of layouts
        config = AllToAllTokenDispatcher.Config(
            num_experts=layer.shape.experts, top_k=layer.shape.top_k
        )
        self.dispatcher = AllToAllTokenDispatcher(config)
        self.dispatcher.wire_meshes(ep_mesh=init_device_mesh("cpu", (layer.ranks,)))

    def forward(self) -> Tensor:
        layer = self.layer
        counts = layer.chosen.flatten().bincount(minlength=layer.shape.experts)
        rows, counts, meta = self.dispatcher.dispatch(layer.x, layer.weights, layer.chosen, counts)
        return self.dispatcher.combine(self.experts(rows, counts.tolist()), meta, layer.x)


def build(rank: int, plan: Plan, shape: Shape, native: type[Plain]) -> tuple[Step, Step]:
    layer = Layer(shape, rank, plan.parallel.world_size)
    sides = Ours(layer), native(layer)
    steps = [partial(layer.step, side.forward, side.params) for side in sides]
    found = []
    for side, step in zip(sides, steps, strict=True):
        out = step()
        found.append([out, *layer.gradients(side.params)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return steps[0], steps[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts", description=__doc__.partition("\n")[2]
    )
    parser.add_argument("--only", nargs="*", default=[], help="models by name")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--torchtitan", help="folder with torchtitan")
    args = parser.parse_args()
    natives = {"plain torch": Plain}
    if args.torchtitan:
        sys.path.append(args.torchtitan)
        natives["torchtitan"] = Torchtitan
    rows = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    print(
        f"{'case':<36} {'ours':>8} {'theirs':>8} {'ratio':>6} {'min-max':>11} {'cpu':>6} "
        " difference"
    )
    for name, shape in SHAPES.items():
        for ranks in RANKS:
            for native, kind in natives.items():
                if not args.only or name in args.only:
                    made = partial(build, shape=shape, native=kind)
                    case = Case(f"{name} ep{ranks}", native, make_plan(ep=ranks), made)
                    title = f"{case.name} / {native}"
                    rows[title] = row_of(case, args.rounds, title, 36, **shape._asdict())
                    RESULT.write_text(json.dumps({"cases": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
