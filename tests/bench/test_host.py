"""What a rank measures of its host."""

from __future__ import annotations

import pytest
import torch

from trainer.bench import host as bench
from trainer.comm.control import ControlPath
from trainer.errors import DiskError


@pytest.fixture
def alone(monkeypatch):
    """A control path of one rank, and small sizes."""
    for name, size in {
        "UPDATED": 1 << 14,
        "COPIED": 1 << 14,
        "RECORD": 1 << 16,
        "RECORDS": 6,
    }.items():
        monkeypatch.setattr(bench, name, size)
    monkeypatch.setattr("trainer.bench.measure._BATCH_S", 1e-3)
    control = ControlPath.__new__(ControlPath)
    monkeypatch.setattr(ControlPath, "barrier", lambda self: None)
    monkeypatch.setattr(ControlPath, "maximum", lambda self, value: value)
    return control


def test_a_nodes_rates_are_those_of_its_ranks_together(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "_update", lambda control: 5.0)
    monkeypatch.setattr(bench, "_disk", lambda memory, folder, control: 7.0)
    monkeypatch.setattr(bench, "_link", lambda memory, control: 3.0)
    rates = bench.host(torch.device("cpu"), tmp_path, 4, alone)
    assert (rates["memory_bytes_per_s"], rates["disk_bytes_per_s"], rates["link_bytes_per_s"]) == (
        20.0,
        28.0,
        3.0,
    )


def test_everything_is_measured_and_nothing_is_left(alone, tmp_path):
    rates = bench.host(torch.device("cpu"), tmp_path / "new", 1, alone)
    assert all(value > 0 for value in rates.values()) and not list((tmp_path / "new").iterdir())


def test_a_disk_without_room_is_one_line(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RECORD", 1 << 50)
    with pytest.raises(DiskError, match="cannot hold") as error:
        bench.host(torch.device("cpu"), tmp_path, 1, alone)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
