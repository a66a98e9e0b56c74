"""Context parallelism against torch's ring attention.

`torch.distributed.tensor.experimental.context_parallel` has handlers for CUDA's attention operators
alone. Its ring underneath, `_templated_ring_attention`, takes any operator: here that of the CPU,
with torch's own choice of zig-zag shards, its all-gather or all-to-all rotation and its merging of
blocks. The rest of the model is ours on both sides.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from orchestrator.plan import Plan
from orchestrator.plan.supported import BALANCED

from .common import Batches, Ours, plan_of
from .harness import Case, Step

forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class TorchsRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        out, lse = torchs._templated_ring_attention(group, 2, forward_op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, lse = ctx.saved_tensors

        def operator(*, query: Tensor, key: Tensor, value: Tensor, logsumexp: Tensor, grad_out: Tensor, out: Tensor,
                     is_causal: bool) -> tuple[Tensor, ...]:  # fmt: skip
            return backward_op(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

        grads = torchs._templated_ring_attention_backward(
            ctx.group,
            2,
            operator,
            grad.contiguous(),
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            is_causal=True,
        )
        return *grads[:3], None


class TorchsCore:
    """In the place of our attention core: q, k, v [b, s / cp, heads, d] -> [b, s / cp, heads,
    d]."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None
    ) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        k, v = (
            x.repeat_interleave(groups, dim=2) for x in (k, v)
        )  # the ring knows no grouped heads
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return TorchsRing.apply(q, k, v, self.group).transpose(1, 2)


def build(rotation: str):
    def build(rank: int, plan: Plan) -> tuple[Step, Step]:
        torchs._cp_options.rotate_method = torchs._RotateMethod[rotation]
        torchs._cp_options.enable_load_balance = plan.parallel.cp_method in BALANCED
        batches = Batches(plan, rank)
        ours = Ours(plan, rank, batches)
        native = Ours(plan, rank, batches)
        for stage in native.engine.part.stages:
            for block in stage.layers.values():
                block.attn.core = TorchsCore(native.engine.mesh.group("cp"))
        return ours, native

    return build


def cases(size: str) -> list[Case]:
    def plan(method: str) -> Plan:
        return plan_of(
            size, seq_len=1024, cp=2, cp_method=method, micro_batch_size=1, micro_batches=1
        )

    return [
        Case("cp ring", "ring attention, contiguous", plan("ring"), build("ALL_TO_ALL")),
        Case("cp zigzag", "ring attention, all-to-all", plan("zigzag"), build("ALL_TO_ALL")),
        Case("cp allgather", "ring attention, all-gather", plan("allgather"), build("ALL_GATHER")),
        Case("cp ulysses", "ring attention, contiguous", plan("ulysses"), build("ALL_TO_ALL")),
    ]
