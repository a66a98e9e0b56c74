"""Context parallelism by gathering keys and values (Llama 3, arXiv 2407.21783, section 3.3.2).

The method is simple but not overlapped: one all-gather before attention, one reduce-scatter of the
gradients after it. With grouped-query attention keys and values are much smaller than the queries,
which are not sent. Shards are zig-zag, for balance.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.comm.collectives import CommCounter, all_gather, reduce_scatter
from trainer.model.documents import Documents
from trainer.model.dropout import AttentionDropout
from trainer.parallel.context import block
from trainer.parallel.context.order import chunks, natural_order


class AllGatherAttention:
    """An attention core for one rank: q, k, v [b, s / cp, heads, d] -> [b, s / cp, heads, d]."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        size: int,
        index: int,
        counter: CommCounter,
        drop: AttentionDropout | None = None,
        *,
        causal: bool = True,
    ):
        self.group = group
        self.size = size
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
        return _AllGather.apply(*tensors, documents, scale, self).transpose(1, 2)

    def gather(self, local: Tensor, dim: int) -> Tensor:
        """[..., s / cp, ...] -> [..., s, ...] in sequence order."""
        joined = all_gather(
            local.contiguous()[None],
            self.group,
            "cp",
            self.counter,
        )
        halves = [half for rank in joined.unbind(0) for half in rank.chunk(2, dim=dim)]
        return torch.cat([halves[position] for position in self._positions()], dim=dim)

    def scatter(self, full: Tensor, dim: int) -> Tensor:
        """Returns the sum over the group of this rank's shard of `full`."""
        halves = full.chunk(2 * self.size, dim=dim)
        length = full.shape[dim] // self.size
        sent = full.new_empty(
            self.size,
            *full.shape[:dim],
            length,
            *full.shape[dim + 1 :],
        )
        slots = [half for rank in sent.unbind(0) for half in rank.chunk(2, dim=dim)]
        for half, position in zip(halves, self._positions(), strict=True):
            slots[position].copy_(half)
        return reduce_scatter(sent, self.group, "cp", self.counter)[0]

    def _positions(self) -> list[int]:
        """Returns the positions of the 2 cp chunks of the sequence in the concatenation of the
        ranks' pairs of chunks."""
        return natural_order("allgather", 2 * self.size, self.size)

    def blocks(
        self,
        q: Tensor,
        labels: Tensor | None,
        all_labels: Tensor | None,
        documents: Documents | None,
    ) -> Iterator[tuple[slice, slice, bool, block.Sight]]:
        """Yields the blocks of each chunk: (local queries, keys, whether it is the chunk's last
        block, visibility). With causality they are all keys before it and then its own square,
        which is causal; else all keys."""
        begin = 0
        length = q.shape[2] * self.size
        for chunk in chunks("allgather", length, self.size, self.index):
            rows = slice(begin, begin + len(chunk))
            begin += len(chunk)
            blocks = [(range(length), True)]
            if self.causal:
                blocks = [(range(chunk.start), False), (chunk, True)]
            for keys, last in blocks:
                columns = slice(keys.start, keys.stop)
                sight = block.Sight()
                if labels is not None and all_labels is not None:
                    sight = block.between(
                        labels[:, :, rows],
                        all_labels[:, :, columns],
                        q,
                        self.drop,
                    )
                elif documents is not None:
                    sight = block.inside(documents, (chunk,), (keys,))
                if len(keys) and not sight.nothing:
                    yield rows, columns, last, sight


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        labels,
        documents,
        scale,
        core: AllGatherAttention,
    ):
        dtype = block.accumulation_dtype(q.dtype)
        out = torch.empty_like(q, dtype=dtype)
        lse = torch.empty(q.shape[:-1], dtype=dtype, device=q.device)
        all_k, all_v = core.gather(torch.stack([k, v]), 3)
        all_labels = None if labels is None else core.gather(labels, 2)
        joined = None
        for rows, keys, last, sight in core.blocks(q, labels, all_labels, documents):
            partial = block.forward(
                q[:, :, rows],
                all_k[:, :, keys],
                all_v[:, :, keys],
                scale,
                core.causal and last,
                sight=sight,
            )
            if joined is not None:
                partial = block.join(
                    joined[0].to(dtype),
                    joined[1].to(dtype),
                    *partial,
                )
            joined = None if last else partial
            if last:
                out[:, :, rows], lse[:, :, rows] = partial
        out = out.to(q.dtype)
        inputs = q, k, v, labels
        ctx.save_for_backward(*inputs, out, lse)
        ctx.scale = scale
        ctx.core = core
        ctx.documents = documents
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, labels, out, lse = ctx.saved_tensors
        core = ctx.core
        grad = grad.contiguous()
        dtype = block.accumulation_dtype(q.dtype)
        # Gathered again, not kept: context parallelism must not hold the whole sequence.
        all_k, all_v = core.gather(torch.stack([k, v]), 3)
        all_labels = None if labels is None else core.gather(labels, 2)
        dq = torch.zeros_like(q, dtype=dtype)
        dkv = torch.zeros(2, *all_k.shape, dtype=dtype, device=q.device)
        for rows, keys, last, sight in core.blocks(q, labels, all_labels, ctx.documents):
            block_grads = block.backward(
                grad[:, :, rows],
                q[:, :, rows],
                all_k[:, :, keys],
                all_v[:, :, keys],
                out[:, :, rows],
                lse=lse[:, :, rows].contiguous(),
                scale=ctx.scale,
                causal=core.causal and last,
                sight=sight,
            )
            dq[:, :, rows] += block_grads[0]
            dkv[0][:, :, keys] += block_grads[1]
            dkv[1][:, :, keys] += block_grads[2]
        dk, dv = core.scatter(dkv, 3)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None
