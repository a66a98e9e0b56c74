"""Kueue on real nodes: a run that has to make room saves, waits, and ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import addons
from .bed import Shape
from .conftest import bring_up
from .runs import SHORT, TINY, Orch

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]


@pytest.fixture
def orch(tmp_path) -> Iterator[Orch]:
    """Two real nodes with Kueue, and in this namespace room for one run of four pods."""
    with bring_up(Shape(nodes=2, kueue=True)) as bed, Orch.in_new_namespace(bed, tmp_path) as home:
        quota = {"cpu": "3.3", "memory": "14Gi"}
        levels = ("orch.test/rack", "kubernetes.io/hostname")
        addons.queues(bed, quota, levels, {"orch.test/kind": "real"}, "one-run", home.namespace)
        yield home


def test_a_preempted_run_comes_back_and_its_losses_are_the_same(orch):
    """As those of the run that it made room for: the same job, which nothing happened to."""
    low = orch.submit(*TINY, *SHORT, options={"queue": "one-run"})
    low.step(5)
    high = orch.submit(*TINY, *SHORT, options={"queue": "one-run", "workload_priority": "high"})
    low.until("preemption", lambda: "reempt" in (low.state().reason or ""), 120)
    assert low.state().state == "pending"
    high.wait("done")
    assert max(low.saved()) >= 5  # it had time to save, though no checkpoint was due before step 20
    low.wait("done", seconds=400)
    assert sorted(high.steps()) == list(range(1, 61))
    assert low.steps() == pytest.approx(high.steps(), abs=1e-9)
    job = orch.bed.get("job", low.id, "-n", orch.namespace)
    assert not job["status"].get("failed")  # nothing of it is counted
