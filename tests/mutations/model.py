"""Bugs of tensor, sequence and context parallelism."""

from __future__ import annotations

from copy import copy
from dataclasses import replace

import torch

import trainer.comm.mesh as mesh
import trainer.engine as engine
import trainer.parallel.apply as apply
import trainer.parallel.column_parallel as column_parallel
import trainer.parallel.context.apply as context
import trainer.parallel.context.block as block
import trainer.parallel.context.ring as ring
import trainer.parallel.pieces as pieces
import trainer.parallel.tensor as tensor
import trainer.parallel.vocab as vocab
from tests.beds.plans import tiny_model
from tests.trainer import samples
from trainer.model.block import Block
from trainer.model.dropout import Dropout
from trainer.parallel.context.ulysses import UlyssesAttention

from .base import Mutations

MODEL = Mutations()
GPT = tiny_model(**samples.GPT, **samples.MHA, tied_embeddings=True)


def _registry(patch, change):
    """`change(info)` -> what the registry says of a parameter instead."""
    original = apply.shard
    patch.setattr(apply, "shard", lambda *args, **options: change(original(*args, **options)))


@MODEL("sequence parallel: norm weights are not summed over tp", tp=2)
def _(patch):
    _registry(patch, lambda info: replace(info, sums=() if "norm" in info.name else info.sums))


@MODEL("replicated key-value heads are not summed over tp", tp=2, model=tiny_model(kv_heads=1))
def _(patch):
    _registry(patch, lambda info: replace(info, sums=() if ".attn.w" in info.name else info.sums))


@MODEL("the norm counts a replicated weight on every tp rank", tp=2)
def _(patch):
    _registry(patch, lambda info: replace(info, owner=True))


@MODEL("tensor parallel: no all-reduce in backward", tp=2, sp=False)
def _(patch):
    patch.setattr(
        column_parallel.OverlappedColumnLinears, "start_sum", lambda self, grad: lambda: grad
    )


@MODEL("sequence parallel: backward keeps its slice and drops the others' parts", tp=2)
def _(patch):
    def start_sum(self, grad):
        return lambda: grad.chunk(self.group.size(), dim=1)[self.group.rank()].contiguous()

    patch.setattr(column_parallel.OverlappedColumnLinears, "start_sum", start_sum)


@MODEL("sequence parallel: the input gathered again in backward is of the wrong order", tp=2)
def _(patch):
    original = column_parallel._OverlappedColumnLinears.backward

    def backward(ctx, *grads):
        right = ctx.columns
        ctx.columns = copy(ctx.columns)
        ctx.columns.start_gather = lambda x: (
            lambda: right.start_gather(x)().roll(x.shape[1], dims=1)
        )
        return original(ctx, *grads)

    patch.setattr(column_parallel._OverlappedColumnLinears, "backward", staticmethod(backward))


@MODEL("pieces: a product is written where another piece lies", tp=2, tp_pieces=2)
def _(patch):
    original = pieces.Pieces.of_sequence
    patch.setattr(pieces.Pieces, "of_sequence", lambda self, x: original(self, x)[::-1])


@MODEL("pieces: a kept input stays in their order", tp=2, tp_pieces=4, recompute="full")
def _(patch):
    def in_sequence(self, joined):
        return joined.view(self.groups * self.samples, -1, joined.shape[-1])

    patch.setattr(pieces.Pieces, "in_sequence", in_sequence)


@MODEL("pieces: gradients in their order meet an input in that of the sequence", tp=2, tp_pieces=4)
def _(patch):
    patch.setattr(pieces.Pieces, "join", lambda self, x: x.flatten(0, 1))


@MODEL("output biases are added on every tp rank", tp=2, sp=False, model=GPT)
def _(patch):
    def forward(self, x, serial=None, documents=None, rope=None, rows=None):
        x = x + self.attn_out(self.attend(x, serial, documents, rope) + self.attn.out_bias)
        return x + self.mlp_out(self.feed_forward(x, rows) + self.mlp.out_bias)

    patch.setattr(Block, "forward", forward)


@MODEL("the softmax counts the vocabulary's padding", tp=2)
def _(patch):
    original = vocab.VocabParallelLoss.__init__

    def init(self, start, valid, *rest):
        original(
            self, start, start or valid, *rest
        )  # of two shards, the second begins where the first ends

    patch.setattr(vocab.VocabParallelLoss, "__init__", init)


@MODEL("each tp rank's softmax is over its own columns", tp=2)
def _(patch):
    patch.setattr(vocab, "all_gather", lambda local_shard, *args: local_shard)


@MODEL("the embedding's shard begins one row late", tp=2)
def _(patch):
    original = vocab.ShardedLookup.__init__
    patch.setattr(
        vocab.ShardedLookup,
        "__init__",
        lambda self, start, stop: original(self, start + (start > 0), stop),
    )


# -------------------------------------------------------------------------------------------
#     context parallelism


@MODEL("wrong ring order: keys travel the other way", cp=3, cp_method="ring", seq_len=24)
def _(patch):
    def rotate(self, tensors):
        to = self.ranks[(self.index - 1) % self.size]
        source = self.ranks[(self.index + 1) % self.size]
        return ring.start_rotate(tensors, to, source, self.group, "cp", self.counter)

    patch.setattr(ring.RingAttention, "rotate", rotate)


@MODEL("positions start anew on each cp rank", cp=2)
def _(patch):
    original = engine.shard_batch

    def local(batch, *cp):
        shard = original(batch, *cp)
        return replace(shard, positions=torch.arange(shard.tokens.shape[1]).expand_as(shard.tokens))

    patch.setattr(engine, "shard_batch", local)


@MODEL("contiguous shards under zig-zag attention", cp=2)
def _(patch):
    original = context.chunks
    patch.setattr(context, "chunks", lambda method, *shape: original("ring", *shape))


@MODEL("gradients are summed over dp and not over cp", cp=2)
def _(patch):
    original = mesh.members_of
    patch.setattr(
        mesh,
        "members_of",
        lambda plan, name, rank: original(plan, "dp" if name == "grad" else name, rank),
    )


@MODEL("keys and values from other ranks get no gradient", cp=2)
def _(patch):
    original = block.backward

    def backward(*args, causal, **options):
        dq, dk, dv = original(*args, causal=causal, **options)
        return (dq, dk, dv) if causal else (dq, torch.zeros_like(dk), torch.zeros_like(dv))

    patch.setattr(block, "backward", backward)


@MODEL("blocks of attention are averaged, not joined by their log-sum-exp", cp=2)
def _(patch):
    original = block.join

    def join(out, lse, block_out, block_lse):
        joined = original(out, lse, block_out, block_lse)
        seen = ~torch.isinf(lse)[..., None]
        return torch.where(seen, (out + block_out) / 2, joined[0]), joined[1]

    patch.setattr(block, "join", join)


@MODEL("packed documents see each other across ranks", cp=2, packed=True)
def _(patch):
    patch.setattr(block, "inside", lambda *where: block.Sight())


@MODEL("ulysses: pieces are joined in the wrong order", cp=2, cp_method="ulysses")
def _(patch):
    original = UlyssesAttention.exchange
    patch.setattr(
        UlyssesAttention,
        "exchange",
        lambda self, x, split, join: original(self, x, split, join).roll(1, dims=join),
    )


# -------------------------------------------------------------------------------------------
#     dropout

DROPPED = tiny_model(dropout=0.1)


@MODEL("every shard of a sequence draws dropout for the first shard", tp=2, model=DROPPED)
def _(patch):
    patch.setattr(tensor.SequenceShard, "forward", lambda self, x: x.chunk(self.ranks, dim=1)[0])


@MODEL("attention dropout counts heads from zero on each tp rank", tp=2, model=DROPPED)
def _(patch):
    patch.setattr(apply, "set_dropout_heads", lambda *args: None)


@MODEL("context parallel ranks number their tokens alike", cp=2, model=DROPPED)
def _(patch):
    original = engine.shard_batch

    def local(batch, *cp):
        shard = original(batch, *cp)
        return replace(shard, serial=batch.serial[:, : shard.tokens.shape[1]])

    patch.setattr(engine, "shard_batch", local)


@MODEL("keys do not carry their serials round the ring", cp=2, cp_method="ring", model=DROPPED)
def _(patch):
    original = block.between

    def between(queries, keys, *rest):
        keys = torch.stack([keys[0], queries[1]]) if keys.shape == queries.shape else keys
        return original(queries, keys, *rest)

    patch.setattr(block, "between", between)


@MODEL("recomputation draws dropout anew", recompute="full", model=DROPPED)
def _(patch):
    original = Dropout.forward
    draws = []

    def forward(self, x, serial):
        draws.append(self)
        return original(
            self, x, serial + len(draws) if torch._C._current_graph_task_id() != -1 else serial
        )

    patch.setattr(Dropout, "forward", forward)
