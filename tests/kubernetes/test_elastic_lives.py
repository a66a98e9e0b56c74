"""Pods of an elastic run without a cluster: any may go, come back or be missing at first, and the
run goes on."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from orchestrator.agent.node.connection import CoordinatorAddress
from orchestrator.backends.kubernetes.pod.elastic import Begun, Waiting, come_together, map_elastic
from orchestrator.backends.kubernetes.pod.rendezvous import Join
from orchestrator.backends.kubernetes.pod.status_lines import parse_status_line
from orchestrator.plan import Exit, Plan, seal
from orchestrator.planner.elastic.replan import replan
from orchestrator.planner.placement.rank_assignment import used_nodes
from orchestrator.run.folder import RunFolder, write_private
from tests.beds.base import wait
from tests.beds.bundles import refusal
from tests.beds.plans import make_plan
from tests.patience import PATIENCE_S

from .test_lives import AGAIN, Pods

BATCH = 12  # samples: every size up to four divides it


def sized(nodes: int, cache: Path | None = None) -> Plan:
    plan = make_plan(dp=nodes, nodes=nodes, micro_batches=BATCH // nodes, steps=100_000)
    if cache is not None:
        data = structs.replace(plan.job.data, cache_dir=str(cache))
        plan = seal(structs.replace(plan, job=structs.replace(plan.job, data=data), hash=""))
    return replan(plan, plan.cluster)


# ------------------------------------------------------------------------------------------ coming
#     together


class Together:
    """Pods as threads over one folder."""

    def __init__(self, path: Path, together: int, least: int = 2):
        self.folder = RunFolder(path)
        self.together = together
        self.least = least
        self.folder.path.mkdir()
        (self.folder.path / "kubernetes").mkdir()
        self.begun: dict[int, Begun] = {}
        self.members: list[list[int]] = []
        self.threads: list[threading.Thread] = []

    def come(self, *indices: int) -> None:
        for index in indices:
            waiting_pod = Waiting(
                index=index, node=f"n{index}", address="a", pod=f"p{index}", together=self.together
            )
            thread = threading.Thread(target=self._wait, args=(waiting_pod,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def _wait(self, waiting_pod: Waiting) -> None:
        def begin(members: list[Join]) -> str:
            self.members.append([pod.index for pod in members])
            return "hash"

        self.begun[waiting_pod.index] = come_together(
            self.folder,
            waiting_pod,
            least=self.least,
            heartbeat_s=1.0,
            timeout_s=60.0,
            begin=begin,
            settle_s=3.0,
        )

    def all(self) -> dict[int, Begun]:
        for thread in self.threads:
            thread.join(PATIENCE_S)
        return self.begun


def test_pods_that_are_all_there_begin_at_once_and_one_of_them_says_with_what(tmp_path):
    pods = Together(tmp_path / "run", 4)
    pods.come(3, 1, 0, 2)
    starts = pods.all()
    assert pods.members == [[0, 1, 2, 3]]
    assert {starts[i].attempt.plan_hash for i in range(4)} == {"hash"}
    assert not list((pods.folder.path / "kubernetes" / "waiting").iterdir())


def test_those_that_are_there_begin_without_those_that_do_not_come(tmp_path):
    """Pod 0 is not needed either."""
    pods = Together(tmp_path / "run", 4)
    pods.come(1, 2, 3)
    assert len(pods.all()) == 3
    assert pods.members == [[1, 2, 3]]


def test_too_few_say_so(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    waiting_pod = Waiting(index=0, node="n", address="a", pod="p", together=2)
    with refusal("at least 2 are needed", Exit.CAPACITY):
        come_together(
            folder,
            waiting_pod,
            least=2,
            heartbeat_s=0.1,
            timeout_s=1.0,
            begin=lambda members: "",
            settle_s=0.1,
        )


def test_a_pod_that_comes_while_somebody_coordinates_joins_that_run(tmp_path):
    pods = Together(tmp_path / "run", 4)
    over = threading.Event()

    def beat() -> None:
        address = CoordinatorAddress(host="h", port=1, node="n9", epoch=3)
        while not over.wait(0.2):
            address = msgspec.structs.replace(address, heartbeats=address.heartbeats + 1)
            write_private(pods.folder.coordinator, msgspec.json.encode(address), durable=False)

    threading.Thread(target=beat, daemon=True).start()
    assert wait(pods.folder.coordinator.exists, 10)
    pods.come(2)
    assert pods.all()[2].attempt is None and not pods.members
    over.set()
    time.sleep(0.5)
    pods.come(0, 1)  # the coordinator is gone: after its time they begin anew
    assert pods.all()[0].attempt is not None and pods.members == [[0, 1]]


def test_ranks_go_to_as_many_pods_as_make_a_legal_size():
    plans = {nodes: sized(nodes) for nodes in (4, 2, 1)}
    members = [Join(index, f"n{index}", "a", f"p{index}") for index in (0, 2, 3)]
    placement = map_elastic(plans, members, None, shared=True)
    assert placement.names == ["n0.pod-0", "n2.pod-2", "n3.pod-3"]
    assert used_nodes(placement.mapping.plan) == ["n0.pod-0", "n2.pod-2"]  # the third is a spare
    assert set(placement.names) <= set(placement.plans[4].cluster.node_names)
    with refusal("fewer than the smallest size", Exit.CAPACITY):
        map_elastic({2: plans[2]}, members[:1], None, shared=False)


# ------------------------------------------------------------------------------------------ whole
#     lives


@pytest.fixture
def pods(tmp_path):
    """A run of three pods of one worker, which two or one can go on with."""
    runs: list[Pods] = []

    def make(*sizes: int, **wishes: object) -> Pods:
        plans = {nodes: sized(nodes, tmp_path / "data") for nodes in sizes}
        does = {"STEPS": 100_000, "STEP_S": 0.05, "SAVE": 1, **wishes}
        largest = max(sizes)
        runs.append(Pods(tmp_path / "run", plans[largest], largest, plans, **does))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.processes.values():
            process.kill()
            process.wait()


def busy(run: Pods, *indices: int, after: int = -1) -> int:
    """Once workers run on exactly these pods, in an epoch after `after`, and listen for signals:
    that epoch."""

    def there() -> bool:
        try:
            state = run.state
        except (OSError, ValueError):
            return False
        epoch = state["epoch"]
        running = {
            name: node["ranks"]
            for name, node in state["nodes"].items()
            if node["state"] == "running"
        }
        ranked = {name for name, ranks in running.items() if ranks}
        names = {f"n{index}.pod-{index}" for index in indices}
        if state["state"] != "running" or epoch <= after or ranked != names:
            return False
        # A worker that gets SIGTERM before it has written its pid is ended by it, and saves
        # nothing.
        return all(
            (run.run / f"pid-{epoch}-{rank}").exists() for name in names for rank in running[name]
        )

    run.until(there)
    return run.state["epoch"]


@pytest.mark.process
def test_a_run_goes_on_with_the_pods_that_are_left_and_takes_in_those_that_come(pods):
    """Killed, told to leave, come back; pod 0, where the coordinator was, too."""
    run = pods(3, 2, 1)
    run.start()
    first = busy(run, 0, 1, 2)
    run.processes[0].kill()
    second = busy(run, 1, 2, after=first)
    run.processes[2].send_signal(signal.SIGTERM)
    assert run.processes[2].wait(PATIENCE_S) == Exit.RESTART
    third = busy(run, 1, after=second)
    run.start(0, 2, together=3)  # their replacements: with pod 1's node the run has three
    fourth = busy(run, 0, 1, 2, after=third)
    state = run.state
    assert state["restarts"] == 0 and state["epoch"] == fourth
    assert not [epoch for epoch in state["epochs"] if epoch.get("counted")]
    telling_pods = [index for index in range(3) if any(
        status_line.state != b"null" for line in run.log(index).splitlines()
        if (status_line := parse_status_line(line))
    )]  # fmt: skip
    assert telling_pods  # whoever coordinates says how the run is
    for index in range(3):
        run.processes[index].send_signal(signal.SIGTERM)
    assert set(run.codes()) == {Exit.RESTART}


@pytest.mark.process
def test_below_its_smallest_size_a_run_saves_and_waits(pods):
    run = pods(3, 2)
    run.start()
    first = busy(run, 0, 1, 2)
    run.processes[1].kill()
    busy(run, 0, 2, after=first)
    run.processes[2].send_signal(signal.SIGTERM)
    assert run.processes[2].wait(PATIENCE_S) == Exit.RESTART
    run.until(lambda: AGAIN in run.log(0))
    assert list(run.run.glob("saved-*"))
    before = run.state["epoch"]
    run.start(2, together=2)  # as Kubernetes does: it comes back, and two are enough again
    busy(run, 0, 2, after=before)


@pytest.mark.process
def test_a_run_that_is_done_is_done_for_whoever_comes_later(pods):
    run = pods(2, 1, STEPS=20)
    run.start()
    assert run.codes() == [0, 0], run.log(0)
    assert json.loads((run.run / "state.json").read_text())["state"] == "done"
    run.start(1)
    assert run.processes[1].wait(PATIENCE_S) == Exit.DONE
