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
    overrides = [f"cluster={name}", "cluster.gpus_per_node=1"]
    try:
        assert main(["bench", "--json", *overrides]) == 0
    finally:
        kill_runs(home / "runs")
    captured = capsys.readouterr()
    measurement = json.loads(captured.out)
    assert "21/21" in captured.err or "23/23" in captured.err  # the bar reached its end
    assert set(measurement["links"]) == {
        "switch" if name == "local_shaped" else "host"
    }  # a node of one GPU has no inside
    (link,) = measurement["links"].values()
    if name == "local_shaped":
        assert 0 < link["bytes_per_s"] < 1.3 * 0.05e9 / 8  # what the wire lets through, and a burst
    assert measurement["measured"]["matmul_flops"]["fp32"] > 0
    assert main(["plan", "--json", "parallel=dp2", *overrides]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["cluster"]["measured"]["source"] == measurement["measured"]["source"]
    assert min(value for name, value in measurement["host"].items() if name != "source") > 0
    assert plan["cluster"]["host"] == measurement["host"]
    assert plan["cluster"]["levels"][0]["bytes_per_s"] == link["bytes_per_s"]
