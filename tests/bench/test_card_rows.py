"""The rows of one card keep what is measured, whatever becomes of the rest."""

from __future__ import annotations

import argparse
import json
import weakref

import pytest
import torch

from benchmarks import gpu_single
from benchmarks.gpu_parity import __main__ as gpu_parity
from benchmarks.gpu_single import Card, compare

HOST = torch.device("cpu")


@pytest.fixture
def plan():
    args = argparse.Namespace(dry=True, seq=64, batch=2, rounds=2)
    return Card(HOST, args).plan(compiled=False)


def test_a_loop_that_fails_holds_nothing_while_ours_is_measured(plan, monkeypatch):
    weights = list[weakref.ref]()
    alive = list[bool]()

    def ours(*_):
        def step():
            alive.append(any(weight() is not None for weight in weights))
            return torch.ones(())

        return step

    def plain(*_):
        weight = torch.ones(1)
        weights.append(weakref.ref(weight))

        def step():
            raise RuntimeError(f"out of memory beside {weight}")

        return step

    monkeypatch.setattr(gpu_single, "ours", ours)
    monkeypatch.setattr(gpu_single, "plain", plain)
    row = compare(plan, HOST, rounds=2)
    assert row["loop_failed"].startswith("RuntimeError: out of memory") and row["ours_s"] > 0
    assert weights and alive == [False] * len(alive) and "loop_s" not in row


def test_a_step_whose_waits_are_not_known_keeps_its_numbers(plan, monkeypatch):
    def breaking(*_):
        raise RuntimeError("an error of the last step")

    monkeypatch.setattr(gpu_single, "ours", lambda *_: lambda: torch.ones(()))
    monkeypatch.setattr(gpu_single, "plain", gpu_single.ours)
    monkeypatch.setattr(gpu_single, "wait_in", breaking)
    row = compare(plan, HOST, rounds=2)
    assert (
        row["time_ratio"] > 0 and row["waits_failed"] == "RuntimeError: an error of the last step"
    )
    assert row["waits_failed"] in gpu_single.line(row)


def test_a_dry_row_has_no_plan_for_calibration(monkeypatch):
    row = {"ours_s": 1.5, "ours_tokens_per_s": 7.0}
    monkeypatch.setattr(gpu_single, "compare", lambda *_: dict(row))
    card = Card(HOST, argparse.Namespace(dry=True, seq=64, batch=2, rounds=2))
    measured = card.mode(compiled=True)
    assert measured["ours_mfu"] is None and not {"plan", "step_s"} & measured.keys()


def test_single_cases_are_replaced_in_the_result(tmp_path):
    out = tmp_path / "parity.json"
    arguments = ["--dry", "--minutes", "1e-6", "--out", str(out), "--only", "SGD"]
    out.write_text(json.dumps({"rows": {"fp32": {"equal": True}}}))
    assert gpu_parity.main(arguments) == 1, "nothing is measured"
    record = json.loads(out.read_text())
    assert record["rows"]["fp32"] == {"equal": True} and record["dry"] is True
    assert list(record["rows"]) == ["fp32", "SGD, not compiled"]
