"""What docs/gpu.md says about kernels and bytes: the page has the numbers of the committed run, and
these are within the limits that the project sets itself."""

from __future__ import annotations

import json

from benchmarks import kernels

#: Bytes that the loss may move per logit in bf16, forward and backward; 6 read and write each once.
MOST_PER_LOGIT = 8.0


def recorded() -> dict:
    return json.loads(kernels.RESULT.read_text())


def test_the_page_has_the_numbers_of_the_committed_run():
    page = kernels.PAGE.read_text()
    assert page == kernels.filled(page, "kernels", kernels.table(recorded()))


def test_a_step_launches_at_most_a_fifth_more_kernels_than_torchtitans():
    steps = recorded()["step"]
    assert steps["ours"]["kernels"] <= 1.2 * steps["torchtitan"]["kernels"]


def test_elementwise_kernels_move_at_most_a_third_more_than_they_must():
    compiled = recorded()["compiled"]
    assert compiled["blocks"]["ours"]["over"] <= 1.3
    for part in compiled["parts"].values():
        assert 0.9 < part["forward_over"] <= 1.3 and 0.9 < part["backward_over"] <= 1.3


def test_the_loss_moves_at_most_eight_bytes_per_logit_whole_and_sharded():
    parts = recorded()["compiled"]["parts"]
    losses = [part for name, part in parts.items() if name.startswith("cross-entropy")]
    assert len(losses) == 2
    for loss in losses:
        assert 2 * loss["forward_over"] + 4 * loss["backward_over"] <= MOST_PER_LOGIT
