"""The commands of the Slurm guide, as it shows them, on the real cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from orchestrator.run.files import described
from tests.beds.slurm.cluster import Cluster
from tests.docs.shown import play
from tests.house.rooms import ROOT


@pytest.mark.slurm
def test_the_guide_s_commands_print_what_it_shows(cluster: Cluster, tmp_path: Path) -> None:
    """A program runs to its end and another is cancelled. The reference describes every file that
    this leaves in the run folders."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("ORCH")}
    environ = {
        **variables,
        **cluster.env,
        "ORCH_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "80",
    }
    folder = tmp_path / "work"
    folder.mkdir()
    page = (ROOT / "docs" / "guides" / "slurm.md").read_text()
    play(page, folder, environ, kind_played="console bed", limit_s=300)
    runs = tmp_path / "home" / "runs"
    files = [path.relative_to(runs).parts[1:] for path in runs.rglob("*") if path.is_file()]
    assert files
    unknown = [name for name in map("/".join, files) if not described(name)]
    assert unknown == []
