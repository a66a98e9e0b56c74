"""What fails before an agent has started, for real: a lost mount, a missing image, two jobs of one
run folder."""

from __future__ import annotations

import json

import pytest

from orchestrator.plan.exits import Exit
from tests.beds.slurm.runs import LONG, Orch

from .test_runs import two_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def blind(orch: Orch):
    """Makes a node see none of the run folders; afterwards all nodes see them again."""
    nodes: list[str] = []

    def one(name: str, hangs: bool = False) -> None:
        nodes.append(name)
        orch.cluster.restart_node(name, orch.home, hangs)

    yield one
    for name in nodes:
        orch.cluster.restart_node(name)


def test_a_node_that_does_not_see_the_run_folder_is_left_out(orch: Orch, blind):
    blind("n1")
    run = orch.submit(*two_nodes("backend.options.nodelist=[n0]"), worker={"STEPS": 3})
    excluded = run.folder / "slurm" / "exclude"
    run.until(
        "requeued", lambda: excluded.exists() and orch.cluster.job_state(run.job) == "PENDING"
    )
    state = json.loads((run.folder / "state.json").read_text())
    assert state["exit_code"] == Exit.NODE and state["reason"] == "node n1 lacks: run-folder"
    assert run.finish().exit_code == 0 and "n1" not in run.assignment["nodes"] and run.restarts == 1


def test_a_node_whose_mount_hangs_is_left_out(orch: Orch, blind, tmp_path_factory):
    """Beside a start file of the shell that prints: what a site does to nodes must not end its
    users' runs."""
    start = tmp_path_factory.mktemp("site") / "start"
    start.write_text("echo Loading cuda/12.4 now\n")
    blind("n1", hangs=True)
    flags = ("backend.options.nodelist=[n0]", f"backend.options.setup=['export BASH_ENV={start}']")
    run = orch.submit(*two_nodes(*flags), worker={"STEPS": 3})
    excluded = run.folder / "slurm" / "exclude"
    run.until(
        "requeued", lambda: excluded.exists() and orch.cluster.job_state(run.job) == "PENDING"
    )
    state = json.loads((run.folder / "state.json").read_text())
    assert state["exit_code"] == Exit.NODE and state["reason"].startswith(
        "node n1 lacks: run-folder-within-20-s"
    )
    assert excluded.read_text() == "n1\n"
    assert run.finish().exit_code == 0 and "n1" not in run.assignment["nodes"] and run.restarts == 1


def test_an_elastic_run_goes_on_without_it(orch: Orch, blind):
    blind("n1")
    elastic = [override for override in two_nodes() if override != "cluster.nodes=2"]
    run = orch.submit(
        *elastic, "nodes=1..2", "backend.options.nodelist=['n[0-1]']", worker={"STEPS": 3}
    )
    assert (
        run.wait("done").exit_code == 0 and run.assignment["nodes"] == ["n0"] and run.restarts == 0
    )
    assert (run.folder / "slurm" / "exclude").read_text() == "n1\n"


def test_a_job_that_cannot_open_its_log(orch: Orch, blind):
    blind("n0")
    run = orch.submit(*two_nodes("backend.options.nodelist=[n0]"), worker={"STEPS": 3})
    state = run.wait("failed")
    assert state.exit_code == Exit.NODE and "does it see the run folder?" in state.reason


def test_no_node_has_the_image(orch: Orch):
    container = "backend.options.container={runtime: apptainer, image: /nowhere/llm.sif}"
    run = orch.submit(*two_nodes(container), worker={"STEPS": 3})
    state = run.wait("failed")
    assert (
        state.exit_code == Exit.CONFIG
        and "no node has what the run needs: program image" in state.reason
    )
    assert "error: node n0 lacks: program image" in orch("logs", run.id).stdout


def test_a_second_job_of_a_run_leaves_before_it_writes(orch: Orch):
    run = orch.submit(*two_nodes(), worker=LONG)
    run.step(3)
    script = str(run.folder / "slurm" / "job.sbatch")
    before = {path: path.stat().st_mtime_ns for path in (run.folder / "slurm").iterdir()}
    second = orch.cluster.run("sbatch", "--parsable", script).strip()
    orch.cluster.wait(
        lambda: orch.cluster.job_state(second) == "FAILED", 60, "the second job's end"
    )
    assert {path: path.stat().st_mtime_ns for path in (run.folder / "slurm").iterdir()} == before
    second_log = (run.folder / "logs" / f"slurm-{second}.log").read_text()
    assert f"the run belongs to job {run.job} (RUNNING): this job exits" in second_log
    run.release()
    assert run.wait("done").exit_code == 0
