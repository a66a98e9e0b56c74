"""Real training in real pods: two kubelets, containers under the restricted profile, checkpoints on
a claim."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from tests.beds.bundles import reports
from tests.beds.kubernetes import nodes
from tests.beds.kubernetes.runs import SHORT, TINY

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow, pytest.mark.full]


def test_a_deleted_pod_comes_back_and_the_losses_are_the_same(orch, undisturbed):
    run = orch.submit_held(*TINY, *SHORT)
    run.step(5)
    victim = orch.pods(run.id)[2]["metadata"]["name"]
    orch.bed.kubectl("delete", "pod", "-n", orch.namespace, victim, "--wait=false")
    run.until(
        "its successor",
        lambda: victim not in {pod["metadata"]["name"] for pod in orch.pods(run.id)},
    )
    run.release()
    run.wait("done")
    assert run.steps() == pytest.approx(undisturbed, abs=1e-9)


def test_each_lost_pod_is_back_as_soon_as_the_first_one(orch, undisturbed):
    """The Job's own wait is 10 s for an index that has failed once, whatever has happened to the
    others; and only the lost pod is made anew. Where all of them failed with it, the first wait was
    80 s, and the next ten minutes."""
    run = orch.submit(*TINY, *SHORT, "train.steps=100000")
    for index in (2, 0, 3):
        before = {pod["metadata"]["uid"] for pod in orch.pods(run.id)}
        run.step(max(run.steps(), default=0) + 3)
        epoch = max(report["epoch"] for report in reports(run.inside / "metrics"))
        victim = orch.pods(run.id)[index]["metadata"]["name"]
        deleted_at = time.time()
        orch.bed.kubectl("delete", "pod", "-n", orch.namespace, victim, "--wait=false")
        run.until(
            "steps of the next life", lambda epoch=epoch: len(run.steps(since_epoch=epoch + 1)) >= 3
        )
        [replacement] = [pod for pod in orch.pods(run.id) if pod["metadata"]["uid"] not in before]
        assert replacement["metadata"]["name"].startswith(f"{run.id}-{index}-")
        assert (
            datetime.fromisoformat(replacement["metadata"]["creationTimestamp"]).timestamp()
            - deleted_at
            < 60
        )
    orch("cancel", run.id)
    losses = run.steps()
    first = range(1, 13)
    assert [losses[step] for step in first] == pytest.approx(
        [undisturbed[step] for step in first], abs=1e-9
    )


def test_pods_on_their_nodes_networks_train(orch, undisturbed):
    """There they bear the nodes' names and addresses, and a node has ports for one of them."""
    label = "pod-security.kubernetes.io/enforce=privileged"
    orch.bed.kubectl("label", "namespace", orch.namespace, label, "--overwrite")
    two_nodes = [override for override in TINY if not override.startswith("cluster.nodes=")] + [
        "cluster.nodes=2"
    ]
    run = orch.submit(*two_nodes, *SHORT, options={"pod": {"spec": {"hostNetwork": True}}})
    run.wait("done")
    assert run.steps() == pytest.approx(undisturbed, rel=1e-4)  # one replica sums in another order


def test_a_drained_node_costs_nothing_but_time(orch, undisturbed):
    """Its pods save on notice and wait for room; what ended so is not counted."""
    run = orch.submit_held(*TINY, *SHORT)
    run.step(5)
    flags = (
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        "--pod-selector",
        f"orch.dev/run={run.id}",
    )
    try:
        orch.bed.kubectl("drain", "node-1", *flags, "--timeout=120s", timeout=150)
        assert "node-1" not in {pod["spec"].get("nodeName") for pod in orch.pods(run.id)}
    finally:
        orch.bed.kubectl("uncordon", "node-1")
    run.release()
    run.wait("done")
    assert run.steps() == pytest.approx(undisturbed, abs=1e-9)


def test_a_node_that_dies_is_let_go_and_the_run_comes_back(orch, undisturbed):
    """Kubelet, containerd, shims and containers killed at once. Its pods would hang in Terminating
    for ever."""
    run = orch.submit_held(*TINY, *SHORT)
    run.step(21)  # one checkpoint is there
    dead = {
        pod["metadata"]["name"] for pod in orch.pods(run.id) if pod["spec"]["nodeName"] == "node-1"
    }
    nodes.kill(orch.bed, 1)
    try:
        nodes.wait_ready(orch.bed, "node-1", ready=False)
        run.until("words of what was done", lambda: "ended by force" in (run.state().reason or ""))
        run.until(
            "end of them", lambda: not dead & {pod["metadata"]["name"] for pod in orch.pods(run.id)}
        )
    finally:
        nodes.start(orch.bed, 1, again=True)
        nodes.wait_ready(orch.bed, "node-1")
    run.release()
    run.wait("done")
    assert run.steps() == pytest.approx(undisturbed, abs=1e-9)


def test_cancel_saves_and_resume_goes_on(orch, undisturbed):
    run = orch.submit_held(*TINY, *SHORT)
    run.step(5)
    orch("cancel", run.id)
    assert run.state().state == "cancelled"
    assert orch.pods(run.id) == []
    assert max(run.saved()) >= 3
    run.release()
    orch("resume", run.id)
    run.wait("done")
    assert run.steps() == pytest.approx(undisturbed, abs=1e-9)


def test_an_elastic_run_is_resized_there_and_back(orch, undisturbed):
    """It goes from four pods to two and to four again: the same global batch, each time from what
    the others had saved.

    It has no end of its own, so that it is never over before it is resized; its rate of learning is
    as long constant.
    """
    run = orch.submit(*TINY, *SHORT, "nodes=2..4", "train.steps=100000")
    for epoch, pods in enumerate((4, 2, 4)):
        if epoch:
            orch("resize", run.id, str(pods), timeout=600)
            before = max(run.steps())
            assert before in run.saved()
        run.until("steps of this life", lambda epoch=epoch: len(run.steps(since_epoch=epoch)) >= 3)
        assert len(orch.pods(run.id)) == pods
        assert len(run.plan["ranks"]) == 2 * pods
        if epoch:
            assert (
                min(run.steps(since_epoch=epoch)) == before + 1
            )  # they went on where the others had stopped
    orch("cancel", run.id)
    losses = run.steps()
    assert sorted(losses) == list(range(1, len(losses) + 1))
    assert losses[len(losses)] < losses[1] - 0.3
    compared_steps = sorted(losses)[:60]
    assert [losses[step] for step in compared_steps] == pytest.approx(
        [undisturbed[step] for step in compared_steps], rel=1e-4
    )
