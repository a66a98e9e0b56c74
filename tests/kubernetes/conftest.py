"""Beds of a test session: started when a test first asks for one, and never when none does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.cluster.importers.kubernetes import Profile, parse_nodes
from orchestrator.cluster.model import Topology
from tests.beds.kubernetes import addons, ready
from tests.beds.kubernetes.bed import Bed, Shape, reap_stale, refusal
from tests.beds.kubernetes.building import build
from tests.beds.kubernetes.runs import SHORT, TINY, Orch, Run, check_rank_map
from tests.beds.kubernetes.simulate import LEVELS, POOL


def built(*programs: str) -> None:
    """These programs are there from now on; or the test is skipped with why this machine does not
    have them.

    Those of an earlier build will do; `make test` builds what is missing before (ready),
    ORCH_TEST_KUBERNETES=1 (make test-kubernetes) here, and 0 does without all of it.
    """
    switch = os.environ.get(ready.SWITCH)
    known_reason = os.environ.get(ready.WHY)
    reason = f"{ready.SWITCH}=0" if switch == "0" else None
    if reason := reason or build(programs, allowed=bool(switch) and not known_reason):
        reason = known_reason or reason
        pytest.skip(f"no Kubernetes test cluster: {reason}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on the real nodes come last: a bed that idles beside others costs a tenth of a
    processor."""
    indices = [index for index, item in enumerate(items) if item.get_closest_marker("kubernetes")]
    ours = sorted((items[index] for index in indices), key=_has_real_nodes)
    for index, item in zip(indices, ours, strict=True):
        items[index] = item


def _has_real_nodes(item: pytest.Item) -> bool:
    return "real_bed" in getattr(item, "fixturenames", ())


def bring_up(shape: Shape, *extra_programs: str) -> Bed:
    """A bed ready to start, `more` programs built; or the test is skipped with why this machine
    cannot have one."""
    if os.geteuid() != 0:
        pytest.skip(
            "no Kubernetes test cluster: only root may have name spaces with a network of their own"
        )
    built(*shape.programs, *extra_programs)
    if reason := refusal(shape):
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
def queued_bed(request) -> Iterator[Bed]:
    """The same with JobSet and Kueue: a queue for 24 nodes and one for all others. In the tier
    three spines will do."""
    full = any(item.get_closest_marker("full") for item in request.session.items)
    count = 1000 if full else 192
    with bring_up(Shape(simulated=count, kueue=True, jobset=full)) as bed:
        levels = ("orch.test/spine", "orch.test/leaf", "kubernetes.io/hostname")
        for name, gpus in (("large", 8 * (count - POOL)), ("small", 8 * POOL)):
            quota = {"cpu": "128k", "memory": "2000Ti", "nvidia.com/gpu": str(gpus)}
            addons.queues(bed, quota, levels, {"orch.test/pool": name}, name)
        yield bed


@pytest.fixture
def topology(orch: Orch) -> Topology:
    """The topology as an administrator would see it: written from the API server's nodes, not from
    what the run was told."""
    nodes_json = orch.bed.kubectl("get", "nodes", "-o", "json", timeout=120)
    return parse_nodes(
        nodes_json, Profile(levels={name: [label] for name, label in reversed(LEVELS.items())})
    )


@pytest.fixture
def ended(orch: Orch) -> Iterator[Callable[[Run], Run]]:
    """Runs that the test leaves are taken out after it, and their nodes are free again."""
    runs: list[Run] = []
    yield lambda run: runs.append(run) or run
    for run in runs:
        orch("cancel", "--force", run.id, code=None)
        for kind in (
            "jobs",
            "jobsets",
        ):  # of a run that has ended by itself; without JobSet there is no such kind
            delete_command = ("delete", kind, "-l", f"orch.dev/run={run.id}", "--wait=false")
            orch.bed.kubectl(*delete_command, check=False, timeout=300)
        names = ("get", "pods", "-n", orch.namespace, "-l", f"orch.dev/run={run.id}", "-o", "name")
        orch.bed.wait(
            lambda names=names: not orch.bed.kubectl(*names, timeout=300), 900, f"end of {run.id}"
        )


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
