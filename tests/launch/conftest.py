"""What several tests of whole runs start from."""

from __future__ import annotations

import pytest

from .parcels import kill_runs


@pytest.fixture
def corpus(tmp_path):
    """A folder of text. Runs of `tmp_path / "runs"` end with the test."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.py").write_text("def f(x):\n    return x + 1\n" * 400)
    yield text
    kill_runs(tmp_path / "runs")
