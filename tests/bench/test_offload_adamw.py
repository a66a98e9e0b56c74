"""The benchmark of AdamW on the host writes what it has measured, and of what, to a file."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks import offload_adamw


def test_the_file_has_every_way_and_the_conditions(tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    words = ["--elements", "4096", "--threads", str(torch.get_num_threads()), "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["offload_adamw", *words, "--out", str(out)])
    offload_adamw.main()
    record = json.loads(out.read_text())
    assert record["conditions"]["settings"] == {"repeats": 1}
    (update,) = record["updates"]
    ways = [
        f"{who}, {dtype}"
        for dtype in ("float32", "bfloat16")
        for who in ("ours", "torch fused", "torch foreach")
    ]
    assert list(update["fastest_s"]) == ["copy", *ways]
    assert update["elements"] == 4096 and all(
        seconds > 0 for seconds in update["fastest_s"].values()
    )
