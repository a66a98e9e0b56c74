"""One cluster a test session (and xdist worker), started when a test first asks for it, never when none does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster import Cluster, reap_stale
from .cluster_conf import Shape
from .packages import install


def bring_up(shape: Shape) -> Cluster:
    """A started cluster, or the test is skipped with the reason why this machine cannot have one."""
    if reason := install(shape.accounting):
        pytest.skip(f"no Slurm test cluster: {reason}")
    reap_stale()
    return Cluster(shape)


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
