"""A thousand simulated nodes: where pods come to lie, with Kueue and without, and runs that compete
for room."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.backends.kubernetes.pod.rank_mapping import RankMapping, map_ranks
from orchestrator.backends.kubernetes.pod.rendezvous import Join
from orchestrator.cluster.model import Topology
from orchestrator.plan import Exit, Plan, load_plan
from orchestrator.run.bad_nodes import BadNode, NodeMemory
from tests.beds.kubernetes import addons
from tests.beds.kubernetes.bed import Bed, BedError
from tests.beds.kubernetes.runs import Orch, Run
from tests.beds.kubernetes.simulate import FINISHES, LEVELS

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]
MAIN = ("+cluster=h100x64", "parallel=tp8_pp4_zero1")
#: 4,096 GPUs of the same machines: 128 pipelines of four nodes.
LARGE = """
defaults:
  - h100x64
  - _self_
name: h100x4096
nodes: 512
levels:
  - {name: leaf, nodes_per_switch: 4, gbit_per_s: 400, latency_us: 9.6, source: "the simulated nodes' shape"}
  - {name: spine, nodes_per_switch: 64, gbit_per_s: 400, latency_us: 10.1, source: "the simulated nodes' shape"}
  - {name: core, nodes_per_switch: 512, gbit_per_s: 400, latency_us: 10.6, source: "one more switch each way"}
"""


@pytest.fixture(params=[pytest.param("alone", marks=pytest.mark.full), "kueue"])
def queue(request) -> str | None:
    """The Kueue queue that runs go to, or that there is no Kueue."""
    return "large" if request.param == "kueue" else None


@pytest.fixture
def orch(request, queue, tmp_path) -> Orch:
    bed = request.getfixturevalue("queued_bed" if queue else "wide_bed")
    options = {"image": "orch.test/none:1", "levels": LEVELS, **({"queue": queue} if queue else {})}
    return Orch(bed, tmp_path, "default", options)


def bound(orch: Orch, run: Run, count: int) -> list[str]:
    """The run's nodes by completion index, once the scheduler has given every pod one."""
    try:
        return [pod["spec"]["nodeName"] for pod in orch.bound(run.id, count)]
    except (subprocess.TimeoutExpired, BedError) as error:
        raise AssertionError(f"{error}\n{run.state()}\n{run.logs()}") from None


def seated(run: Run, nodes: Sequence[str], topology: Topology) -> RankMapping:
    """What pod 0 makes of these pods: the code that runs inside them."""
    members = [Join(index, node, "", f"pod-{index}") for index, node in enumerate(nodes)]
    return map_ranks(load_plan(run.folder / "plan.json"), members, topology)


def leaves(topology: Topology) -> dict[str, str]:
    return {node: leaf for leaf, nodes in topology.tiers[0].switches.items() for node in nodes}


def split_pipelines(plan: Plan, topology: Topology) -> int:
    """Pipelines whose ranks lie under more than one leaf."""
    leaf = leaves(topology)
    return sum(
        len({leaf[plan.ranks[rank].node] for rank in group}) > 1 for group in plan.groups["pp"]
    )


def split_slices(nodes: Sequence[str], topology: Topology, size: int = 4) -> int:
    """Runs of `size` neighbouring completion indices that lie under more than one leaf."""
    leaf = leaves(topology)
    slices = [nodes[start : start + size] for start in range(0, len(nodes), size)]
    return sum(len({leaf[node] for node in pod_slice}) > 1 for pod_slice in slices)


# ------------------------------------------------------------------------------------------ placed


def test_every_pipeline_lies_under_one_leaf(orch, queue, ended, topology):
    """Kueue keeps the pods' indices in plan order, too; without it pod 0 maps the ranks to where
    their pods are."""
    run = ended(orch.submit(*MAIN))
    nodes = bound(orch, run, 8)
    assert len(set(nodes)) == 8
    seating = seated(run, nodes, topology)
    assert split_pipelines(seating.plan, topology) == 0
    if queue:
        assert split_slices(nodes, topology) == 0
        assert [rank.node for rank in seating.plan.ranks] == [
            node for node in nodes for _ in range(8)
        ]


def test_nodes_that_a_run_has_found_bad_get_no_pod_of_the_next(orch, ended):
    """The same plan on the same idle cluster: but for the list it would get the same nodes."""
    before = ended(orch.submit(*MAIN))
    nodes = bound(orch, before, 8)
    orch("cancel", "--force", before.id)
    orch.bed.wait(lambda: not orch.pods(before.id), 900, f"end of {before.id}")
    now = time.time()
    bad = {nodes[0], nodes[5]}
    for node in bad:
        bad_node = BadNode(
            cluster="h100x64", node=node, why="ECC", run=before.id, at=now, until=now + 3600
        )
        NodeMemory(orch.home).add(bad_node)
    after = ended(orch.submit(*MAIN))
    assert bad.isdisjoint(bound(orch, after, 8))
    assert (
        set(json.loads((after.folder / "request.json").read_text())["backend_options"]["bad_nodes"])
        == bad
    )


@pytest.mark.parametrize("aware", [True, False], ids=["aware of topology", "not aware"])
def test_a_queue_puts_no_pod_on_a_node_that_is_left_out(queued_bed, tmp_path, aware):
    """There are three leaves of four nodes; whoever keeps pipelines together has two of them left.
    The node is named in full, its label is short. A run that needs more is held up by Kueue if that
    knows single nodes, else by the scheduler."""
    bed = queued_bed
    name = "twelve-aware" if aware else "twelve"
    twelve = [f"sim-{index}" for index in range(12)]
    out = "sim-5"
    levels = ("orch.test/spine", "orch.test/leaf", "kubernetes.io/hostname") if aware else ()
    bed.kubectl("label", "nodes", *twelve, f"orch.test/pool={name}", "--overwrite")
    bed.kubectl("label", "node", out, "kubernetes.io/hostname=short", "--overwrite")
    addons.queues(
        bed,
        {"cpu": "2k", "memory": "40Ti", "nvidia.com/gpu": "96"},
        levels,
        {"orch.test/pool": name},
        name,
    )
    options = {
        "image": "orch.test/none:1",
        "queue": name,
        "exclude": [out],
        **({"levels": LEVELS} if aware else {}),
    }
    orch = Orch(bed, tmp_path, "default", options)
    small = orch.submit(*MAIN)
    where = set(bound(orch, small, 8))
    assert where == {*twelve[:4], *twelve[8:]} if aware else where < {*twelve} - {out}
    taken_out(orch, small)
    excluded = [out, *(f"sim-{index}" for index in (1, 6, 9, 10))]
    large = orch.submit(*MAIN, options={"exclude": excluded})
    says = "allow to fit any of 2 slice" if aware else "didn't match Pod's node affinity/selector"
    large.until(says, lambda: says in (large.state().reason or ""), 300)
    assert {pod["spec"].get("nodeName") for pod in orch.pods(large.id)}.isdisjoint(excluded)
    taken_out(orch, large)
    bed.kubectl("label", "node", out, f"kubernetes.io/hostname={out}", "--overwrite")
    bed.kubectl("label", "nodes", *twelve, "orch.test/pool=large", "--overwrite")


def taken_out(orch: Orch, run: Run) -> None:
    orch("cancel", "--force", run.id)
    orch.bed.wait(lambda: not orch.pods(run.id), 900, f"end of {run.id}")


@pytest.mark.full
def test_five_hundred_and_twelve_nodes_in_one_run(orch, queue, ended, topology):
    submit_command = orch.submission()
    conf = Path(submit_command[submit_command.index("--config-dir") + 1], "cluster")
    conf.mkdir()
    (conf / "h100x4096.yaml").write_text(LARGE)
    done = orch(*submit_command, "+cluster=h100x4096", "parallel=tp8_pp4_zero1", timeout=1200)
    run = ended(Run(orch, json.loads(done.stdout)["run_dir"]))
    nodes = bound(orch, run, 512)
    assert len(set(nodes)) == 512
    assert split_pipelines(seated(run, nodes, topology).plan, topology) == 0
    if queue:
        assert split_slices(nodes, topology) == 0


# ------------------------------------------------------------------------------------------
#     competing


def jobs(bed: Bed) -> list[dict]:
    return bed.get("jobs", "-l", "orch.test/race=ten")["items"]


def finished(job: dict) -> bool:
    return any(
        c["type"] == "Complete" and c["status"] == "True"
        for c in job["status"].get("conditions", ())
    )


@pytest.mark.full
def test_ten_runs_compete_for_room_for_three_and_all_finish(orch, queue):
    """24 nodes, ten runs of eight. Without a queue a submission that finds no room says so (76),
    and is tried again."""
    bed = orch.bed
    together = []
    halves = []
    bed.kubectl("delete", "jobs", "-l", "orch.test/race=ten", "--wait=true", timeout=120)
    options = {"labels": {"orch.test/race": "ten"}, "annotations": {FINISHES: "yes"}}
    options |= {"queue": "small"} if queue else {"node_selector": {"orch.test/pool": "small"}}
    over = threading.Event()

    def submit(index: int) -> int:
        submit_command = orch.submission(options)
        tries = 0
        while not over.is_set():
            done = orch(*submit_command, *MAIN, f"run.name=race-{index}", code=None, timeout=600)
            tries += 1
            if done.returncode == 0:
                return tries
            assert done.returncode == Exit.CAPACITY, done.stderr
        return tries

    def watch() -> None:
        while not over.wait(0.5):
            pods = bed.get("pods", "-l", "orch.test/race=ten")["items"]
            alive = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
            placed = [pod["spec"]["nodeName"] for pod in alive if pod["spec"].get("nodeName")]
            together.append(len({pod["metadata"]["labels"]["orch.dev/run"] for pod in alive}))
            halves.append(len(placed) != len(set(placed)))

    with ThreadPoolExecutor(11) as pool:
        watching = pool.submit(watch)
        try:
            tries = list(pool.map(submit, range(10)))
            everyone = lambda: len(ten := jobs(bed)) == 10 and all(map(finished, ten))  # noqa: E731
            bed.wait(everyone, 300, "end of ten runs")
        finally:
            over.set()
        watching.result()
    assert len(tries) == 10
    assert max(together) <= 3
    assert not any(halves)  # no node was given twice
    for job in jobs(bed):
        assert job["status"]["succeeded"] == 8
        assert not job["status"].get("failed")
    bed.kubectl("delete", "jobs", "-l", "orch.test/race=ten", "--wait=false")
