"""One cluster a test session (and xdist worker), started when a test first asks for it, never when
none does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.beds.slurm.cluster import Cluster, reap_stale
from tests.beds.slurm.cluster_conf import Shape
from tests.beds.slurm.packages import install
from tests.beds.slurm.runs import Orch

settings.register_profile(
    "shared machine", deadline=None
)  # others may have the cores at the moment
settings.load_profile("shared machine")


def bring_up(shape: Shape) -> Cluster:
    """A started cluster, or the test is skipped with the reason why this machine cannot have
    one."""
    if reason := install(shape.accounting):
        pytest.skip(f"no Slurm test cluster: {reason}")
    reap_stale()
    return Cluster(shape)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first, so that none of them is left for one worker when the others have ended.

    Each worker has clusters of its own, which start in two seconds. Tests mostly wait, so they run
    well beside each other and beside everything else.
    """
    slots = [slot for slot, item in enumerate(items) if item.get_closest_marker("slurm")]
    ours = sorted((items[slot] for slot in slots), key=_is_short)
    for slot, item in zip(slots, ours, strict=True):
        items[slot] = item


def _is_short(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is None


@pytest.fixture(scope="session")
def full_cluster() -> Iterator[Cluster]:
    """8 nodes x 8 GPUs, two leaves, no accounting."""
    with bring_up(Shape()) as cluster:
        yield cluster


@pytest.fixture
def cluster(full_cluster: Cluster) -> Iterator[Cluster]:
    """The session's cluster, empty: jobs of an earlier test are gone, all nodes are up and idle."""
    full_cluster.reset()
    yield full_cluster
    full_cluster.reset()


@pytest.fixture(scope="session")
def small_cluster() -> Iterator[Cluster]:
    """8 nodes x 2 GPUs in two leaves: real training fits, and so does a lifecycle of many runs."""
    with bring_up(Shape(gpus=2, grace_s=30)) as cluster:
        yield cluster


@pytest.fixture
def orch(small_cluster: Cluster, tmp_path: Path) -> Iterator[Orch]:
    """A fresh home on the small cluster."""
    small_cluster.reset()
    yield Orch(small_cluster, tmp_path)
    small_cluster.reset()
