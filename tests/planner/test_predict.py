"""Predictions of a table: every row answered, what is missing said, and a score that can be checked
by hand."""

from __future__ import annotations

import csv

import pytest

from orchestrator.accuracy.predict.predict import COLUMNS, Prediction, predict
from orchestrator.accuracy.predict.rows import read_row
from orchestrator.accuracy.predict.score import regret, score, spearman
from orchestrator.cli.main import main

# Narayanan et al., SC21 (arXiv 2104.04473), table 1: a fact of a public paper, as the calibration
# table writes it
GPT_1_7B = {
    "id": "narayanan_sc21-001",
    "model": "GPT-1.7B",
    "params_b": "1.7",
    "layers": "24",
    "hidden": "2304",
    "ffn_hidden": "9216",
    "heads": "24",
    "kv_heads": "24",
    "vocab": "51200",
    "seq_len": "2048",
    "gpu": "A100-80GB",
    "num_gpus": "32",
    "gpus_per_node": "8",
    "interconnect": "IB HDR 8x200Gb/s",
    "tp": "1",
    "sp": "0",
    "cp": "1",
    "pp": "1",
    "vpp": "1",
    "pp_schedule": "none",
    "dp": "32",
    "ep": "1",
    "zero_stage": "0",
    "micro_batch": "16",
    "global_batch": "512",
    "recompute": "full",
    "precision": "fp16",
    "framework": "Megatron-LM",
    "step_time_s": "3.5152",
    "status": "ok",
}


def test_a_published_row_within_a_factor_of_two():
    job = read_row(GPT_1_7B)
    assert job.assumed == ["software of 2021: attention is not fused"] and job.model.mlp == "plain"
    assert job.model.parameters / 1e9 == pytest.approx(1.7, rel=0.04)
    (prediction,) = predict([GPT_1_7B])
    assert prediction.status == "ok" and 0.5 < prediction.step_time_s / 3.5152 < 2
    assert prediction.tokens_per_s_per_gpu == pytest.approx(
        512 * 2048 / 32 / prediction.step_time_s
    )


def test_more_than_memory_is_oom():
    (prediction,) = predict(
        [GPT_1_7B | {"micro_batch": "64", "global_batch": "2048", "recompute": "none"}]
    )
    assert prediction.status == "oom" and prediction.peak_mem_gib > 80


def test_score_by_hand():
    rows = [
        {"id": f"t-{i}", "tp": str(i), "step_time_s": str(s), "peak_mem_gib": "10", "status": "ok"}
        for i, s in enumerate((1, 2, 4))
    ]
    predictions = [
        Prediction(f"t-{i}", s, 1.0, 12.0, "ok" if i else "oom", "")
        for i, s in enumerate((2.0, 1.0, 4.0))
    ]
    accuracy = score(rows, predictions)
    assert accuracy.time[0][:5] == (
        "t",
        3,
        pytest.approx(0.5),
        1.0,
        pytest.approx((1 - 0.5 + 0) / 3),
    )
    assert accuracy.time[0].inside68 is None and accuracy.time[-1] == accuracy.time[0]._replace(
        group="mean of groups", rows=1
    )
    assert accuracy.memory[0].mean == pytest.approx(0.2)
    assert accuracy.order[0][:3] == ("t", 1, 3) and accuracy.order[0].spearman == pytest.approx(0.5)
    assert accuracy.order[0].regret == pytest.approx(
        1.0
    )  # it would choose the second, which took 2 s and not 1 s
    assert accuracy.fits == {("ok", "oom"): 1, ("ok", "ok"): 2}


def test_rank_correlation_with_ties():
    assert spearman([(1, 1), (2, 2), (3, 3)]) == 1 and spearman([(1, 3), (2, 2), (3, 1)]) == -1
    assert spearman([(1, 5), (2, 5), (3, 5)]) == 0
    assert regret([(1.0, 9.0), (1.5, 8.0)]) == 0.5


def test_the_verb_writes_one_line_a_row(tmp_path, capsys):
    table = tmp_path / "in.csv"
    out = tmp_path / "out.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, GPT_1_7B)
        writer.writeheader()
        writer.writerows([GPT_1_7B] * 3)
    assert main(["predict", "--table", str(table), "--out", str(out), "--score"]) == 0
    with out.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 and tuple(lines[0]) == COLUMNS
    assert "step time" in capsys.readouterr().out
