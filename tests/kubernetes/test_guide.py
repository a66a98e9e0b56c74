"""The commands of the Kubernetes guide, as it shows them, on real nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.beds.kubernetes.runs import Orch
from tests.docs.shown import login, play, undescribed_files
from tests.house.rooms import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]


def test_the_guide_s_commands_print_what_it_shows(orch: Orch, tmp_path: Path) -> None:
    """A program travels and runs to its end, another is cancelled. The reference describes every
    file that this leaves on the submitter's side and on the claim."""
    folder = tmp_path / "work"
    profiles = folder / "conf" / "backend"
    profiles.mkdir(parents=True)
    (folder / "conf" / ".orch").touch()
    options = {**orch.options, "namespace": orch.namespace}
    profile_text = f"defaults:\n  - kubernetes\n  - _self_\noptions: {json.dumps(options)}\n"
    (profiles / "mycluster.yaml").write_text(profile_text)
    environ = login(orch.bed.env, tmp_path / "home")
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    enter = [*orch.bed.enter, "env", f"--chdir={folder}"]
    play(page, folder, environ, "console bed", limit_s=300, enter=enter)
    for runs in (tmp_path / "home" / "runs", orch.claim):
        assert undescribed_files(runs) == []
