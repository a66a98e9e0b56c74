"""Kueue on real nodes: a run that has to make room saves, waits, and ends as if nothing had happened."""

from __future__ import annotations

import json

import pytest

from . import addons
from .runs import SHORT, TINY, Orch

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def queue(orch) -> str:
    """In this namespace; there is room in it for one run of four pods."""
    quota = {"cpu": "3.3", "memory": "14Gi"}
    levels = ("orch.test/rack", "kubernetes.io/hostname")
    addons.queues(orch.bed, quota, levels, {"orch.test/kind": "real"}, "one-run", orch.namespace)
    return "one-run"


def stop_queue(orch: Orch, name: str, policy: str) -> None:
    patch = json.dumps({"spec": {"stopPolicy": policy}})
    orch.bed.kubectl("patch", "clusterqueue", name, "--type=merge", "-p", patch)


def test_a_run_that_is_preempted_and_evicted_comes_back_and_its_losses_are_the_same(orch, queue):
    """As those of the run that it made room for: the same job, which nothing happened to."""
    job = [*TINY, *SHORT, "train.steps=120"]  # long enough that it is not over before the other one comes
    low = orch.submit(*job, options={"queue": queue})
    low.step(1)
    high = orch.submit(*job, options={"queue": queue, "workload_priority": "high"})
    low.until("preemption", lambda: "reempt" in (low.state().reason or ""))
    assert low.state().state == "pending"
    high.step(1)  # its pods run: those of the other have left
    saved = [max(low.saved())]
    high.wait("done")
    low.until("second life", lambda: len(low.steps(since_epoch=1)) > 3)
    stop_queue(orch, queue, "HoldAndDrain")
    low.until("eviction", lambda: "stopped" in (low.state().reason or ""))
    low.until("end of its pods", lambda: not orch.pods(low.id))
    saved.append(max(low.saved()))
    stop_queue(orch, queue, "None")
    low.wait("done")
    for epoch, step in enumerate(saved, start=1):  # it had time to save, and went on from there
        assert min(low.steps(since_epoch=epoch)) == step + 1
    assert sorted(high.steps()) == list(range(1, 121))
    assert low.steps() == pytest.approx(high.steps(), abs=1e-9)
    assert not orch.bed.get("job", low.id, "-n", orch.namespace)["status"].get("failed")  # nothing of it is counted
