"""Bugs of optimizers of whole matrices, of narrow optimizer states, and of products in 8 bits."""

from __future__ import annotations

from dataclasses import replace

import torch

import trainer.optim.muon as muon
import trainer.optim.narrow as narrow
import trainer.optim.owners as owners
from tests.beds.plans import tiny_model

from .base import Mutations

PRECISION = mutations = Mutations()

MUON = {"optim_kind": "muon"}


@mutations("whole matrices: each rank orthogonalises its own rows", dp=2, zero=3, **MUON)
def rows_alone(patch):
    patch.setattr(
        muon,
        "map_whole_matrices",
        lambda shards, cuts, counter, function: [function(shard) for shard in shards],
    )


@mutations("whole matrices: an owner sends every rank the first rows", dp=2, zero=3, **MUON)
def first_rows(patch):
    patch.setattr(
        owners.Cut,
        "slice_of",
        lambda self, matrix, rank: matrix.narrow(self.dim, 0, self.length(rank)),
    )


@mutations(
    "whole matrices: shared key-value heads are counted twice",
    tp=4,
    model=tiny_model(kv_heads=2),
    **MUON,
)
def copies_twice(patch):
    patch.setattr(owners.Cut, "sent_length", lambda self, rank: self.length(rank))


@mutations(
    "whole matrices: the step is that of the local shape",
    tp=2,
    model=tiny_model(ffn_hidden=80),
    **MUON,
)
def local_shape(patch):
    original = owners.map_whole_matrices

    def scaled(shards, cuts, counter, function):
        directions = original(shards, cuts, counter, function)
        shapes = [
            cut[-1].shape if cut else shard.shape for cut, shard in zip(cuts, shards, strict=True)
        ]
        return [
            direction * (max(direction.shape) / max(shape)) ** 0.5
            for direction, shape in zip(directions, shapes, strict=True)
        ]

    patch.setattr(muon, "map_whole_matrices", scaled)


WIDE = {"model": tiny_model(layers=2, hidden=64, head_dim=32, ffn_hidden=128)}


@mutations("narrow state: random bits are those of the slice", tp=2, optim_state="bf16", **WIDE)
def bits_of_the_slice(patch):
    original = narrow.random_bits

    def local(info, *rest):
        return original(replace(info, global_shape=info.local_shape, shards=()), *rest)

    patch.setattr(narrow, "random_bits", local)


@mutations("narrow state: every update has the same random bits", optim_state="bf16", **WIDE)
def same_bits(patch):
    original = narrow.random_bits
    patch.setattr(narrow, "random_bits", lambda *args: original(*args[:-1], torch.tensor(5.0)))


@mutations("narrow state: a block has the scale of the one before", optim_state="8bit", **WIDE)
def scale_before(patch):
    def store(self, start, value, update, original=narrow.Eight.store):
        original(self, start, value, update)
        self.largest.copy_(self.largest.roll(1))

    patch.setattr(narrow.Eight, "store", store)


@mutations("narrow state: squares are kept with a sign", optim_state="8bit", **WIDE)
def signed_squares(patch):
    patch.setattr(narrow, "UNSIGNED", ())
