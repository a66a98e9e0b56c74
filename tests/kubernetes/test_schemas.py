"""Every rendering against the schemas of several Kubernetes versions, by kubeconform: no field that
a version lacks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from msgspec import structs

from orchestrator.backends.kubernetes.objects.node_affinity import ChosenNodes
from orchestrator.backends.kubernetes.objects.render import render
from orchestrator.backends.kubernetes.options import KubernetesOptions
from tests.beds.kubernetes import schemas
from tests.beds.kubernetes.building import program

from .conftest import built
from .test_chart import CHART, FULL
from .test_chart_helm import rendered
from .test_render import CASES, main_line, manifest  # noqa: F401

pytestmark = [pytest.mark.kubernetes, pytest.mark.process]
#: Beside the golden ones: the other kind with everything, and the nodes that a run without a queue
#: is given.
MORE = {
    "excluded": {"queue": "team-a", "exclude": ["n1.example.org"], "bad_nodes": ["n2"]},
    "everything, jobset": {**CASES["everything"], "kind": "jobset"},
    "everything, queue": {**CASES["everything"], **CASES["queue"]},
}
CHOSEN = {
    "chosen under a switch": ChosenNodes(
        ("n1", "n2"), "example.org/leaf", ("leaf-1",), rest=("n1", "n2")
    ),
    "chosen with spares": ChosenNodes(("n1", "n2"), rest=("n1", "n2"), spares=("n3",)),
    "whole switches": ChosenNodes(
        ("n1", "n2"), spares=("n3",), whole=(("example.org/leaf", ("leaf-1",)),), rest=("n2",)
    ),
}
Check = Callable[[list[dict]], dict[str, list[dict]]]


@pytest.fixture(scope="module")
def check(tmp_path_factory) -> Check:
    """What kubeconform says of these objects, resource by resource, for each version."""
    built("kubeconform")
    path = tmp_path_factory.mktemp("rendered") / "all.yaml"
    try:
        folder = schemas.folder()
    except (RuntimeError, OSError) as error:
        pytest.skip(f"no schemas: {error}")
    locations = [
        argument
        for location in schemas.LOCATIONS
        for argument in ("-schema-location", f"{folder}/{location}")
    ]

    def run(bodies: list[dict]) -> dict[str, list[dict]]:
        path.write_text(yaml.safe_dump_all(bodies))
        resources = {}
        for version in schemas.KUBERNETES:
            argv = [
                str(program("kubeconform")),
                "-strict",
                "-verbose",
                "-output",
                "json",
                *locations,
            ]
            argv += ["-kubernetes-version", version.removeprefix("v"), str(path)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
            resources[version] = json.loads(done.stdout)["resources"]
            assert len(resources[version]) == len(bodies), done.stdout + done.stderr
        return resources

    return run


def wrong(resources: dict[str, list[dict]]) -> list[tuple[str, str, str]]:
    return [
        (v, resource["kind"], resource["msg"])
        for v, all in resources.items()
        for resource in all
        if resource["status"] != "statusValid"
    ]


def test_every_object_of_every_run(check, main_line):  # noqa: F811
    runs = [manifest(main_line, options) for options in (CASES | MORE).values()]
    runs += [structs.replace(manifest(main_line, {}), chosen=chosen) for chosen in CHOSEN.values()]
    runs.append(
        structs.replace(
            manifest(main_line, {}), train_run="1234", gated=True, environment_secret="env"
        )
    )
    bodies = [json.loads(json.dumps(body)) for run in runs for body in render(run)]
    assert {body["kind"] for body in bodies} == {
        "Secret",
        "ConfigMap",
        "Service",
        "NetworkPolicy",
        "Job",
        "JobSet",
    }
    assert wrong(check(bodies)) == []


def test_every_option_is_in_some_rendering():
    """Left out are those that say where and how the run is sent, not what."""
    covered = set().union(*CASES.values(), *MORE.values()) | {"image"}
    elsewhere = {
        "context",
        "profile",
        "slices",
        "python",
        "user",
        "unreachable_s",
        "rendezvous_timeout_s",
    }
    elsewhere |= {
        "gpu_resource",
        "max_pod_failures",
        "max_pod_returns",
        "pull_policy",
    }  # plain values in fields that are always there
    elsewhere |= {
        "controller",
        "grow_after_s",
        "gang",
        "gang_queue",
    }  # gangs: kinds that no version of all these has
    assert set(KubernetesOptions.__struct_fields__) - covered - elsewhere == set()


def test_every_template_of_the_chart(check):
    built("helm")
    helm = program("helm")
    bodies = [*rendered(helm, FULL), *rendered(helm, {"image": FULL["image"]})]
    templates = {p.name for p in Path(CHART, "templates").rglob("*.yaml")}
    assert len(templates) >= 8
    assert {"PodMonitor", "PrometheusRule", "Topology", "ClusterQueue", "Role"} <= {
        body["kind"] for body in bodies
    }
    assert wrong(check(bodies)) == []


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_field_that_nobody_knows_is_found(check, main_line, kind):  # noqa: F811
    """The checker checks: strictly, deep inside, in every version."""
    job = json.loads(json.dumps(render(manifest(main_line, {"kind": kind}))[-1]))
    spec = job["spec"] if kind == "job" else job["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec["template"]["spec"]["containers"][0]["securityContext"]["privilegedd"] = True
    assert {version for version, _, _ in wrong(check([job]))} == set(schemas.KUBERNETES)
