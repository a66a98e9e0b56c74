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
    job = [*TINY, *SHORT, "train.steps=150"]  # long enough that it is not over before the other one comes
    low = orch.submit(*job, options={"queue": "one-run"})
    low.step(1)
    high = orch.submit(*job, options={"queue": "one-run", "workload_priority": "high"})
    low.until("preemption", lambda: "reempt" in (low.state().reason or ""), 120)
    assert low.state().state == "pending"
    high.step(1)  # its pods run: those of the other have left
    saved = max(low.saved())
    high.wait("done", seconds=400)
    low.wait("done", seconds=400)
    assert min(low.steps(since_epoch=1)) == saved + 1  # it had time to save, and went on from there
    assert sorted(high.steps()) == list(range(1, 151))
    assert low.steps() == pytest.approx(high.steps(), abs=1e-9)
    assert not orch.bed.get("job", low.id, "-n", orch.namespace)["status"].get("failed")  # nothing of it is counted
