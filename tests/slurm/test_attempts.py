"""What the job script of an elastic run starts, over several attempts: place, agent, outcome,
takeover. No Slurm."""

from __future__ import annotations

import os
from datetime import datetime

import msgspec
import pytest

from orchestrator.backends.slurm.job import task
from orchestrator.backends.slurm.job.node_assignment import assign_nodes
from orchestrator.backends.slurm.job.takeover import BatchStepTakeover
from orchestrator.backends.slurm.options import SlurmOptions
from orchestrator.backends.slurm.record import submitted_request
from orchestrator.cluster.hostlist import expand
from orchestrator.plan import Exit, load_plan
from orchestrator.planner.elastic.next_plan import next_plan
from orchestrator.planner.elastic.replan import replan
from orchestrator.planner.placement.rank_assignment import used_nodes
from orchestrator.run.create import create_run_folder
from orchestrator.run.folder import RunFolder
from orchestrator.run.intent import ask
from orchestrator.run.request import read_request
from orchestrator.run.state import Cause, EpochState, NodeState, read_state, write_state
from tests.beds.bundles import make_bundle, refusal
from tests.beds.plans import make_plan

SIZES = (4, 2)


def submitted(nodes: int):
    plan = make_plan(dp=nodes, nodes=nodes, micro_batches=4 // nodes)
    return replan(plan, plan.cluster)


@pytest.fixture
def folder(tmp_path):
    plans = {nodes: submitted(nodes) for nodes in SIZES}
    with create_run_folder(
        make_bundle(plans[4], tmp_path / "runs", sizes=plans), "slurm"
    ) as folder:
        (folder.path / "slurm").mkdir(mode=0o700)
        return folder


def attempt(folder: RunFolder, restarts: int, *nodes: str):
    """The node assignment and request of an attempt on these nodes, of which the first two are
    under one switch."""
    probe = "".join(
        f"orch-node {i} {node} spine.leaf{i // 2}.{node}\n" for i, node in enumerate(nodes)
    )
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_JOB_NODELIST": ",".join(nodes),
    }
    return assign_nodes(folder, probe, environ), read_request(folder)


def test_an_attempt_takes_the_largest_size_that_its_nodes_hold(folder):
    assignment, request = attempt(folder, 0, "a1", "a2", "b1")
    assert request.sizes == [2] and [agent.node for agent in request.agents] == [
        "a1",
        "a2",
        "b1",
    ], "one is a spare"
    assert assignment.nodes == ["a1", "a2"] == used_nodes(load_plan(folder.plan)), (
        "those that lie together"
    )
    sizes = {2: load_plan(folder.sized_plan(2))}
    assert set(sizes[2].cluster.node_names) == {"a1", "a2", "b1"}
    again = next_plan(load_plan(folder.plan), sizes, ["a1", "b1"])
    switch_count = len(again.cluster.levels[0].switches)
    assert used_nodes(again) == ["a1", "b1"] and switch_count == 2, "the spare's switch is known"

    assignment, request = attempt(folder, 1, "c1", "c2", "d1", "d2")
    assert request.sizes == [4, 2] and assignment.nodes == ["c1", "c2", "d1", "d2"]
    assert submitted_request(folder).sizes == [4, 2]
    smaller = next_plan(
        load_plan(folder.plan),
        {n: load_plan(folder.sized_plan(n)) for n in SIZES},
        ["c1", "d1", "d2"],
    )
    assert used_nodes(smaller) == ["d1", "d2"], "those that lie together"


@pytest.mark.parametrize(
    ("phase", "code", "over"), [("done", 0, True), ("failed", 1, True), ("stopped", 75, False)]
)
def test_a_job_that_slurm_requeues_after_the_end_of_its_run_does_nothing(
    folder, monkeypatch, phase, code, over
):
    """Its batch node was lost, and the remaining agents have finished the run meanwhile."""
    attempt(folder, 0, "n1", "n2", "n3", "n4")
    ended = msgspec.structs.replace(read_state(folder), state=phase, exit_code=code, reason="x")
    write_state(folder, ended)
    probe = folder.path / "nodes"
    probe.write_text("orch-node 0 m1 m1\norch-node 1 m2 m2\n")
    for name, value in {"JOB_ID": "7", "RESTART_COUNT": "1", "JOB_NODELIST": "m[1-2]"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert task.main(["place", "--run-dir", str(folder.path), "--nodes", str(probe)]) == (
        code if over else 0
    )
    assert (folder.path / "slurm" / "over").exists() == over == (read_state(folder) == ended)


def test_nodes_found_unhealthy_in_an_epoch_are_excluded_from_the_next_attempt(folder):
    def unhealthy(epoch: int, node: str, code: int = int(Exit.NODE)) -> EpochState:
        cause = Cause(kind="worker_exit", text=node, epoch=epoch, node=node, code=code)
        return EpochState(epoch=epoch, started_at=0.0, cause=cause)

    old = msgspec.structs.replace(read_state(folder), epoch=0, epochs=[unhealthy(0, "n9")])
    write_state(folder, old)  # before a resume, which allows every node again
    attempt(folder, 1, "n1", "n2", "n3", "n4")
    ended = {"state": "stopped", "exit_code": int(Exit.RESTART), "reason": "saved"}
    epochs = [*old.epochs, unhealthy(1, "n3"), unhealthy(2, "n2", code=1)]
    write_state(folder, msgspec.structs.replace(read_state(folder), **ended, epochs=epochs))
    assert task.main(["outcome", "--run-dir", str(folder.path), "--code", "0"]) == Exit.RESTART
    assert (folder.path / "slurm" / "exclude").read_text() == "n3\n"


def test_nodes_that_ended_an_attempt_or_were_excluded_in_it_are_excluded_from_the_next(folder):
    attempt(folder, 0, "n1", "n2", "n3", "n4")
    cause = Cause(kind="worker_exit", text="ECC", epoch=0, node="n4", code=int(Exit.NODE))
    ended = {
        "state": "failed",
        "exit_code": int(Exit.NODE),
        "reason": "n4",
        "cause": cause,
        "excluded": {"n1": "slow"},
    }
    write_state(folder, msgspec.structs.replace(read_state(folder), **ended))
    assert task.main(["outcome", "--run-dir", str(folder.path), "--code", "1"]) == Exit.NODE
    assert (folder.path / "slurm" / "exclude").read_text() == "n[1,4]\n"


def test_what_the_agents_could_not_start_for_is_in_the_cause(folder):
    attempt(folder, 0, "n1", "n2", "n3", "n4")
    folder.agent_log("n2").write_text("Traceback\nImportError: libtorch.so: not found\n")
    assert task.main(["outcome", "--run-dir", str(folder.path), "--code", "70"]) == Exit.CAPACITY
    assert read_state(folder).cause.text.endswith(
        "internal error in orch; ImportError: libtorch.so: not found"
    )


@pytest.mark.parametrize("lacks", ["n2", "n2,n3,n4"])
def test_nodes_that_lack_something_are_left_out_by_name(folder, lacks):
    """An elastic run goes on while a size is left; else the job comes back without them."""
    (folder.path / "nodes").write_text(
        "".join(
            f"orch-node {i} n{i} n{i}{' image' if f'n{i}' in lacks else ''}\n" for i in range(1, 5)
        )
    )
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0", "SLURM_JOB_NODELIST": "n[1-4]"}
    probe = (folder.path / "nodes").read_text()
    if lacks == "n2":
        assert len(assign_nodes(folder, probe, environ).nodes) == 2
        assert "n2" not in {agent.node for agent in read_request(folder).agents}
    else:
        with refusal("node n2 lacks: image; node n3 lacks: image", Exit.NODE):
            assign_nodes(folder, probe, environ)
    assert sorted(expand((folder.path / "slurm" / "exclude").read_text())) == lacks.split(",")


@pytest.mark.parametrize(("answers", "silent"), [((1, 2, 3), "n4"), ((2,), "n[1,3-4]"), ((), "")])
def test_nodes_that_do_not_answer_are_named_and_left_out_next_time(folder, answers, silent):
    """All of them silent is a step that could not start: no node is to blame."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0", "SLURM_JOB_NODELIST": "n[1-4]"}
    probe = "".join(f"orch-node {i} n{i} n{i}\n" for i in answers)
    with refusal("no answer from n", Exit.NODE):
        assign_nodes(folder, probe, environ)
    path = folder.path / "slurm" / "exclude"
    assert (path.read_text() if path.exists() else "").strip() == silent


@pytest.mark.parametrize("phase", ["running", "done"])
def test_an_agent_is_supervised_while_the_run_goes_on(folder, monkeypatch, phase):
    """How: test_agent_supervisor.py."""
    attempt(folder, 0, "n1", "n2", "n3", "n4")
    write_state(folder, msgspec.structs.replace(read_state(folder), state=phase))
    calls = []

    def supervise(argv, run_ended, max_restarts):
        calls.append((argv, run_ended(), max_restarts))
        return int(Exit.FENCED)

    monkeypatch.setattr("orchestrator.backends.slurm.job.agent_supervisor.supervise", supervise)
    monkeypatch.setattr(task, "environment", lambda *_: {})
    monkeypatch.setattr(task.os, "dup2", lambda *_: None)  # its output stays ours
    monkeypatch.chdir(folder.path)
    for name in ("SLURMD_NODENAME", "ORCH_SCRIPT_NODE"):
        monkeypatch.setenv(name, "n2")
    assert task.main(["agent", "--run-dir", str(folder.path)]) == Exit.FENCED
    ((argv, ended, max_restarts),) = calls
    assert {"orchestrator.agent", "--elastic", "--lifeline", "n2"} <= set(argv)
    assert ended == (phase == "done") == (folder.path / "slurm" / "ended").exists()
    assert max_restarts == read_request(folder).policy.max_restarts


# ------------------------------------------------------------------------------------------ the
#     batch node is lost

NOON = datetime(2026, 11, 21, 12)


class FakeSlurm:
    """What Slurm says of the job, and the signals that it was asked to send."""

    def __init__(
        self, nodes: str = "n[2-4]", end: str = "2026-11-21T13:00:00", state: str = "RUNNING"
    ):
        self.answer = f"JobId=7 JobState={state} EndTime={end} NodeList={nodes} BatchHost=n1\n"
        self.signals: list[tuple[str, ...]] = []

    def run(self, argv):
        return self.answer

    def cancel(self, job, *flags):
        self.signals.append(flags)


@pytest.fixture
def takeover(folder):
    """The takeover on n2, which has the coordinator; n1, the batch node, is lost. The script writes
    the arguments of its call."""
    attempt(folder, 0, "n1", "n2", "n3", "n4")
    nodes = {
        name: NodeState(state="lost" if name == "n1" else "running")
        for name in ("n1", "n2", "n3", "n4")
    }
    write_state(
        folder,
        msgspec.structs.replace(read_state(folder), state="running", writer="n2", nodes=nodes),
    )
    (folder.path / "slurm" / "script").write_text(f'echo "$@" > {folder.path}/finished\n')
    return BatchStepTakeover(folder, "n2", "n1", "7", SlurmOptions(notice_s=600), os.environ)


@pytest.mark.parametrize(
    ("slurm", "signals"),
    [
        (FakeSlurm(), 0),
        (FakeSlurm(end="2026-11-21T12:09:00"), 1),  # no script receives the notice
        (FakeSlurm(end="Unknown"), 0),
        # Slurm has not given the node up: the script may live
        (FakeSlurm(nodes="n[1-4]", end="2026-11-21T12:09:00"), 0),
    ],
)
def test_the_notice_before_the_time_limit_is_sent_once(takeover, slurm, signals):
    takeover._slurm = slurm
    assert not takeover.check(NOON) and not takeover.check(NOON)
    assert slurm.signals == [("--signal=URG",)] * signals


def test_who_takes_over_and_until_when(takeover, folder):
    takeover._slurm = slurm = FakeSlurm()
    ask(folder, "end")
    assert not takeover.check(NOON) and slurm.signals == [("--signal=URG",)]
    state = msgspec.structs.replace(read_state(folder), state="cancelled", exit_code=75)
    write_state(folder, msgspec.structs.replace(state, writer="n3"))
    assert takeover.check(NOON) and not (folder.path / "finished").exists(), (
        "the coordinator has moved: not ours"
    )
    write_state(folder, state)
    assert takeover.check(NOON) and (folder.path / "finished").read_text() == "finish 75\n"
    assert slurm.signals[1:] == [("--state=RUNNING",)], "a job that is requeued is not cancelled"
    takeover._slurm = ended = FakeSlurm(state="COMPLETING")
    assert takeover.check(NOON) and not ended.signals


def test_a_job_whose_requeue_ends_its_script_is_not_cancelled(takeover, folder):
    """A requeue kills all processes of the job in no order, so the agent may outlive the script by
    a moment."""
    (folder.path / "slurm" / "script").write_text("kill -KILL $$\n")
    write_state(folder, msgspec.structs.replace(read_state(folder), state="stopped", exit_code=75))
    takeover._slurm = slurm = FakeSlurm()
    assert not takeover.check(NOON) and not slurm.signals
    takeover._slurm = slurm = FakeSlurm(state="PENDING")
    assert takeover.check(NOON) and not slurm.signals
