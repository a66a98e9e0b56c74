"""Beds of a test session: started when a test first asks for one, and never when none does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import addons
from .bed import Bed, Shape, reap_stale
from .building import build
from .runs import SHORT, TINY, Orch, check_rank_map


def bring_up(shape: Shape, *more: str) -> Bed:
    """A bed ready to start, `more` programs built; or the test is skipped with why this machine cannot have one."""
    if os.geteuid() != 0:
        pytest.skip("no Kubernetes test cluster: only root may have name spaces with a network of their own")
    if not os.environ.get("ORCH_TEST_KUBERNETES"):
        pytest.skip("no Kubernetes test cluster: ORCH_TEST_KUBERNETES=1, or make test-kubernetes, builds and starts it")
    if reason := build((*shape.programs, *more)):
        pytest.skip(f"no Kubernetes test cluster: {reason}")
    reap_stale()
    return Bed(shape)


@pytest.fixture(scope="session")
def real_bed() -> Iterator[Bed]:
    """Two real nodes with containers, and Kueue for who names a queue."""
    with bring_up(Shape(nodes=2, kueue=True)) as bed:
        yield bed


@pytest.fixture(scope="session")
def wide_bed() -> Iterator[Bed]:
    """A thousand simulated nodes of 8 GPUs: four under a leaf, sixteen leaves under a spine."""
    with bring_up(Shape(simulated=1000)) as bed:
        yield bed


@pytest.fixture(scope="session")
def queued_bed() -> Iterator[Bed]:
    """The same with Kueue: a queue for 24 nodes and one for all others."""
    with bring_up(Shape(simulated=1000, kueue=True)) as bed:
        levels = ("orch.test/spine", "orch.test/leaf", "kubernetes.io/hostname")
        for name, gpus in (("large", 7808), ("small", 192)):
            quota = {"cpu": "128k", "memory": "2000Ti", "nvidia.com/gpu": str(gpus)}
            addons.queues(bed, quota, levels, {"orch.test/pool": name}, name)
        yield bed


@pytest.fixture
def orch(real_bed: Bed, tmp_path: Path) -> Iterator[Orch]:
    """A fresh home and namespace on the real nodes."""
    with Orch.in_new_namespace(real_bed, tmp_path) as home:
        yield home


@pytest.fixture(scope="session")
def undisturbed(real_bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run that nothing happens to."""
    with Orch.in_new_namespace(real_bed, tmp_path_factory.mktemp("undisturbed")) as orch:
        run = orch.submit(*TINY, *SHORT)
        run.wait("done")
        check_rank_map(orch, run)
        losses = run.steps()
        assert sorted(losses) == list(range(1, 61))
        assert losses[60] < losses[1] - 0.3
        logs = orch("logs", run.id, "--rank", "0").stdout
        assert logs.strip()
        return losses
