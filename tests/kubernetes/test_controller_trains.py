"""Training under the controller on real nodes: two kubelets, containers, checkpoints on a claim,
many faults."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.plan import Exit
from tests.beds.kubernetes import controllers, nodes
from tests.beds.kubernetes.bed import Bed, Shape
from tests.beds.kubernetes.controllers import controller
from tests.beds.kubernetes.runs import SHORT, TINY, Orch, Run

from .conftest import bring_up

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow, pytest.mark.full]


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with bring_up(Shape(nodes=2)) as started_bed:
        controllers.install(started_bed)
        yield started_bed


@pytest.fixture
def orch(bed, tmp_path) -> Iterator[Orch]:
    with Orch.in_new_namespace(bed, tmp_path) as home:
        yield home


@pytest.fixture(scope="module")
def undisturbed(bed, tmp_path_factory) -> dict[int, float]:
    """Losses of the run that nothing happens to, without a controller."""
    with Orch.in_new_namespace(bed, tmp_path_factory.mktemp("undisturbed")) as orch:
        run = orch.submit(*TINY, *SHORT, options={"controller": "never"})
        run.wait("done")
        return run.steps()


def status(run: Run) -> dict:
    return run.orch.bed.get("trainrun", "-n", run.orch.namespace, run.id)["status"]


def test_a_run_says_how_it_is_and_goes_on_after_its_pod_its_controller_and_its_cancel(
    orch, undisturbed
):
    with controller(orch.bed, "train-1") as first:
        run = orch.submit_held(*TINY, *SHORT)
        run.step(5)
        run.until(
            "its step in the status",
            lambda: status(run).get("step", 0) >= 5 and status(run).get("loss"),
        )
        assert status(run)["state"] == "running" and status(run)["nodes"] == "4/4"
        first.signal(signal.SIGKILL)
        run.step(10)  # nobody is needed to train on
    with controller(orch.bed, "train-2"):
        victim = orch.pods(run.id)[2]["metadata"]["name"]
        orch.bed.kubectl("delete", "pod", "-n", orch.namespace, victim, "--wait=false")
        run.step(25)
        orch("cancel", run.id)
        assert run.state().state == "cancelled" and not orch.pods(run.id)
        assert run.saved()
        run.release()
        orch("resume", run.id)
        run.wait("done")
        assert run.steps() == pytest.approx(undisturbed, abs=1e-9)
        final_status = status(run)
        assert (final_status["state"], final_status["step"], final_status["exitCode"]) == (
            "done",
            60,
            0,
        )
        assert (
            final_status["lostPods"] >= 1
            and final_status["generation"] == 1
            and 0 < final_status["ettr"] <= 1
        )


def test_a_program_travels_through_the_controller(orch, tmp_path):
    """Into the pods of two nodes. Something else in its place is refused."""
    program = tmp_path / "program"
    program.mkdir()
    (program / "library.py").write_text("WORD = 'as submitted'")
    (program / "train.py").write_text("import library, os\nprint(library.WORD, os.listdir('.'))")
    words = [word for word in orch.submission()[1:] if word != "--in-place"]
    two_pods = ("cluster=local", "cluster.nodes=2", "cluster.gpus_per_node=1", "parallel=dp2")
    with controller(orch.bed, "code"):
        argv = ("submit", *words, *two_pods, "--", "python3", "train.py")
        run = Run(orch, json.loads(orch(*argv, cwd=program).stdout)["run_dir"])
        run.wait("done")
        for rank in ("0", "1"):
            printed = orch("logs", run.id, "--rank", rank).stdout
            assert "as submitted" in printed and "library.py" in printed
        maps = ("configmaps", "-n", orch.namespace, "-l", "orch.dev/code")
        [chunk] = orch.bed.get(*maps)["items"]
        name = chunk["metadata"]["name"]
        orch.bed.kubectl("delete", "configmap", "-n", orch.namespace, name)
        kept = ("name", "namespace", "labels")
        metadata = {field: chunk["metadata"][field] for field in kept}
        orch.bed.apply({**chunk, "metadata": metadata, "binaryData": {"code.000": "AAAA"}})
        done = orch(*argv, cwd=program, code=Exit.SECURITY)
        assert "does not hold the code that its name promises: delete it" in done.stderr


def test_an_elastic_run_goes_on_with_the_pods_that_are_left(orch, undisturbed):
    """A pod deleted, a whole node killed, and back again: the run never ends, and its losses are
    the same."""
    with controller(orch.bed, "elastic"):
        run = orch.submit(
            *TINY, *SHORT, "nodes=2..4", "train.steps=100000", options={"grow_after_s": 2}
        )
        run.step(3)
        life = lambda: status(run)["generation"]  # noqa: E731
        victim = orch.pods(run.id)[1]["metadata"]["name"]
        orch.bed.kubectl("delete", "pod", "-n", orch.namespace, victim, "--wait=false")
        run.until("fewer nodes", lambda: run.state().epoch >= 1)
        before = max(run.steps())
        run.step(before + 3)
        nodes.kill(orch.bed, 1)
        try:
            nodes.wait_ready(orch.bed, "node-1", ready=False)
            before = max(run.steps())
            run.step(before + 3)
            plan = json.loads((run.inside / "plan.json").read_text())
            assert {rank["node"].split(".pod-")[0] for rank in plan["ranks"]} == {"node-0"}
        finally:
            nodes.start(orch.bed, 1, again=True)
            nodes.wait_ready(orch.bed, "node-1")
        run.until(
            "all four again",
            lambda: len(json.loads((run.inside / "plan.json").read_text())["ranks"]) == 8,
        )
        before = max(run.steps())
        run.step(max(before + 3, 60))
        assert life() == 0 and status(run)["state"] == "running"
        assert run.state().restarts == 0
        orch("cancel", run.id)
        losses = run.steps()
        assert sorted(losses) == list(range(1, len(losses) + 1))
        assert [losses[step] for step in range(1, 61)] == pytest.approx(
            [undisturbed[s] for s in range(1, 61)], rel=1e-4
        )


def test_an_upgrade_goes_on_from_the_checkpoints(orch, tmp_path: Path):
    """Other words of the same run: it saves, leaves, and goes on under the new plan."""
    overrides = [
        "cluster=local",
        "cluster.nodes=4",
        "cluster.gpus_per_node=2",
        *SHORT,
        "train.steps=100000",
    ]
    body = {
        "apiVersion": "orch.dev/v1alpha1",
        "kind": "TrainRun",
        "metadata": {"name": "upgraded", "namespace": orch.namespace},
        "spec": {"words": [*overrides, "parallel=tp2_pp2"], "options": {**orch.options}},
    }
    with controller(orch.bed, "upgrade"):
        orch.bed.apply(body)
        run = Run(orch, str(orch.home / "runs" / "upgraded"))
        run.step(5)
        orch.bed.apply({**body, "spec": {**body["spec"], "words": [*overrides, "parallel=tp2"]}})
        run.until(
            "the new plan",
            lambda: status(run).get("generation") == 1 and status(run)["state"] == "running",
        )
        assert run.saved()
        run.until("steps under it", lambda: run.steps(since_epoch=1))
        first = min(run.steps(since_epoch=1))
        assert first > 5  # from what the old plan had saved
        run.step(first + 3)
        steps = run.steps()  # once: it goes on
        assert sorted(steps) == list(range(1, max(steps) + 1))
