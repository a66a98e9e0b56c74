"""What several tests of whole runs start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds.bundles import kill_runs


def write_text(folder: Path) -> Path:
    """A folder of text in there."""
    text_folder = folder / "text"
    text_folder.mkdir()
    (text_folder / "a.py").write_text("def f(x):\n    return x + 1\n" * 400)
    return text_folder


@pytest.fixture
def corpus(tmp_path):
    """A folder of text. Runs of `tmp_path / "runs"` end with the test."""
    yield write_text(tmp_path)
    kill_runs(tmp_path / "runs")
