"""Ring attention (arXiv 2310.01889), contiguous or zig-zag: queries stay, keys and values rotate
around the group.

Step t of n on rank i computes with the keys of rank i - t while those of rank i - t - 1 are in
transit. Backward rotates the keys a second time; the key and value gradients of each block rotate
with them, and arrive on their own rank after n hops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, start_rotate
from trainer.model.documents import Documents
from trainer.model.dropout import AttentionDropout
from trainer.parallel.context import block
from trainer.parallel.context.order import ALL, EVERYTHING, Visible, chunks, part, visible


class RingAttention:
    """An attention core for one rank: q, k, v [b, s / cp, heads, d] -> [b, s / cp, heads, d].

    Bytes sent: forward 2 (n-1) |k|, backward 2 (n-1) |k| + 2 n |dk|, with |k| = b * kv_heads * s/n
    * d elements.
    """

    def __init__(
        self,
        method: str,
        group: dist.ProcessGroup,
        ranks: tuple[int, ...],
        index: int,
        counter: CommCounter,
        drop: AttentionDropout | None = None,
        *,
        causal: bool = True,
    ):
        self.method = method
        self.group = group
        self.ranks = ranks
        self.index = index
        self.counter = counter
        self.drop = drop
        self.causal = causal

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_index: Tensor | None,
        documents: Documents | None,
    ) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        tensors = q, k, v, block.labels(documents, token_index, self.drop, q)
        scale = q.shape[-1] ** -0.5
        return _Ring.apply(*tensors, documents, scale, self).transpose(1, 2)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def rotate(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Sends tensors to the next rank and receives those of the previous one. Returns a function
        that waits for the received tensors."""
        to = self.ranks[(self.index + 1) % self.size]
        source = self.ranks[(self.index - 1) % self.size]
        return start_rotate(
            tensors,
            to,
            source,
            self.group,
            axis="cp",
            counter=self.counter,
        )

    def start_step(self, step: int, rotating: list[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts to rotate the keys and values for `step`; after the last step nothing rotates.
        Returns a function that waits for them."""
        return self.rotate(rotating) if step < self.size else lambda: rotating

    def sees(
        self,
        step: int,
        q: Tensor,
        labels: Tensor | None,
        rotating: list[Tensor],
        documents: Documents | None,
    ) -> tuple[Visible | None, block.Sight]:
        """Returns the queries that see keys in `step`, these keys, and their visibility."""
        local = q.shape[-2]
        source = (self.index - step) % self.size
        pairs = visible(self.method, local, self.index, source) if self.causal else EVERYTHING
        if pairs is None:
            return None, block.Sight()
        if labels is not None:
            query_labels = labels[:, :, pairs.queries]
            key_labels = rotating[1][:, :, pairs.keys]
            return pairs, block.between(query_labels, key_labels, q, self.drop)
        if documents is None:
            return pairs, block.Sight()
        query_ranges = chunks(
            self.method,
            local * self.size,
            self.size,
            self.index,
        )
        key_ranges = chunks(self.method, local * self.size, self.size, source)
        query_positions = part(query_ranges, pairs.queries)
        sight = block.inside(documents, query_positions, part(key_ranges, pairs.keys))
        return (None if sight.nothing else pairs), sight


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        labels,
        documents,
        scale,
        ring: RingAttention,
    ):
        dtype = block.accumulation_dtype(q.dtype)
        rotating = _pack(k, v, labels)
        for step in range(ring.size):
            next_keys = ring.start_step(step + 1, rotating)
            visible_block, sight = ring.sees(step, q, labels, rotating, documents)
            if visible_block is not None:
                rows = visible_block.queries
                keys, values = rotating[0][:, :, :, visible_block.keys]
                partial = block.forward(
                    q[:, :, rows],
                    keys,
                    values,
                    scale,
                    visible_block.causal,
                    sight=sight,
                )
                if step == 0:  # the rank's own keys, which all its queries see
                    out = partial[0].to(dtype)
                    lse = partial[1].to(dtype)
                elif rows == ALL:
                    out, lse = block.join(out, lse, *partial)
                else:
                    joined = block.join(out[:, :, rows], lse[:, :, rows], *partial)
                    out[:, :, rows], lse[:, :, rows] = joined
            rotating = next_keys()
        out = out.to(q.dtype)
        inputs = q, k, v, labels
        ctx.save_for_backward(*inputs, out, lse)
        ctx.scale = scale
        ctx.ring = ring
        ctx.documents = documents
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, labels, out, lse = ctx.saved_tensors
        ring = ctx.ring
        grad = grad.contiguous()
        dtype = block.accumulation_dtype(q.dtype)
        rotating = _pack(k, v, labels)
        wait_for_grads: Callable[[], list[Tensor]] = list  # replaced in each step
        for step in range(ring.size):
            next_keys = ring.start_step(step + 1, rotating)
            visible_block, sight = ring.sees(step, q, labels, rotating, ctx.documents)
            if visible_block is not None:
                rows = visible_block.queries
                keys, values = rotating[0][:, :, :, visible_block.keys]
                dq_block, *dkv_block = block.backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    keys,
                    values,
                    out[:, :, rows],
                    lse=lse[:, :, rows].contiguous(),
                    scale=ctx.scale,
                    causal=visible_block.causal,
                    sight=sight,
                )
            if step > 0:
                (dkv,) = wait_for_grads()  # sent by the previous rank during our computation
            if visible_block is not None and step == 0:  # the rank's own keys
                dq = dq_block.to(dtype)
                dkv = torch.stack([grads.to(dtype) for grads in dkv_block])
            elif visible_block is not None:
                _add_grads(dq, dkv, visible_block, dq_block, dkv_block)
            wait_for_grads = ring.rotate([dkv])
            rotating = next_keys()
        (dkv,) = wait_for_grads()
        dk, dv = dkv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _add_grads(
    dq: Tensor,
    dkv: Tensor,
    visible_block: Visible,
    dq_block: Tensor,
    dkv_block: list[Tensor],
) -> None:
    """Adds the gradients of a block to those of all queries [b, h, s, d], and of all keys and
    values [2, b, h, s, d]."""
    dk_block, dv_block = dkv_block
    dq[:, :, visible_block.queries] += dq_block
    dkv[0][:, :, visible_block.keys] += dk_block
    dkv[1][:, :, visible_block.keys] += dv_block


def _pack(k: Tensor, v: Tensor, labels: Tensor | None) -> list[Tensor]:
    """Returns the rotating tensors: keys and values [2, b, h, s, d] as one message, and the tokens'
    labels, if any."""
    keys_and_values = torch.stack([k, v])
    return [keys_and_values] if labels is None else [keys_and_values, labels.contiguous()]
