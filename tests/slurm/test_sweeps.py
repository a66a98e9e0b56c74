"""Several runs together on the real test cluster: sweeps as arrays, and runs that wait for runs."""

from __future__ import annotations

import json

import pytest

from orchestrator.plan.exits import Exit
from tests.beds.slurm.runs import CONF, LONG, Orch, Run, refusals

from .test_runs import WIDE, two_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.process]


def sweep(orch: Orch, *overrides: str, worker: dict) -> list[Run]:
    return [
        Run(orch, sent["run_dir"]) for sent in orch.sent("--multirun", *overrides, worker=worker)
    ]


def jobs(orch: Orch) -> list[str]:
    return sorted(orch.cluster.run("squeue", "--array", "-h", "-o", "%i").split())


@pytest.mark.slow
def test_an_array_whose_members_live_on_their_own(orch):
    """Three runs that ask for the same: one array. One is requeued, one cancelled, one left
    alone."""
    requeued, cancelled, alone = sweep(orch, *two_nodes(), "optim.lr=1e-3,2e-3,3e-3", worker=LONG)
    array = requeued.job.split("_")[0]
    assert [run.job for run in (requeued, cancelled, alone)] == [
        f"{array}_{index}" for index in range(3)
    ]
    assert [run.id[-2:] for run in (requeued, cancelled, alone)] == ["-0", "-1", "-2"]
    for run in (requeued, cancelled, alone):
        run.step(3)
        assert f"orch-{requeued.id}" in orch.cluster.run("squeue", "-h", "-j", run.job, "-o", "%j")
    orch.cluster.run("scancel", "--signal=USR1", "--batch", requeued.job)
    orch("cancel", cancelled.id)
    assert cancelled.state().state == "cancelled" and cancelled.restarts == 0
    assert requeued.finish().epoch == 1 and requeued.restarts == 1
    alone.release()
    assert alone.wait("done").epoch == 0 and alone.restarts == 0
    rows = {
        row["state"]["run_id"]: row["state"]["state"]
        for row in json.loads(orch("list", "--json").stdout)
    }
    assert rows == {requeued.id: "done", cancelled.id: "cancelled", alone.id: "done"}
    assert "code 0" in alone.logs() and "code 0" not in cancelled.logs(), "each has its own log"
    assert (
        "optim.lr=3e-3" in orch("list").stdout
        and "optim.lr=3e-3" in orch("status", alone.id).stdout
    )
    cancelled.release()
    orch("resume", cancelled.id)
    assert cancelled.wait("done").epoch == 1 and "_" not in cancelled.job, (
        "on its own it is a job of its own"
    )


def test_runs_that_ask_for_different_things_are_one_job_each(orch):
    small, large = sweep(
        orch, "cluster=testbed", "parallel=tp2_pp2", "cluster.nodes=2,4", worker={"STEPS": 2}
    )
    assert {"_" in run.job for run in (small, large)} == {False}
    assert (small.wait("done").exit_code, large.wait("done").exit_code) == (0, 0)
    assert (len(small.assignment["nodes"]), len(large.assignment["nodes"])) == (2, 4)


@pytest.mark.parametrize(
    ("overrides", "code", "complaint"),
    [
        (["parallel=tp2,tp3"], None, "parallel=tp3: "),
        (
            ["parallel=tp2", "backend.options.partition=main,mian"],
            Exit.CONFIG,
            "did you mean 'main'",
        ),
        (["parallel=tp2", "cluster.nodes=2,16", WIDE], Exit.CAPACITY, "partition main has 8"),
        (["parallel=tp2"], Exit.USAGE, "nothing varies"),
        (["parallel=tp2,tp1", "--follow"], Exit.USAGE, "--follow"),
    ],
)
def test_all_or_none(orch, overrides, code, complaint):
    argv = (
        "submit",
        "--multirun",
        "--config-dir",
        str(CONF),
        "cluster=testbed",
        *overrides,
        "--",
        "/bin/true",
    )
    done = orch(*argv, code=code)
    [refusal] = refusals(done.stderr)
    assert done.returncode and complaint in refusal
    assert jobs(orch) == [] and orch("list").stdout.strip() == "no runs"


@pytest.mark.slow
def test_a_run_after_a_run(orch):
    first = orch.submit(*two_nodes(), worker=LONG)
    second = orch.submit(*two_nodes(), "--after", first.id, worker={"STEPS": 2})
    spared = orch.submit(*two_nodes(), "--after", f"notok:{first.id}", worker={"STEPS": 2})
    state = second.state()
    assert state.state == "pending" and "waiting for another job to end" in state.reason
    first.release()
    assert first.wait("done").exit_code == 0
    assert second.wait("done").started_at > first.state().ended_at
    assert spared.wait("cancelled").exit_code == Exit.RESTART, "what it waits for will never be"
    at_once = orch.submit(*two_nodes(), "--after", f"slurm://{first.id}", worker={"STEPS": 2})
    assert at_once.wait("done").exit_code == 0
    base = ["submit", "--config-dir", str(CONF), *two_nodes()]
    for options, complaint in (
        (["--after", f"notok:{first.id}"], "would never start"),
        (["--after", "nobody"], "no run 'nobody'"),
        (["--after", f"soon:{first.id}"], "not ok, any or notok"),
        (["--after", first.id, "backend=local"], "backend local has no queue"),
    ):
        refused = orch(*base, *options, code=Exit.USAGE)
        assert complaint in refused.stderr and len(refused.stderr.strip().splitlines()) == 1
