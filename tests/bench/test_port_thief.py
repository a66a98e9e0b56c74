"""A few starts of benchmarks/port_thief.py, whose 2,000 are in its result file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.beds.bundles import no_namespaces

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(bool(no_namespaces()), reason=no_namespaces())
def test_starts_side_by_side_with_thieves_of_ports_all_succeed(tmp_path):
    out = tmp_path / "found.json"
    argv = [
        sys.executable,
        "-m",
        "benchmarks.port_thief",
        "--ways",
        "kept",
        "handed",
        "--starts",
        "8",
        "--out",
        str(out),
    ]
    subprocess.run(argv, cwd=ROOT, check=True, timeout=300)
    assert json.loads(out.read_text())["thieves"]["failed"] == {"kept": 0, "handed": 0}
