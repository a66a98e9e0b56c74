"""`orch resize`: what is refused, and with which words."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.backends.kubernetes import direct_runs, submission
from orchestrator.cli.main import main
from orchestrator.plan import Exit
from orchestrator.run.folder import RunFolder
from orchestrator.run.request import from_bytes, to_bytes
from orchestrator.run.state import read_state, write_state


@pytest.fixture
def rendered(tmp_path, monkeypatch) -> RunFolder:
    """An elastic run on Kubernetes, as `orch render` leaves it: no cluster has seen it."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    overrides = [
        "parallel=tp2_pp2",
        "nodes=2..4",
        "cluster.nodes=4",
        "cluster.gpus_per_node=2",
        "backend=kubernetes",
    ]
    assert (
        main(["render", "--in-place", "--run-id", "r1", "backend.options.image=x:1", *overrides])
        == Exit.DONE
    )
    return RunFolder(tmp_path / "runs" / "r1")


def test_a_size_that_no_plan_was_made_for_is_refused_with_the_legal_ones(rendered, capsys):
    assert main(["resize", "r1", "3"]) == Exit.CONFIG
    assert "run r1 cannot have 3 nodes: legal: 2, 4" in capsys.readouterr().err


def test_a_run_of_one_size_is_told_so(rendered, capsys):
    request = from_bytes(rendered.request.read_bytes())
    rendered.request.write_bytes(to_bytes(msgspec.structs.replace(request, sizes=[])))
    assert main(["resize", "r1", "2"]) == Exit.CONFIG
    assert "submitted for one size" in capsys.readouterr().err


def test_the_next_generation_has_the_plan_of_its_size(rendered, monkeypatch):
    sent = []
    deleted = []
    monkeypatch.setattr(submission, "delete_run_objects", lambda *args: deleted.append(args[1:]))
    monkeypatch.setattr(
        direct_runs.DirectRuns,
        "_send",
        lambda self, *arguments, **keywords: sent.append((*arguments, keywords)),
    )
    assert main(["resize", "r1", "2"]) == Exit.DONE
    folder, request, plan, _, keywords = sent[0]
    kind, name, run_id, wait_s = deleted[0]
    assert (folder, kind, name, run_id) == (rendered, "Job", "r1", "r1")
    assert keywords["generation"] == 1
    assert wait_s > 120  # of a run that lives, the grace period and more
    assert request.nodes == len(request.agents) == 2
    assert len(plan.ranks) == 4
    assert request.plan_hash == plan.hash
    assert read_state(rendered).state == "pending"


def test_a_backend_that_follows_its_nodes_by_itself_says_so(rendered, capsys):
    write_state(rendered, msgspec.structs.replace(read_state(rendered), backend="slurm"))
    assert main(["resize", "r1", "2"]) == Exit.USAGE
    assert "slurm has no manual resize" in capsys.readouterr().err
