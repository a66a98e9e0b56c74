"""The way from `parallel=` words to plans that are verified."""

from __future__ import annotations

import pytest

from orchestrator.errors import OrchError
from orchestrator.plan.parity import Cell, Verdict
from orchestrator.verify import scale
from orchestrator.verify.cells import cells_of_overrides


def cells(*overrides: str) -> list[Cell | Verdict]:
    return list(cells_of_overrides(overrides, None))


def test_a_list_of_words_is_a_cell_each():
    layout_cells = cells("parallel=tp2_dp1,pp2_dp2_zero1")
    assert [(cell.name, cell.plan.parallel.world_size) for cell in layout_cells] == [
        ("tp2_dp1", 2),
        ("pp2_dp2_zero1", 4),
    ]
    assert [cell.name for cell in cells("+parallel=[tp2, dp4]")] == ["tp2", "dp4"]


def test_dp_left_out_is_what_the_cluster_leaves_of_eight():
    assert cells("parallel=tp2_pp2_zero1")[0].plan.parallel.dp == 2
    three = (
        "parallel=tp3",
        "model.heads=9",
        "model.kv_heads=3",
        "model.hidden=144",
        "model.ffn_hidden=96",
    )
    assert (
        cells(*three)[0].plan.parallel.world_size
        == cells("parallel=tp3")[0].plan.parallel.world_size
        == 6
    )
    assert cells("cluster=h100x64", "parallel=tp4")[0].plan.parallel.dp == 2


def test_the_batch_is_small_and_the_first_step_moves_weights_unless_the_user_says_otherwise():
    plan = cells("parallel=cp2_tp2")[0].plan
    assert plan.job.train.seq_len % 8 == 0 and plan.job.train.seq_len <= 64
    assert plan.parallel.accumulation == 4 and plan.job.optim.warmup_steps == 0
    user_plan = cells("parallel=dp2", "train.seq_len=48", "train.global_batch_samples=6")[0].plan
    assert user_plan.job.train.seq_len == 48 and user_plan.parallel.global_batch_samples == 6


def test_the_model_is_tiny_unless_named():
    assert cells("cluster=h100x8", "parallel=tp2")[0].plan.model.name == "tiny"
    small = cells(
        "parallel=tp2", "model=gpt2", "model.layers=2", "model.hidden=96", "model.vocab=300"
    )[0].plan.model
    assert small.name == "gpt2" and small.layers == 2


def test_a_model_that_is_too_large_is_scaled_in_kind_and_the_note_says_so():
    (cell,) = cells("cluster=h100x8", "parallel=tp2", "model=llama3_8b")
    scaled_model = cell.plan.model
    assert scaled_model.parameters < scale.MOST_PARAMETERS and scaled_model.vocab % 2 == 1
    assert (
        scaled_model.heads // scaled_model.kv_heads,
        scaled_model.norm,
        scaled_model.rope_theta,
    ) == (4, "rms", 500_000.0)
    assert "llama3_8b" in cell.note and f"hidden {scaled_model.hidden}" in cell.note
    (gpt,) = cells("cluster=h100x8", "parallel=tp4", "model=gpt2")
    assert (gpt.plan.model.position, gpt.plan.model.bias, gpt.plan.model.tied_embeddings) == (
        "learned",
        True,
        True,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("parallel=tp2",),
        ("parallel=tp8_pp2", "model=llama3_8b"),
        ("parallel=tp2_ep4", "parallel.etp=1", "model=mixtral_8x7b"),
        ("parallel=tp4_ep8", "model=deepseek_v3"),
    ],
)
def test_a_scaled_model_has_whole_blocks_of_optimizer_state_in_8_bits(words):
    small_cells = cells("cluster=h100x64", "optim.state=8bit", *words)
    assert all(isinstance(cell, Cell) for cell in small_cells), small_cells


def degrees_of(cell: Cell) -> dict[str, int]:
    return {
        axis: degree for axis in scale.AXES if (degree := getattr(cell.plan.parallel, axis)) > 1
    }


def test_a_layout_of_any_size_becomes_small_ones_that_have_every_technique():
    small_cells = cells("parallel=tp8_pp4_zero1")
    assert [degrees_of(cell) for cell in small_cells] == [
        {"tp": 8, "pp": 2, "dp": 2},
        {"tp": 2, "pp": 4, "dp": 2},
    ]
    assert all(cell.plan.parallel.zero == 1 and "64 ranks" in cell.note for cell in small_cells)
    huge = cells("parallel=tp8_pp16_dp128_zero1_vpp2")
    assert {"pp": 16} in map(degrees_of, huge) and {"tp": 2, "pp": 2, "dp": 8} in map(
        degrees_of, huge
    )
    for cell in huge:
        par = cell.plan.parallel
        assert par.world_size <= scale.MOST_RANKS and par.vpp == 2 and "16,384 ranks" in cell.note
        assert par.micro_batches >= 2 * par.pp, "the pipeline is full"
        assert len(set(par.stage_layers)) > 1 or cell.plan.model.layers % (2 * par.pp) == 0


def test_ratios_stay():
    hybrid = cells("parallel=dp64_zero3", "parallel.zero_group=8")[0].plan.parallel
    assert 1 < hybrid.zero_group < hybrid.dp
    shared = cells("model=tiny", "model.kv_heads=2", "model.heads=16", "parallel=tp16_pp4")
    assert all(cell.plan.model.kv_heads < cell.plan.parallel.tp for cell in shared), (
        "key-value heads are on several ranks"
    )
    few = cells("parallel=pp16_dp8", "train.global_batch_samples=32")
    assert all(
        cell.plan.parallel.micro_batches < cell.plan.parallel.pp
        for cell in few
        if cell.plan.parallel.pp > 4
    )
    listed = cells(
        "model=tiny",
        "model.layers=30",
        "parallel=pp16_dp8_vpp2",
        f"parallel.stage_layers=[0,{'1,' * 30}0]",
    )
    assert all(
        cell.plan.parallel.stage_layers[0] == cell.plan.parallel.stage_layers[-1] == 0
        for cell in listed
    )
    dualpipe = cells("parallel=pp16_dp8", "parallel.schedule=dualpipe")
    assert {cell.plan.parallel.micro_batches % 2 for cell in dualpipe} == {0}
    ulysses = cells("parallel=cp64_tp8", "parallel.cp_method=ulysses")
    assert all(
        cell.plan.model.heads % (cell.plan.parallel.tp * cell.plan.parallel.cp) == 0
        for cell in ulysses
    )


def test_a_small_layout_communicates_in_the_pieces_of_the_real_one():
    words = ("cluster=h100x8", "parallel=tp2", "model=llama3_70b", "train.seq_len=16384")
    assert cells(*words)[0].plan.parallel.tp_pieces == 4
    assert cells(*words, "parallel.tp_pieces=1")[0].plan.parallel.tp_pieces == 1


def test_an_experiment_is_verified_whatever_nvlink_reaches():
    experiment_cells = cells("cluster=h100x16384", "experiment=llama3_405b_16k")
    assert {cell.plan.parallel.tp for cell in experiment_cells} >= {8, 2} and all(
        cell.plan.model.rope_theta == 5e5 for cell in experiment_cells
    )
    (across,) = cells("cluster=h100x64", "parallel=tp16_dp1")
    assert across.plan.parallel.tp == 16


def test_words_for_documents_dropout_and_precision():
    overrides = (
        "data.isolate_documents=true",
        "model.dropout=0.1",
        "train.precision=bf16",
        "train.grad_dtype=bf16",
    )
    (cell,) = cells("parallel=dp2", *overrides)
    assert cell.packed and cell.precision == "bf16" and cell.plan.model.dropout == 0.1
    assert cell.plan.job.train.grad_dtype == "bf16"
    (plain,) = cells("parallel=dp2")
    assert not plain.packed and not plain.precision


def test_what_the_planner_refuses_is_a_verdict_with_its_line():
    (refused,) = cells("model=tiny", "parallel=tp16")
    assert isinstance(refused, Verdict) and refused.word == "refused" and "heads" in refused.refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), "a layout"),
        (("train.steps=3",), "a layout"),
        (("parallel=dp2", "parallel.auto=true"), "degrees"),
    ],
)
def test_without_a_layout_one_line_says_how(overrides, message):
    with pytest.raises(OrchError, match=f"needs {message}"):
        cells(*overrides)
