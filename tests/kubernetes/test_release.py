"""The chart's life on a real control plane without nodes: installed, upgraded, rolled back, gone
without a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.beds.kubernetes import addons
from tests.beds.kubernetes.bed import Bed, Shape
from tests.beds.kubernetes.building import program
from tests.beds.kubernetes.runs import Helm

from .conftest import bring_up
from .test_chart import CHART, FULL

pytestmark = [pytest.mark.kubernetes, pytest.mark.process, pytest.mark.slow]
SPACE = "llm"
#: Kept by the cluster for itself, or gone by themselves.
OTHERS = {"events", "events.events.k8s.io", "leases.coordination.k8s.io", "componentstatuses"}


class Release(Helm):
    def names(self, kind: str) -> list[str]:
        bodies = self.bed.get(kind, "-n", SPACE, "-l", "app.kubernetes.io/instance=my-run")["items"]
        return sorted(body["metadata"]["name"] for body in bodies)

    def everything(self) -> set[str]:
        """Every object of the cluster, of any kind."""
        kinds = (
            set(self.bed.kubectl("api-resources", "--verbs=list,delete", "-o", "name").split())
            - OTHERS
        )
        columns = "custom-columns=A:.kind,B:.metadata.namespace,C:.metadata.name"
        lines = self.bed.kubectl(
            "get", ",".join(sorted(kinds)), "-A", "--no-headers", "-o", columns
        ).splitlines()
        return {" ".join(line.split()) for line in lines}


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory) -> Iterator[Bed]:
    """A control plane with the kinds that the chart may be asked to make: Kueue's, and monitoring's
    as far as Helm sees them."""
    with bring_up(Shape(), "helm") as bed:
        addons.kueue_kinds(bed)
        bed.apply(
            *(
                addons.any_kind("monitoring.coreos.com", "v1", kind)
                for kind in ("PodMonitor", "PrometheusRule")
            )
        )
        bed.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}})
        bed.wait(
            lambda: bed.kubectl("get", "configmap", "-n", SPACE, "kube-root-ca.crt", check=False),
            60,
            "namespace",
        )
        yield bed


@pytest.fixture
def helm(control_plane) -> Release:
    return Release(control_plane, SPACE)


def test_install_upgrade_rollback_uninstall_leaves_nothing(helm):
    full = {**FULL, "claim": {"create": True, "storageClass": "", "keep": False}}
    before = helm.everything()
    helm("install", "my-run", CHART, values=full)
    first = helm.names("jobs")
    assert len(first) == 1
    asked_for = (
        "podmonitors",
        "prometheusrules",
        "clusterqueues",
        "localqueues",
        "topologies",
        "resourceflavors",
    )
    assert all(helm.names(kind) for kind in asked_for)
    helm("upgrade", "my-run", CHART, values={**full, "parallel": "dp64_zero1"})
    second = helm.names("jobs")
    assert len(second) == 1
    assert second != first  # another run
    helm("rollback", "my-run", "1")
    assert helm.names("jobs") == first
    helm("uninstall", "my-run", "--wait", "--timeout", "60s")
    helm.bed.wait(lambda: helm.everything() <= before, 60, "end of everything")
    assert helm.everything() == before


def test_the_launcher_reads_and_writes_its_own_secret_alone(helm):
    """The API server judges it: server-side apply creates an object under a right that names it."""
    helm("install", "my-run", CHART, values=FULL)
    try:
        run_id = next(
            name for name in helm.names("configmaps") if name.endswith("-values")
        ).removesuffix("-values")
        who = (f"--as=system:serviceaccount:{SPACE}:my-run-launcher", "-n", SPACE)
        for name, refused in ((run_id, False), ("of-somebody-else", True)):
            body = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name},
                "stringData": {"key": "x"},
            }
            applied = helm.bed.run(
                str(program("kubectl")),
                *who,
                "apply",
                "--server-side",
                "-f",
                "-",
                check=False,
                input=json.dumps(body),
            )
            assert ("forbidden" in applied.stderr) == refused, applied.stderr
            fetched = helm.bed.run(
                str(program("kubectl")), *who, "get", "secret", name, check=False
            )
            assert ("forbidden" in fetched.stderr) == refused, fetched.stderr
    finally:
        helm("uninstall", "my-run", "--wait", "--timeout", "60s")
        helm.bed.kubectl("delete", "secret,pvc", "-n", SPACE, "--all", "--wait=false")


@pytest.mark.full
def test_another_launcher_for_the_same_run_is_an_upgrade_too(helm):
    """A Job's pods cannot be changed: the launcher is another Job, of the same run."""
    helm("install", "my-run", CHART, values=FULL)
    try:
        maps = helm.names("configmaps")
        jobs = helm.names("jobs")
        helm(
            "upgrade", "my-run", CHART, values={**FULL, "launcher": {"environment": {"A": "other"}}}
        )
        assert helm.names("configmaps") == maps
        assert len(helm.names("jobs")) == 1
        assert helm.names("jobs") != jobs
    finally:
        helm("uninstall", "my-run", "--wait", "--timeout", "60s")
    assert helm.names("persistentvolumeclaims") == [
        "my-run-runs"
    ]  # checkpoints outlive a release, as values say
    helm.bed.kubectl("delete", "pvc", "-n", SPACE, "my-run-runs", "--wait=false")


def test_a_value_that_no_schema_knows_is_refused_before_anything_is_made(helm):
    before = helm.everything()
    done = helm("install", "my-run", CHART, values={**FULL, "options": {"que": "a"}}, check=False)
    assert done.returncode != 0
    assert "'que'" in done.stderr or '"que"' in done.stderr, done.stderr
    assert helm.everything() == before
