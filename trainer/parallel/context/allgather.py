"""Context parallelism by gathering keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).

Simple and exposed: one all-gather before attention, one reduce-scatter of their gradients after it. With grouped-query
attention keys and values are small beside the queries, which stay where they are. Shards are zig-zag, for balance.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.metrics.comm import CommCounter, all_gather, reduce_scatter
from trainer.parallel.context import block
from trainer.parallel.context.order import chunks, natural_order


class AllGatherAttention:
    """An attention core for one rank: q, k, v [b, s / cp, heads, d] -> [b, s / cp, heads, d]."""

    def __init__(self, group: dist.ProcessGroup, size: int, index: int, counter: CommCounter):
        self.group, self.size, self.index, self.counter = group, size, index, counter

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return _AllGather.apply(q, k, v, documents, q.shape[-1] ** -0.5, self).transpose(1, 2)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """[..., s / cp, ...] -> [..., s, ...] in sequence order."""
        first = all_gather(local.movedim(dim, 0).contiguous(), self.group, "cp", self.counter)
        return first[self._natural(first.shape[0], local.device)].movedim(0, dim).contiguous()

    def scatter(self, full: Tensor, dim: int) -> Tensor:
        """The sum over the group of this rank's shard of `full`."""
        laid = torch.empty_like(full.movedim(dim, 0), memory_format=torch.contiguous_format)
        laid[self._natural(full.shape[dim], full.device)] = full.movedim(dim, 0)
        return reduce_scatter(laid, self.group, "cp", self.counter).movedim(0, dim)

    def _natural(self, seq_len: int, device: torch.device) -> Tensor:
        return torch.tensor(natural_order("allgather", seq_len, self.size), device=device)

    def blocks(self, seq_len: int):
        """(local queries, keys, on the diagonal) of each chunk: everything before it, then its own causal square."""
        begin = 0
        for chunk in chunks("allgather", seq_len, self.size, self.index):
            rows = slice(begin, begin + len(chunk))
            begin += len(chunk)
            if chunk.start:
                yield rows, slice(0, chunk.start), False
            yield rows, slice(chunk.start, chunk.stop), True


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, documents, scale, core: AllGatherAttention):
        wide = block.accumulation_dtype(q.dtype)
        out = torch.zeros_like(q, dtype=wide)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        all_k, all_v = core.gather(k, 2), core.gather(v, 2)
        all_documents = core.gather(documents, 1) if documents is not None else None
        for rows, keys, causal in core.blocks(all_k.shape[2]):
            mask = None if documents is None else block.document_mask(documents[:, rows], all_documents[:, keys])
            part = block.forward(q[:, :, rows], all_k[:, :, keys], all_v[:, :, keys], scale, causal, mask)
            out[:, :, rows], lse[:, :, rows] = block.join(out[:, :, rows], lse[:, :, rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, lse)
        ctx.scale, ctx.core = scale, core
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, documents, out, lse = ctx.saved_tensors
        core, grad, wide = ctx.core, grad.contiguous(), block.accumulation_dtype(q.dtype)
        # Gathered again rather than kept: the point of context parallelism is not to hold the whole sequence.
        all_k, all_v = core.gather(k, 2), core.gather(v, 2)
        all_documents = core.gather(documents, 1) if documents is not None else None
        dq = torch.zeros_like(q, dtype=wide)
        dk, dv = torch.zeros_like(all_k, dtype=wide), torch.zeros_like(all_v, dtype=wide)
        for rows, keys, causal in core.blocks(all_k.shape[2]):
            mask = None if documents is None else block.document_mask(documents[:, rows], all_documents[:, keys])
            parts = block.backward(
                *(grad[:, :, rows], q[:, :, rows], all_k[:, :, keys], all_v[:, :, keys]),
                *(out[:, :, rows], lse[:, :, rows].contiguous(), ctx.scale, causal, mask),
            )
            dq[:, :, rows] += parts[0]
            dk[:, :, keys] += parts[1]
            dv[:, :, keys] += parts[2]
        dk, dv = core.scatter(dk, 2), core.scatter(dv, 2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
