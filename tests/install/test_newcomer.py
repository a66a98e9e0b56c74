"""A newcomer's hour: a machine with Python, git and make alone, where the first set-up command and
every line of the README and the guides print what the pages show."""

from __future__ import annotations

import subprocess

import pytest

from tests.beds.newcomer import CLONE, newcomer, refusal, variables
from tests.docs.shown import play
from tests.house.rooms import ROOT

PAGES = (
    "README.md",
    "docs/tutorial.md",
    "docs/guides/script.md",
    "docs/guides/slurm.md",
    "docs/guides/kubernetes.md",
)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.slow
def test_a_newcomer_s_hour(tmp_path):
    if reason := refusal():
        pytest.skip(reason)
    login = variables()
    with newcomer(tmp_path) as machine:
        demo = subprocess.run(
            [*machine.enter(CLONE, login), "make", "demo"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert demo.returncode == 0, demo.stdout[-2000:] + demo.stderr[-2000:]
        assert "orch_step" in demo.stdout, "it shows metrics"
        login["PATH"] = f"{CLONE}/.venv/bin:{login['PATH']}"
        for page in PAGES:
            work = CLONE.parent / page.replace("/", "-")
            outside = machine.root / work.relative_to("/")
            outside.mkdir()
            login["ORCH_HOME"] = str(work / "home")  # pages list their own runs alone
            play((ROOT / page).read_text(), outside, login, enter=machine.enter(work, login))
