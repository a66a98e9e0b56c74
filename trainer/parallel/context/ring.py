"""Ring attention (arXiv 2310.01889), contiguous or zig-zag: queries stay, keys and values travel round the group.

Step t of n on rank i computes with the keys of rank i - t while those of rank i - t - 1 are already on their way.
Backward goes round again; each block's key and value gradients travel with it and are home after n hops.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.metrics.comm import CommCounter, start_rotate
from trainer.parallel.context import block
from trainer.parallel.context.order import ALL, visible


class RingAttention:
    """An attention core for one rank: q, k, v [b, s / cp, heads, d] -> [b, s / cp, heads, d].

    Bytes sent: forward 2 (n-1) |k|, backward 2 (n-1) |k| + 2 n |dk|, with |k| = b * kv_heads * s/n * d elements.
    """

    def __init__(self, method: str, group: dist.ProcessGroup, ranks: tuple[int, ...], index: int, counter: CommCounter):
        self.method, self.group, self.ranks, self.index, self.counter = method, group, ranks, index, counter

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return _Ring.apply(q, k, v, documents, q.shape[-1] ** -0.5, self).transpose(1, 2)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def rotate(self, tensors: list[Tensor]):
        """Send to the next rank, receive from the previous one; returns a function that waits for what came."""
        to, source = self.ranks[(self.index + 1) % self.size], self.ranks[(self.index - 1) % self.size]
        return start_rotate(tensors, to, source, self.group, "cp", self.counter)

    def sees(self, step: int, local_len: int):
        return visible(self.method, local_len, self.index, (self.index - step) % self.size)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, documents, scale, ring: RingAttention):
        wide = block.accumulation_dtype(q.dtype)
        out = lse = None
        travelling = _pack(k, v, documents)
        for step in range(ring.size):
            arrived = ring.rotate(travelling) if step + 1 < ring.size else None
            see = ring.sees(step, q.shape[-2])
            if see is not None:
                rows, (keys, values) = see.queries, travelling[0][:, :, :, see.keys]
                part = block.forward(q[:, :, rows], keys, values, scale, see.causal, _mask(documents, travelling, see))
                if out is None:  # the first are the rank's own keys, which all its queries see
                    out, lse = part[0].to(wide), part[1].to(wide)
                elif rows == ALL:
                    out, lse = block.join(out, lse, *part)
                else:
                    out[:, :, rows], lse[:, :, rows] = block.join(out[:, :, rows], lse[:, :, rows], *part)
            if arrived is not None:
                travelling = arrived()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, documents, out, lse)
        ctx.scale, ctx.ring = scale, ring
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, documents, out, lse = ctx.saved_tensors
        ring, grad = ctx.ring, grad.contiguous()
        wide = block.accumulation_dtype(q.dtype)
        dq, dkv = None, None
        travelling = _pack(k, v, documents)
        gradients_arrived = None
        for step in range(ring.size):
            arrived = ring.rotate(travelling) if step + 1 < ring.size else None
            see = ring.sees(step, q.shape[-2])
            parts = None
            if see is not None:
                rows, (keys, values) = see.queries, travelling[0][:, :, :, see.keys]
                parts = block.backward(
                    *(grad[:, :, rows], q[:, :, rows], keys, values),
                    *(out[:, :, rows], lse[:, :, rows].contiguous(), ctx.scale, see.causal),
                    _mask(documents, travelling, see),
                )
                if dq is None:
                    dq = parts[0].to(wide)
                else:
                    dq[:, :, rows] += parts[0]
            if gradients_arrived is not None:  # sent on by the previous rank during our computation
                (dkv,) = gradients_arrived()
            if dkv is None:
                dkv = torch.stack([parts[1].to(wide), parts[2].to(wide)])
            elif parts is not None:
                dkv[0][:, :, see.keys] += parts[1]
                dkv[1][:, :, see.keys] += parts[2]
            gradients_arrived = ring.rotate([dkv])
            if arrived is not None:
                travelling = arrived()
        (dkv,) = gradients_arrived()
        dk, dv = dkv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _pack(k: Tensor, v: Tensor, documents: Tensor | None) -> list[Tensor]:
    """What goes round: keys and values [2, b, h, s, d] as one message, documents [b, s] if there are any."""
    return [torch.stack([k, v])] + ([documents.contiguous()] if documents is not None else [])


def _mask(documents: Tensor | None, travelling: list[Tensor], see) -> Tensor | None:
    if documents is None:
        return None
    return block.document_mask(documents[:, see.queries], travelling[1][:, see.keys])
