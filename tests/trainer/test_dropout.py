"""Dropout's masks: what the twin draws, at the right rate, without patterns, and the same however
they are cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reference import dropout as twin
from tests.trainer.operations import Kernels
from trainer.data.batch import MicroBatch, with_serials
from trainer.model.dropout import AttentionDropout, Dropout, seed_dropout

SERIAL = torch.arange(96).reshape(2, 48) + 10_000


def seeded(module: nn.Module, seed: int = 7) -> nn.Module:
    holder = nn.Module()
    holder.drop = module
    seed_dropout(holder, seed)
    return module


def test_hidden_and_attention_masks_are_those_of_the_twin():
    x = torch.randn(2, 48, 8, dtype=torch.float64)
    dropped = seeded(Dropout(0.3, 8))(x, SERIAL)
    torch.testing.assert_close(dropped, twin.hidden(x, SERIAL, 7, "drop", 0.3), rtol=1e-15, atol=0)
    weights = torch.rand(2, 3, 48, 48, dtype=torch.float64)
    drop = seeded(AttentionDropout(0.3, 8))
    drop.first_head = 5
    dropped = weights * drop.kept(SERIAL, SERIAL, 3) * drop.scale
    for head in range(3):
        expected = twin.probabilities(weights[:, head], SERIAL, 5 + head, 7, "drop", 0.3)
        torch.testing.assert_close(dropped[:, head], expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_masks_have_their_rate_in_every_row_and_column_and_no_pattern(rate):
    serial = torch.arange(1000)[None]
    keep = seeded(Dropout(rate, 1000))(torch.ones(1, 1000, 1000), serial)[0] > 0
    mask = keep.double()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(mask.mean() - (1 - rate)) < 5 * deviation / 1e3
    for dim in (0, 1):
        assert (mask.mean(dim) - (1 - rate)).abs().max() < 6 * deviation / 1000**0.5
    shapes = (
        (mask[1:], mask[:-1]),
        (mask[:, 1:], mask[:, :-1]),
        (mask[32:], mask[:-32]),
        (mask, mask.T),
    )
    for first, second in shapes:  # neighbours, powers of two apart, transposed
        correlation = ((first - 1 + rate) * (second - 1 + rate)).mean() / deviation**2
        assert abs(correlation) < 6e-3


def test_other_seeds_names_tokens_and_heads_draw_other_masks():
    x = torch.ones(2, 48, 64)
    masks = [
        seeded(Dropout(0.5, 64), seed)(x, serial) > 0
        for seed in (1, 2)
        for serial in (SERIAL, SERIAL + 96)
    ]
    holder = nn.Module()
    holder.other = Dropout(0.5, 64)
    seed_dropout(holder, 1)
    masks.append(holder.other(x, SERIAL) > 0)
    heads = seeded(AttentionDropout(0.5, 4)).kept(SERIAL, SERIAL, 4)
    for group in (masks, list(heads.unbind(1))):
        for i, mask in enumerate(group):
            for earlier_mask in group[:i]:
                assert 0.4 < (mask == earlier_mask).double().mean() < 0.6


def test_a_shard_draws_what_the_whole_draws_for_it():
    x = torch.randn(2, 48, 16)
    drop = seeded(Dropout(0.4, 16))
    full_output = drop(x, SERIAL)
    tokens = [3, 17, 40]
    assert torch.equal(drop(x[:, tokens], SERIAL[:, tokens]), full_output[:, tokens])


def test_tokens_are_numbered_by_the_place_of_their_sample():
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    batch = with_serials(MicroBatch(tokens, tokens, tokens, None), [5, 9])
    assert batch.serial.tolist() == [[20, 21, 22, 23], [36, 37, 38, 39]]


def test_a_rate_of_zero_costs_nothing_and_needs_no_seed():
    x = torch.randn(1, 2, 3)
    assert Dropout(0.0, 3)(x, None) is x


def test_dropout_takes_few_kernels():
    """36 before; those over [b, s, h] are the product, the comparison, and on a GPU one for the
    rest."""
    x = torch.randn(2, 48, 16, requires_grad=True)
    drop = seeded(Dropout(0.4, 16))
    with Kernels() as kernels:
        drop(x, SERIAL).sum().backward()
    assert len(kernels.seen) <= 26, kernels.seen
