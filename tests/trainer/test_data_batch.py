"""Inputs, targets, positions and document numbers of a micro-batch."""

from __future__ import annotations

import torch

from trainer.data.batch import IGNORED, from_windows

EOD = 9


def test_targets_are_the_next_tokens():
    batch = from_windows(torch.tensor([[1, 2, EOD, 3], [4, 5, 6, 7]]))
    assert batch.tokens.tolist() == [[1, 2, EOD], [4, 5, 6]]
    assert batch.targets.tolist() == [[2, EOD, 3], [5, 6, 7]]
    assert batch.positions.tolist() == [[0, 1, 2]] * 2 and batch.documents is None
    assert batch.valid_tokens == 6
    tensors = (batch.tokens, batch.targets, batch.positions)
    assert all(t.dtype == torch.int64 and t.is_contiguous() for t in tensors)


def test_documents_kept_apart():
    batch = from_windows(torch.tensor([[1, EOD, 2, 3, EOD, EOD, 4, 5]]), eod=EOD)
    assert batch.documents.numbers.tolist() == [[0, 0, 1, 1, 1, 2, 3]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0, 0]]
    assert batch.targets.tolist() == [[EOD, IGNORED, 3, EOD, IGNORED, IGNORED, 5]]
    assert batch.valid_tokens == 4


def test_documents_kept_apart_without_a_border_is_plain():
    windows = torch.tensor([[1, 2, 3, 4]])
    plain = from_windows(windows)
    apart = from_windows(windows, eod=EOD)
    assert torch.equal(plain.targets, apart.targets) and torch.equal(
        plain.positions, apart.positions
    )
    assert apart.documents.numbers.tolist() == [[0, 0, 0]]


def test_moves_every_part():
    moved = from_windows(torch.tensor([[1, EOD, 2]]), eod=EOD).to(torch.device("meta"))
    assert {
        t.device.type
        for t in (moved.tokens, moved.targets, moved.positions, moved.documents.numbers)
    } == {"meta"}
