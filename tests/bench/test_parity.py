"""The check of a card's techniques runs here: the same numbers on the host, the same host side and
bytes on fake GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_parity import __main__ as parity
from benchmarks.gpu_parity.cases import CASES, activations_margin, may_wait
from benchmarks.gpu_parity.memory import differences
from tests.beds import fakegpu
from tests.bench.dry_runs import ROOT
from tests.patience import PATIENCE_S


def run(out, case, environment):
    """How a case ends, and its rows. The compiler is off, which would take minutes: a case and the
    same "not compiled" are one program here."""
    argv = [sys.executable, "-m", "benchmarks.gpu_parity", "--dry"]
    argv += ["--out", str(out), "--only", case, "attention, float32"]
    environment |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    return ended, json.loads(out.read_text())["rows"]


@pytest.mark.full
@pytest.mark.process
def test_the_host_is_as_exact_as_itself(tmp_path):
    ended, rows = run(tmp_path / "parity.json", "SGD", dict(os.environ))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert list(rows) == ["SGD, not compiled", "attention, float32"]
    assert all(row["equal"] for row in rows.values())
    assert rows["SGD, not compiled"]["not_as_planned"] == []
    assert rows["SGD, not compiled"]["errors"] == rows["SGD, not compiled"]["host_errors"]


@pytest.mark.process
@pytest.mark.skipif(bool(fakegpu.missing()), reason=fakegpu.missing() or "there are fake GPUs")
def test_a_case_takes_the_planned_bytes_of_a_card_and_waits_nowhere(tmp_path):
    ended, rows = run(tmp_path / "parity.json", "bf16", fakegpu.environment())
    assert ended.returncode == 1, "a device that computes nothing is not equal"
    assert "bf16: DIFFERENT: loss" in ended.stdout
    for name in ("bf16", "bf16, not compiled"):
        assert rows[name]["equal"] is False and rows[name]["unexpected_waits"] == []
        assert rows[name]["not_as_planned"] == [] and rows[name]["bytes"]["params"]["planned"] > 0


def test_what_is_not_as_it_must_be_is_named():
    row = {"equal": True, "errors": {}, "bounds": {}, "unexpected_waits": ["zero1.py:7"]}
    assert parity.line(row | {"not_as_planned": ["grads"], "waits_in_last_step": []}) == (
        "WAITS at zero1.py:7, NOT AS PLANNED: grads: "
    )
    one = ["SGD, not compiled", "attention, bfloat16"]
    assert set(one) < set(parity.choices())
    assert list(parity.rows(one, torch.device("cuda"))) == one
    assert list(parity.rows(["SGD"], torch.device("cuda"))) == ["SGD", "SGD, not compiled"]
    assert not may_wait("bf16", "permutation.py:45") and may_wait(
        "experts, fp32", "permutation.py:45"
    )
    assert may_wait("optimizer on the host", "sharded.py:3")
    assert activations_margin("full recomputation", True) is None
    assert activations_margin("full recomputation", False) == activations_margin("bf16", True)


def sizes(**excess: int) -> dict[str, dict[str, int]]:
    names = ("params", "grads", "optimizer", "activations")
    measured = {name: {"planned": 100, "measured": 100 + excess.get(name, 0)} for name in names}
    return measured | {"padding": {"planned": 0, "measured": 12}}


@pytest.mark.parametrize(
    ("excess", "margin", "is_muon", "wrong"),
    [
        ({"params": 12, "activations": 4}, 0.05, False, []),
        ({"params": 13}, 0.05, False, ["params"]),
        ({"grads": -1}, 0.05, False, ["grads"]),
        ({"optimizer": -20}, 0.05, True, []),
        ({"optimizer": -20}, 0.05, False, ["optimizer"]),
        ({"activations": -6}, 0.05, False, ["activations"]),
        ({"activations": -50}, None, False, []),
    ],
)
def test_bytes_are_held_against_the_plan(excess, margin, is_muon, wrong):
    assert differences(sizes(**excess), margin, is_muon) == wrong


def test_each_case_is_of_one_card():
    assert len(CASES) > 20 and next(iter(CASES)) == "bf16"
