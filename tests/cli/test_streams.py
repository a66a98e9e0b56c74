"""Standard streams that are closed, or that a full disk stands behind: the right exit code, one
line, no lost run."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from orchestrator.run.folder import RunFolder
from orchestrator.run.state import read_state
from tests.beds.bundles import kill_runs, wait_end

ORCH = shlex.join([sys.executable, "-m", "orchestrator"])
FULL = "orch: error: standard output cannot be written: No space left on device\n"


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "home" / "runs"
    kill_runs(tmp_path / "home" / "runs")


def shell(line: str) -> tuple[int, str, str]:
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("where", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("verb", ["plan", "list", "paths --json", "--help"])
def test_a_closed_stream_is_the_null_device(runs, verb, where):
    assert shell(f"{ORCH} {verb} {where}") == (0, "", "")


@pytest.mark.parametrize(
    "verb", ["plan", "list", "list --json", "config --choices", "nodes", "--help"]
)
def test_output_that_a_full_disk_does_not_take_is_no_success(runs, verb):
    assert shell(f"{ORCH} {verb} >/dev/full") == (76, "", FULL)
    assert shell(f"{ORCH} {verb} >/dev/full 2>/dev/full") == (76, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_warning_comes_before_what_follows_it(unbuffered):
    """Also where the environment asks Python for streams without buffers, as in many images."""
    lines = [
        "import os, sys",
        "from orchestrator.cli.streams import open_standard_streams",
        "open_standard_streams()",
        "print('warning', file=sys.stderr)",
        "os.write(2, b'next')",
    ]
    program = shlex.join([sys.executable, "-c", "\n".join(lines)])
    assert shell(f"PYTHONUNBUFFERED={unbuffered} {program}") == (0, "", "warning\nnext")


@pytest.mark.parametrize("flags", ["", "--json"])
@pytest.mark.parametrize(
    "where", [">&-", ">/dev/full", "2>/dev/full", "2>&-", ">/dev/full 2>&1", "2>&1 | true"]
)
def test_a_refusal_keeps_its_code(runs, flags, where):
    code, _, err = shell(f"set -o pipefail; {ORCH} status nobody {flags} {where}")
    assert code == 64
    assert err in ("", f"orch: error: there are no runs in {runs}\n")


@pytest.mark.process
@pytest.mark.parametrize("flags", ["", "--json", "--follow", "--follow --json"])
@pytest.mark.parametrize(
    "where", [">&-", ">/dev/full", ">/dev/full 2>&1", "2>/dev/full", "> >(exec true)"]
)
def test_a_run_that_was_started_is_told(runs, flags, where):
    """Standard error tells it where standard output takes nothing; the code is that of the run."""
    code, out, err = shell(
        f"{ORCH} submit nproc=1 --run-id mine {flags} {where} -- {sys.executable} -c pass"
    )
    assert wait_end(RunFolder(runs / "mine")).state == "done"
    assert code == 0 or (code == 141 and "--follow" in flags and "true" in where)
    assert "internal error" not in err
    if where == ">/dev/full":
        assert ("mine" in err and err.endswith(FULL)) or flags == "--follow --json"
    if where == "2>/dev/full" and flags != "--follow --json":
        assert "mine" in out
    assert read_state(RunFolder(runs / "mine")).run_id == "mine"
