"""Kueue on real nodes: a run that has to make room saves, waits, and ends as if nothing had
happened."""

from __future__ import annotations

import json

import pytest

from tests.beds.kubernetes import addons
from tests.beds.kubernetes.runs import SHORT, TINY, Orch

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow, pytest.mark.full]


@pytest.fixture
def queue(orch) -> str:
    """A queue of this namespace; there is room in it for one run of four pods. `later` is another
    door to it, still closed."""
    quota = {"cpu": "3.3", "memory": "14Gi"}
    levels = ("orch.test/rack", "kubernetes.io/hostname")
    addons.queues(orch.bed, quota, levels, {"orch.test/kind": "real"}, "one-run", orch.namespace)
    spec = {"clusterQueue": "one-run", "stopPolicy": "Hold"}
    about = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "LocalQueue"}
    orch.bed.apply(
        {**about, "metadata": {"name": "later", "namespace": orch.namespace}, "spec": spec}
    )
    return "one-run"


def stop(orch: Orch, kind: str, name: str, policy: str) -> None:
    patch = json.dumps({"spec": {"stopPolicy": policy}})
    orch.bed.kubectl("patch", kind, name, "-n", orch.namespace, "--type=merge", "-p", patch)


def test_runs_that_make_room_come_back_and_their_losses_are_the_same(orch, queue, undisturbed):
    """One for a run of higher priority, which the administrator then sends away for a while, too.

    That one has no end of its own, and is there before it may come: whatever is slow here, nothing
    is over too early.
    """
    endless = ("train.steps=100000",)
    high = orch.submit(
        *TINY, *SHORT, *endless, options={"queue": "later", "workload_priority": "high"}
    )
    low = orch.submit_held(*TINY, *SHORT, options={"queue": queue})
    low.step(1)
    stop(orch, "localqueue", "later", "None")
    low.until("preemption", lambda: "reempt" in (low.state().reason or ""))
    assert low.state().state == "pending"
    high.step(1)  # its pods run: those of the other have left
    saved = max(low.saved())
    assert saved < 60

    stop(orch, "clusterqueue", queue, "HoldAndDrain")
    high.until("eviction", lambda: "stopped" in (high.state().reason or ""))
    high.until("end of its pods", lambda: not orch.pods(high.id))
    before = max(high.saved())
    stop(orch, "clusterqueue", queue, "None")
    high.until("a second life", lambda: len(high.steps(since_epoch=1)) >= 3)
    orch("cancel", high.id)
    assert (
        min(high.steps(since_epoch=1)) == before + 1
    )  # it had time to save, and went on from there
    compared_steps = sorted(high.steps())[:60]
    assert [high.steps()[step] for step in compared_steps] == pytest.approx(
        [undisturbed[step] for step in compared_steps], abs=1e-9
    )

    low.release()
    low.wait("done")
    assert min(low.steps(since_epoch=1)) == saved + 1
    assert low.steps() == pytest.approx(undisturbed, abs=1e-9)
    assert not orch.bed.get("job", low.id, "-n", orch.namespace)["status"].get(
        "failed"
    )  # nothing of it is counted
