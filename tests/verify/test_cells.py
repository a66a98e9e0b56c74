"""From `parallel=` words to plans that are verified."""

from __future__ import annotations

import pytest

from orchestrator.errors import OrchError
from orchestrator.plan.parity import Cell, Verdict
from orchestrator.verify.cells import of_words


def cells(*words: str) -> list[Cell | Verdict]:
    return list(of_words(words, None))


def test_a_list_of_words_is_a_cell_each():
    found = cells("parallel=tp2_dp1,pp2_dp2_zero1")
    assert [(cell.name, cell.plan.parallel.world_size) for cell in found] == [("tp2_dp1", 2), ("pp2_dp2_zero1", 4)]
    assert [cell.name for cell in cells("+parallel=[tp2, dp4]")] == ["tp2", "dp4"]


def test_dp_left_out_is_what_the_cluster_leaves_of_eight():
    assert cells("parallel=tp2_pp2_zero1")[0].plan.parallel.dp == 2
    three = ("parallel=tp3", "model.heads=9", "model.kv_heads=3", "model.hidden=144", "model.ffn_hidden=96")
    assert cells(*three)[0].plan.parallel.world_size == 6
    assert cells("cluster=h100x64", "parallel=tp4")[0].plan.parallel.dp == 2


def test_the_batch_is_small_and_the_first_step_moves_weights_unless_the_user_says_otherwise():
    plan = cells("parallel=cp2_tp2")[0].plan
    assert plan.job.train.seq_len % 8 == 0 and plan.job.train.seq_len <= 64
    assert plan.parallel.accumulation == 4 and plan.job.optim.warmup_steps == 0
    own = cells("parallel=dp2", "train.seq_len=48", "train.global_batch_samples=6")[0].plan
    assert own.job.train.seq_len == 48 and own.parallel.global_batch_samples == 6


def test_the_model_is_tiny_unless_named():
    assert cells("cluster=h100x8", "parallel=tp2")[0].plan.model.name == "tiny"
    small = cells("parallel=tp2", "model=gpt2", "model.layers=2", "model.hidden=96", "model.vocab=300")[0].plan.model
    assert small.name == "gpt2" and small.layers == 2
    with pytest.raises(OrchError, match=r"million parameters.*model\.layers"):
        cells("parallel=tp2", "model=llama3_8b")


def test_what_the_planner_refuses_is_a_verdict_with_its_line():
    (refused,) = cells("parallel=tp16")
    assert isinstance(refused, Verdict) and refused.word == "refused" and "heads" in refused.refused


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "a layout"), (("train.steps=3",), "a layout"), (("parallel=dp2", "parallel.auto=true"), "degrees")],
)
def test_without_a_layout_one_line_says_how(words, said):
    with pytest.raises(OrchError, match=f"needs {said}"):
        cells(*words)
