"""The commands of the Slurm guide, as it shows them, on the real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.beds.slurm.cluster import Cluster
from tests.docs.shown import login, play, undescribed_files
from tests.house.rooms import ROOT


@pytest.mark.slurm
def test_the_guide_s_commands_print_what_it_shows(cluster: Cluster, tmp_path: Path) -> None:
    """A program runs to its end and another is cancelled. The reference describes every file that
    this leaves in the run folders."""
    environ = login(cluster.env, tmp_path / "home")
    folder = tmp_path / "work"
    folder.mkdir()
    page = (ROOT / "docs" / "guides" / "slurm.md").read_text()
    play(page, folder, environ, kind_played="console bed", limit_s=300)
    assert undescribed_files(tmp_path / "home" / "runs") == []
