"""The benchmark of checkpoints runs with today's trainer: renames had left it behind."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import checkpoint


@pytest.mark.process
@pytest.mark.slow
def test_every_part_of_the_benchmark_runs(tmp_path, monkeypatch):
    out = tmp_path / "checkpoint.json"
    monkeypatch.setattr(sys, "argv", ["checkpoint", "--repeat=1", "--mib=1", f"--out={out}"])
    checkpoint.main()
    seconds = json.loads(out.read_text())["seconds"]
    assert len(seconds) == 11 and all(value >= 0 for value in seconds.values())
