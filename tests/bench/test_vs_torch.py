"""The comparison with torch runs: a step of both sides of a case of each technique, with the same
loss."""

from __future__ import annotations

import pytest

from benchmarks.vs_torch.__main__ import TECHNIQUES
from benchmarks.vs_torch.harness import measure

pytestmark = pytest.mark.process


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_both_sides_have_the_same_loss(technique):
    result = measure(TECHNIQUES[technique]("small")[0], rounds=1)
    assert len(result.wall["ours"]) == len(result.wall["torch"]) == 1
    assert result.loss_difference < 1e-5
