"""`orch bench` as a user runs it: agents, workers, the file that it keeps, and the plan that reads
it."""

from __future__ import annotations

import json

import pytest

from orchestrator.backends.local import namespaces
from orchestrator.cli.main import main
from orchestrator.errors import OrchError
from tests.beds.bundles import kill_runs

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.full]


def cluster() -> str:
    """The shaped one where this machine can build it."""
    try:
        namespaces.check()
    except OrchError:
        return "local"
    return "local_shaped"


def test_what_bench_finds_is_what_plans_use(tmp_path, monkeypatch, capsys):
    home = tmp_path / "home"
    monkeypatch.setenv("ORCH_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    name = cluster()
    words = [f"cluster={name}", "cluster.gpus_per_node=1"]
    try:
        assert main(["bench", "--json", *words]) == 0
    finally:
        kill_runs(home / "runs")
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "21/21" in said.err or "23/23" in said.err  # the bar reached its end
    assert set(found["links"]) == {
        "switch" if name == "local_shaped" else "host"
    }  # a node of one GPU has no inside
    (link,) = found["links"].values()
    if name == "local_shaped":
        assert 0 < link["bytes_per_s"] < 1.3 * 0.05e9 / 8  # what the wire lets through, and a burst
    assert found["measured"]["matmul_flops"]["fp32"] > 0
    assert main(["plan", "--json", "parallel=dp2", *words]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cluster"]["measured"]["source"] == found["measured"]["source"]
    assert min(value for name, value in found["host"].items() if name != "source") > 0
    assert plan["cluster"]["host"] == found["host"]
    assert plan["cluster"]["levels"][0]["bytes_per_s"] == link["bytes_per_s"]
