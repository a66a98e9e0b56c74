"""nodes=A..B on the real test cluster: the size that starts soon, every legal size, and what is
left of a lost node."""

from __future__ import annotations

import subprocess

import pytest

from orchestrator.backends.slurm.record import submitted_request
from orchestrator.observe.timeline import read_events
from orchestrator.plan import from_json
from orchestrator.plan.ranks import check_ranks
from orchestrator.run.folder import RunFolder
from tests.beds.held.sitecustomize import release
from tests.beds.slurm.runs import CONF, LONG, Orch, Run

pytestmark = [pytest.mark.slurm, pytest.mark.process]
JOB = ("cluster=testbed", "parallel=tp2_pp2", "nodes=2..4")


def hold(orch: Orch, nodes: int) -> str:
    """Take some nodes for an hour, and see it so."""
    wrap = ["--exclusive", "--time=60", "--output=/dev/null", "--wrap", "sleep 3600"]
    job = orch.cluster.run("sbatch", "--parsable", f"--nodes={nodes}", *wrap).strip()
    orch.cluster.wait(lambda: orch.cluster.job_state(job) == "RUNNING", 20, "running job")
    return job


def nodes_of(run: Run) -> int:
    return len({rank["node"] for rank in run.plan["ranks"]})


@pytest.mark.slow
def test_the_size_that_starts_soon(orch):
    """Three nodes are free: four would wait an hour, three are no legal size, two start now."""
    hold(orch, 5)
    page = orch("plan", "--config-dir", str(CONF), *JOB).stdout
    sizes = {line.split()[0]: line for line in page.splitlines() if " nodes  dp=" in line}
    assert list(sizes) == ["4", "2"] and "   3 nodes  not legal: " in page
    assert "in 60 min" in sizes["4"] and "starts at once" in sizes["2"]
    run = orch.submit(*JOB, worker={"STEPS": 2})
    assert run.wait("done").exit_code == 0 and nodes_of(run) == 2
    assert "2 nodes of the sizes 4, 2" in run.assignment["summary"]
    patient = orch(
        "submit",
        "--config-dir",
        str(CONF),
        *JOB,
        "backend.options.start_within_s=7200",
        "--",
        "/bin/true",
    )
    assert "taken: 4 nodes" in patient.stderr
    single = orch(
        "plan", "--config-dir", str(CONF), "cluster=testbed", "parallel=tp2_pp2", "cluster.nodes=4"
    ).stdout
    assert "Slurm: starts about" in single


@pytest.mark.slow
def test_started_at_each_legal_size(orch):
    """The rendered script says which sizes there are; given more nodes than one needs it takes the
    best of them."""
    rendered = [orch.submit(*JOB, verb="render", worker={"STEPS": 3}) for _ in range(3)]
    runs = {}
    for run, node_count, used in zip(rendered, (4, 3, 2), (4, 2, 2), strict=True):
        assert "# 4 nodes. It may start on 4, 2: sbatch --nodes=N" in run.script
        path = orch.home / f"job{node_count}.sbatch"
        path.write_text(run.script)
        argv = ["sbatch", f"--nodes={node_count}", str(path)]
        environ = {**orch.cluster.env, "ORCH_TEST_STEPS": "3"}
        subprocess.run(argv, env=environ, check=True, capture_output=True, cwd=orch.home)
        runs[run] = used
    for run, used in runs.items():
        assert run.wait("done").exit_code == 0
        plan = from_json((run.folder / "plan.json").read_bytes())
        assert nodes_of(run) == used and plan.parallel.dp == used // 2 and check_ranks(plan) is None
        assert (
            plan.program and not plan.parallel.global_batch_samples
        )  # a program's batch is its own


@pytest.mark.slow
def test_losing_a_node_keeps_the_rest(orch):
    """The job, its script and its other agents stay; two of them go on, one is a spare. When the
    next is lost, it takes its place. A requeue asks for the full size again.
    """
    run = orch.submit(*JOB, "backend.heartbeat_timeout_s=15", worker=LONG)
    run.step(3)
    agents = {name: node.pid for name, node in run.state().nodes.items()}
    host = run.assignment["nodes"][0]
    lost = []
    for epochs in (2, 3):
        lost.append(next(name for name in reversed(busy(run)) if name != host))
        orch.cluster.kill_node(lost[-1])
        run.until("goes on without it", lambda epochs=epochs: went_on(run, epochs))
    state = run.state()
    assert nodes_of(run) == 2 and set(busy(run)) == set(agents) - set(lost)
    assert all(state.nodes[name].pid == agents[name] for name in busy(run)), (
        "the agents are the same processes"
    )
    causes = [(epoch.cause.kind, epoch.cause.node) for epoch in state.epochs[:2]]
    assert causes == [("node_lost", name) for name in lost]
    assert check_ranks(from_json((run.folder / "plan.json").read_bytes())) is None
    assert run.restarts == run.attempt == 0, "Slurm has not been asked"
    orch.cluster.run("scancel", "--signal=USR1", "--batch", run.job)
    run.requeued()
    state = run.finish()
    assert (
        run.attempt == run.restarts >= 1
        and nodes_of(run) == 4
        and not set(lost) & set(run.assignment["nodes"])
    )
    assert state.exit_code == 0


def busy(run: Run) -> list[str]:
    return [
        name for name, node in run.state().nodes.items() if node.state == "running" and node.ranks
    ]


def went_on(run: Run, epochs: int) -> bool:
    state = run.state()
    return state.state == "running" and len(state.epochs) == epochs


@pytest.mark.slow
@pytest.mark.full  # sizes and losses of the real trainer are proven without a Slurm too
def test_training_goes_on_at_another_size(orch):
    """The real trainer: 4 workers, saved by a cancel; 2 workers after the resume, since no more
    nodes are free. Beside it the same job that has 2 workers all along: the global batch is the
    same, so the losses are.
    """
    train = ("train.steps=8", "train.log_every_steps=1", "train.precision=fp32")
    job = ("cluster=testbed", "parallel=tp2_zero1")
    run = orch.submit(*job, "nodes=1..2", *train, program=None, held=5)
    uninterrupted = orch.submit(*job, "cluster.nodes=1", *train, program=None)
    run.step(2)
    orch("cancel", run.id)
    before = dict(run.losses())
    assert nodes_of(run) == 2 and 2 <= len(before) < 5
    release(run.folder, 5)
    uninterrupted.wait("done")
    hold(orch, 7)
    orch("resume", run.id)
    assert run.wait("done").exit_code == 0 and nodes_of(run) == 1
    assert sorted(run.losses()) == sorted(uninterrupted.losses()) == list(range(1, 9))
    for step, loss in uninterrupted.losses().items():
        assert run.losses()[step] == pytest.approx(loss, rel=2e-4), f"step {step}"
    assert submitted_request(RunFolder(run.folder)).sizes == [2, 1], (
        "sizes that one attempt cannot hold stay"
    )


@pytest.mark.slow
@pytest.mark.full  # what is saved, and that it is the last step, is proven without a Slurm too
def test_too_few_nodes_save_what_their_memories_hold_and_slurm_brings_the_job_back(orch):
    """The real trainer on two nodes, neither of which suffices, long before its first
    checkpoint."""
    train = ("train.steps=300", "train.log_every_steps=1", "checkpoint.every_steps=1000")
    few = ("nodes=2..2", "checkpoint.memory_every_steps=1", "backend.heartbeat_timeout_s=15")
    run = orch.submit("cluster=testbed", "parallel=tp2_zero1", *few, *train, program=None, held=200)
    run.step(20)
    lost = run.assignment["nodes"][1]
    orch.cluster.kill_node(lost)
    run.requeued()
    release(run.folder, 200)
    last = max(run.losses())
    saved = [
        mark
        for mark in read_events(RunFolder(run.folder), run.state().nodes)
        if mark.name == "flush_ended"
    ]
    assert [mark.step for mark in saved] == [pytest.approx(last, abs=1)], run.logs()
    assert run.finish().exit_code == 0 and lost not in run.assignment["nodes"]
    assert sorted(run.losses()) == list(range(1, 301))
