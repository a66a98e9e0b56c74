"""A cluster with accounting (slurmdbd on MariaDB): accounts are enforced, and what the controller
forgot is still known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.backends.slurm.commands import Slurm
from orchestrator.backends.slurm.states import job_state
from orchestrator.errors import OrchError
from orchestrator.plan.exits import Exit
from tests.beds.slurm.cluster import Cluster
from tests.beds.slurm.cluster_conf import Shape
from tests.beds.slurm.runs import Orch

from .conftest import bring_up
from .test_runs import two_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def accounted() -> Iterator[Cluster]:
    with bring_up(Shape(nodes=2, gpus=2, leaves=1, accounting=True, min_job_age_s=3)) as cluster:
        yield cluster


def test_accounts_are_enforced_and_what_the_controller_forgot_is_known(accounted, tmp_path):
    """One test: each worker would make a database of its own for another, which takes ten
    seconds."""
    orch = Orch(accounted, tmp_path)
    a_wrong_account_is_one_line_with_the_choices(orch)
    states_come_from_squeue_when_the_database_is_away(orch, accounted)
    accounted.reset()
    a_run_that_the_controller_has_forgotten(orch, accounted)


def a_wrong_account_is_one_line_with_the_choices(orch: Orch) -> None:
    done = orch("submit", "cluster=local", "cluster.gpus_per_node=2", "parallel=tp2_zero1", "backend=slurm",
                "backend.options.account=orhc", code=Exit.CONFIG)  # fmt: skip
    assert "invalid account" in done.stderr.lower() and "choices: orch" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def a_run_that_the_controller_has_forgotten(orch: Orch, accounted: Cluster) -> None:
    run = orch.submit(*two_nodes("backend.options.account=orch"), worker={"STEPS": 2})
    assert run.wait("done").exit_code == 0
    failed = orch.submit(*two_nodes("backend.max_restarts=0"), worker={"DIE": "0:1:3"})
    failed.wait("failed")
    accounted.wait(
        lambda: not accounted.run("squeue", "-h", "-t", "all").strip(), 120, "forgotten jobs"
    )
    jobs = Slurm(accounted.env).jobs([run.job, failed.job])
    assert (jobs[run.job].state, jobs[run.job].exit_code, jobs[run.job].source) == (
        "COMPLETED",
        0,
        "sacct",
    )
    assert (jobs[failed.job].state, jobs[failed.job].exit_code) == ("FAILED", 1)
    assert set(jobs[run.job].node_names) == set(run.assignment["nodes"])
    assert run.state().state == "done" and failed.state().exit_code == Exit.USER


def states_come_from_squeue_when_the_database_is_away(orch: Orch, accounted: Cluster) -> None:
    job = accounted.run(
        "sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "true"
    ).strip()
    listed_jobs = Slurm(
        {**accounted.env, "PATH": without_sacct(orch.home, accounted.env["PATH"])}
    ).jobs([job, "999999"])
    assert job_state(listed_jobs[job].state).phase == "pending" and "999999" not in listed_jobs
    with pytest.raises(OrchError):
        Slurm(accounted.env).run(["sacct", "--format=NoSuchField"])


def without_sacct(folder: Path, path: str) -> str:
    tools = folder / "bin"
    tools.mkdir()
    (tools / "sacct").write_text(
        "#!/bin/sh\necho 'sacct: error: Problem talking to the database' >&2\nexit 1\n"
    )
    (tools / "sacct").chmod(0o755)
    return f"{tools}:{path}"
